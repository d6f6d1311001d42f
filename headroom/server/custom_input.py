"""InputText: reads the text of a custom tool's call from the JSON arguments, as they stream in."""

from pydantic_core import from_json

from headroom.text.conversation import INPUT

ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
HIGH, LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)  # the halves of a surrogate pair


class InputText:
    """Reads the text of a custom tool from the only argument of the function that stands for it.

    If the model wrote other JSON, `push` returns nothing, and `finish` returns all of it as text.
    """

    def __init__(self) -> None:
        self._json: list[str] = []  # the pieces so far
        self._head = ""  # the JSON before the text
        self._tail = ""  # the beginning of an escape sequence
        self._texts: list[str] = []
        self._state = "head"  # then "text", then "end"; "other" if the JSON is not as expected

    @classmethod
    def of(cls, arguments: str) -> str:
        """Return the text in complete arguments."""
        reader = cls()
        return reader.push(arguments) + reader.finish()

    def push(self, piece: str) -> str:
        """Take the next piece of JSON, and return what it adds to the text."""
        self._json.append(piece)
        if self._state == "head":
            self._head += piece
            piece = self._read_head()
        if self._state != "text":
            return ""
        text = self._read_text(self._tail + piece)
        self._texts.append(text)
        return text

    def finish(self) -> str:
        """Return the rest of the text; no more pieces come."""
        if self._state in ("text", "end"):
            return ""
        arguments = "".join(self._json)
        try:
            value = from_json(arguments)
        except ValueError:
            return arguments
        text = value.get(INPUT) if isinstance(value, dict) else None
        return text if isinstance(text, str) else arguments

    def _read_head(self) -> str:
        """Look for the beginning of the text; return what follows it."""
        rest = self._head
        for mark in ("{", f'"{INPUT}"', ":", '"'):
            rest = rest.lstrip()
            if not rest.startswith(mark):
                if not mark.startswith(rest):
                    self._state = "other"
                return ""
            rest = rest.removeprefix(mark)
        self._state = "text"
        return rest

    def _read_text(self, coded: str) -> str:
        """Return the characters of a piece of a JSON string; keep an incomplete escape sequence."""
        text, at, self._tail = "", 0, ""
        while at < len(coded):
            char = coded[at]
            if char == '"':
                self._state = "end"
                break
            if char != "\\":
                text, at = text + char, at + 1
                continue
            escaped = _read_escape(coded[at:])
            if escaped is None:
                self._tail = coded[at:]
                break
            text, at = text + escaped[0], at + escaped[1]
        return text


def _read_escape(coded: str) -> tuple[str, int] | None:
    """Return the character of the escape that a text begins with, and its length; None if cut."""
    if len(coded) < 2:
        return None
    if coded[1] != "u":
        return ESCAPES.get(coded[1], coded[1]), 2
    if len(coded) < 6:
        return None
    first = _code(coded[2:6])
    if first not in HIGH:
        return chr(first) if first not in LOW else "\ufffd", 6
    if len(coded) < 12 and "\\u".startswith(coded[6:8]):
        return None
    second = _code(coded[8:12]) if coded[6:8] == "\\u" else 0
    if second not in LOW:
        return "\ufffd", 6
    return chr(0x10000 + ((first - HIGH.start) << 10) + (second - LOW.start)), 12


def _code(digits: str) -> int:
    try:
        return int(digits, 16)
    except ValueError:
        return 0xFFFD
