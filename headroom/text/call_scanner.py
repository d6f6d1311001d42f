"""CallScanner: reads tool calls from an answer's text while the text still streams in."""

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from headroom.text.conversation import Tool
from headroom.text.stops import overlap

T = TypeVar("T")
# A generator that reads a part of the answer. It yields when it needs more text to go on. So its
# result depends on the whole text only, never on how the text was cut into pieces.
Reading = Generator[None, None, T]
BLANKS = " \t\r\n"
# For members of an object whose values may not be strings: what turns a string into JSON text of
# another type.
Converters = Mapping[str, Callable[[str], str]]
NO_CONVERTERS: Converters = {}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)  # of JSON
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_WORDS |= {"True": "true", "False": "false", "None": "null"}  # as Python prints them
_ESCAPES = '"\\/bfnrt'
QUOTES = ('"', "'")  # of strings; some models write objects as Python prints them


class NotACallError(Exception):
    """The text at this place is not a tool call, or it is one that breaks off."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """A piece of text outside of calls."""

    text: str
    start: int = 0  # its place in the answer: characters before it


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call: its name is known."""

    name: str
    id: str  # "" if the model did not write one


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments of the call that began last, as JSON text."""

    json: str


CallEvent = PlainText | CallStart | CallArguments


class CallScanner:
    """Holds the text that is not read yet, and the events that were read from earlier text.

    A reader moves through the text with `advance` and the methods that take text. `commit` makes
    this final; `rewind` goes back to the last commit, so that text which turned out not to be a
    call can be emitted as plain text.
    """

    def __init__(self, tools: Collection[Tool]) -> None:
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self.events: list[CallEvent] = []
        self.ended = False  # no more text comes
        self.in_call = False  # a call's start was emitted, and the call has not ended
        self.calls = 0  # calls whose start was emitted
        self.has_text = False  # text outside of calls was emitted
        self._text = ""
        self._dropped = 0  # characters of the answer before `_text`
        self._position = 0  # text before this index has been read
        self._committed = 0  # text before this index has been emitted, or was markup of a call

    @property
    def rest(self) -> str:
        """The text that has come and is not read yet."""
        return self._text[self._position :]

    @property
    def uncommitted(self) -> str:
        """The text that was read since the last commit."""
        return self._text[self._committed : self._position]

    @property
    def held(self) -> int:
        """The number of characters that may still have to be emitted as plain text."""
        return len(self._text) - self._committed

    def push(self, text: str) -> None:
        """Append the next piece of the answer."""
        self._text = self._text[self._committed :] + text
        self._dropped += self._committed
        self._position -= self._committed
        self._committed = 0

    def advance(self, characters: int) -> None:
        """Move forward by some characters, or back if the number is negative."""
        self._position += characters

    def commit(self) -> None:
        """Make final what was read so far: `rewind` does not go back behind it."""
        self._committed = self._position

    def rewind(self) -> None:
        """Go back to the last commit."""
        self._position = self._committed
        self.in_call = False

    def emit_text(self, text: str) -> None:
        """Emit a piece of text outside of calls, which ends where the scanner is."""
        if text:
            start = self._dropped + self._position - len(text)
            self.events.append(PlainText(text, start))
            self.has_text = True

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Emit the start of a call; raise NotACallError if no tool has the name."""
        if name not in self.tools:
            raise NotACallError(f"There is no tool {name!r}.")
        self.events.append(CallStart(name, call_id))
        self.in_call = True
        self.calls += 1
        self.commit()

    def add_json(self, arguments: str) -> None:
        """Emit a piece of the JSON text of the call's arguments."""
        assert self.in_call
        if arguments:
            self.events.append(CallArguments(arguments))
        self.commit()

    def add_string_piece(self, text: str) -> None:
        """Emit a piece of text as a piece of a JSON string, which the caller begins and ends."""
        self.add_json(json.dumps(text, ensure_ascii=False)[1:-1])

    def end_call(self) -> None:
        """End the call that began last."""
        self.in_call = False
        self.commit()

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end of the answer."""
        while self._position == len(self._text) and not self.ended:
            yield
        return self._text[self._position : self._position + 1]

    def starts_with(self, mark: str) -> Reading[bool]:
        """Return whether a mark comes next."""
        while True:
            begin = self._text[self._position : self._position + len(mark)]
            if not mark.startswith(begin):
                return False
            if len(begin) == len(mark):
                return True
            if self.ended:
                return False
            yield

    def starts_with_any(self, marks: Collection[str]) -> Reading[bool]:
        """Return whether one of several marks comes next."""
        for mark in marks:
            if (yield from self.starts_with(mark)):
                return True
        return False

    def take(self, mark: str) -> Reading[bool]:
        """Read a mark if it comes next, and return whether it did."""
        found = yield from self.starts_with(mark)
        if found:
            self.advance(len(mark))
        return found

    def expect(self, mark: str) -> Reading[None]:
        """Read a mark that must come next; raise NotACallError if something else comes."""
        if not (yield from self.take(mark)):
            raise NotACallError(f"Expected {mark!r}.")

    def take_all(self, characters: str) -> Reading[str]:
        """Read up to the first character that is not among the given ones."""
        return (yield from self._take_while(lambda character: character in characters))

    def take_before(self, characters: str) -> Reading[str]:
        """Read up to the first character that is among the given ones."""
        return (yield from self._take_while(lambda character: character not in characters))

    def _take_while(self, wanted: Callable[[str], bool]) -> Reading[str]:
        taken = ""
        while True:
            end = start = self._position
            while end < len(self._text) and wanted(self._text[end]):
                end += 1
            self._position = end
            taken += self._text[start:end]
            if end < len(self._text) or self.ended:
                return taken
            yield

    def skip_blanks(self) -> Reading[None]:
        """Read white space."""
        yield from self.take_all(BLANKS)

    def take_name(self, ends: str) -> Reading[str]:
        """Read the name of a tool, which one of the given characters ends.

        White space around the name is dropped. As soon as no tool's name begins with what was read,
        this raises NotACallError: text that only looks like a call is not held back for long.
        """
        yield from self.skip_blanks()
        name = ""
        while (character := (yield from self.peek())) and character not in ends:
            name += character
            if not any(known.startswith(name.rstrip()) for known in self.tools):
                raise NotACallError(f"There is no tool {name!r}.")
            self.advance(1)
        if not character:
            raise NotACallError("The name has no end.")
        return name.rstrip()

    def take_through(self, mark: str) -> Reading[str]:
        """Read up to the end of a mark, and return what comes before the mark."""
        while (place := self._text.find(mark, self._position)) < 0:
            if self.ended:
                raise NotACallError(f"There is no {mark!r}.")
            yield
        taken = self._text[self._position : place]
        self._position = place + len(mark)
        return taken

    def stream_until(
        self,
        mark: str,
        follows: Collection[str],
        emit: Callable[[str], None],
        *,
        trims: bool,  # one line break at each end belongs to the markup
    ) -> Reading[None]:
        """Read a text up to the end of its end mark, and pass it to `emit` as it comes.

        The mark ends the text only if one of `follows`, or the end of the answer, comes after it.
        Otherwise it is a part of the text: a model may write a file that contains the mark.
        """
        if trims and not (yield from self.take("\r\n")):
            yield from self.take("\n")
        while True:
            rest = self.rest
            place = rest.find(mark)
            if place < 0:
                safe = len(rest) - (0 if self.ended else overlap(rest, [mark]))
            else:
                after = rest[place + len(mark) :].lstrip()
                if any(after.startswith(follow) for follow in follows):
                    break
                if not any(follow.startswith(after) for follow in follows):
                    place += len(mark)
                    self.advance(place)
                    emit(rest[:place])
                    continue
                if self.ended:
                    break
                safe = place
            if trims and not self.ended:  # hold back a line break, or its first half
                safe = len(rest[:safe].removesuffix("\n").removesuffix("\r"))
            self.advance(safe)
            emit(rest[:safe])
            if self.ended:
                raise NotACallError(f"There is no {mark!r}.")
            yield
        self.advance(place + len(mark))
        emit(_without_line_break(rest[:place]) if trims else rest[:place])

    def take_value(
        self,
        mark: str,
        follows: Collection[str],
        *,
        opens: str,  # brackets that may begin the text if it is JSON
        trims: bool,
    ) -> Reading[str]:
        """Read a text up to the end of its end mark, and return it when it is complete.

        The mark ends the text in the same cases as for `stream_until`, but not inside a string of a
        JSON object or list. If the mark comes only inside strings, the JSON is broken, and the
        first mark ends the text.
        """
        if trims and not (yield from self.take("\r\n")):
            yield from self.take("\n")
        first, place, start = -1, -1, 0
        while True:
            rest = self.rest
            place = rest.find(mark, start)
            if place < 0:
                if self.ended:
                    break
                start = max(start, len(rest) - len(mark) + 1)
                yield
                continue
            after = rest[place + len(mark) :].lstrip()
            is_end = any(after.startswith(follow) for follow in follows)
            may_be_end = any(follow.startswith(after) for follow in follows)
            if may_be_end and not is_end and not self.ended:
                yield
                continue
            if is_end or may_be_end:
                if not (rest.lstrip().startswith(tuple(opens)) and _ends_in_string(rest[:place])):
                    break
                first = place if first < 0 else first
            start = place + len(mark)
        place = first if place < 0 else place
        if place < 0:
            raise NotACallError(f"There is no {mark!r}.")
        self.advance(place + len(mark))
        return _without_line_break(rest[:place]) if trims else rest[:place]


def _ends_in_string(text: str) -> bool:
    """Return whether a JSON text breaks off inside a string."""
    return '"' in _STRING.sub("", text)


def _without_line_break(text: str) -> str:
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def read_string(scan: CallScanner, emit: Callable[[str], None]) -> Reading[None]:
    """Read a string and pass it to `emit` as a JSON string, as it comes.

    The string may stand between single quotes, as Python writes it. Line breaks and backslashes
    that the model forgot to escape are escaped. Half a surrogate pair becomes the replacement
    character.
    """
    quote = "'" if (yield from scan.starts_with("'")) else '"'
    yield from scan.expect(quote)
    emit('"')
    while True:
        emit((yield from _string_run(scan, quote)))
        character = yield from scan.peek()
        if not character:
            raise NotACallError("A string has no end.")
        if character == quote:
            scan.advance(1)
            emit('"')
            return
        if character == "\\":
            emit((yield from _read_escape(scan, quote)))
        elif character < " ":
            scan.advance(1)
            emit(json.dumps(character)[1:-1])


def _string_run(scan: CallScanner, quote: str) -> Reading[str]:
    """Read the characters that have come, up to the quote, a backslash or a control character."""
    yield from scan.peek()
    rest = scan.rest
    end = 0
    while end < len(rest) and rest[end] not in (quote, "\\") and rest[end] >= " ":
        end += 1
    scan.advance(end)
    return rest[:end].replace('"', '\\"')


def _read_escape(scan: CallScanner, quote: str) -> Reading[str]:
    """Read a backslash and what belongs to it, and return a valid escape sequence."""
    yield from scan.expect("\\")
    kind = yield from scan.peek()
    if not kind:
        raise NotACallError("A string has no end.")
    if kind != "u":
        if kind in _ESCAPES or kind == quote:
            scan.advance(1)
            return kind if kind == "'" else "\\" + kind
        return "\\\\"  # the backslash itself, as in a regular expression that was not escaped
    scan.advance(1)
    first = yield from _hex_digits(scan)
    if first is None:
        return "\\\\u"
    if not 0xD800 <= int(first, 16) < 0xE000:
        return f"\\u{first}"
    if int(first, 16) >= 0xDC00 or not (yield from scan.take("\\u")):
        return "\\ufffd"
    second = yield from _hex_digits(scan)
    if second is None:
        return "\\ufffd\\\\u"
    if 0xDC00 <= int(second, 16) < 0xE000:
        return f"\\u{first}\\u{second}"
    scan.advance(-len(f"\\u{second}"))  # an escape of its own, which may begin a pair
    return "\\ufffd"


def _hex_digits(scan: CallScanner) -> Reading[str | None]:
    """Read four hexadecimal digits; None, with nothing read, if others come."""
    digits = ""
    while len(digits) < 4:
        digit = yield from scan.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            scan.advance(-len(digits))
            return None
        digits += digit
        scan.advance(1)
    return digits


def read_json_value(
    scan: CallScanner,
    emit: Callable[[str], None],
    ends: Collection[str] = (),
    converters: Converters = NO_CONVERTERS,
) -> Reading[None]:
    """Read one JSON value and pass it to `emit` as it comes, with small mistakes mended.

    A comma before a closing bracket is dropped. Python's True, False and None become true, false
    and null, and its strings in single quotes JSON strings. Brackets that are still open where one
    of `ends` comes are closed. If the value is an object, strings whose keys are in `converters`
    are converted.
    """
    stack: list[str] = []  # the closing brackets that are still to come
    gap = ""  # white space and a comma that are read and not yet passed on
    key = ""  # the member of the outermost object that is being read
    wants = "value"  # or "key", "colon", "next": a comma or a closing bracket
    while True:
        gap += yield from scan.take_all(BLANKS)
        character = yield from scan.peek()
        closes = bool(stack) and character == stack[-1]
        if not character:  # the answer breaks off: what was read belongs to the value
            emit(gap)
            gap = ""
        if closes and wants != "colon":
            if wants == "value" and character == "}":
                raise NotACallError("A key has no value.")
            scan.advance(1)
            emit(gap.replace(",", "") + stack.pop())
            wants, gap = "next", ""
        elif wants == "next":
            if character == ",":
                scan.advance(1)
                gap += ","
                wants = "key" if stack[-1] == "}" else "value"
            else:
                if not (yield from scan.starts_with_any(ends)):
                    raise NotACallError("A comma or a bracket is missing.")
                emit("".join(reversed(stack)))
                return
        elif wants == "colon":
            yield from scan.expect(":")
            emit(gap + ":")
            wants, gap = "value", ""
        elif wants == "key":
            if character not in QUOTES:
                raise NotACallError("A key is missing.")
            emit(gap)
            pieces: list[str] = []
            yield from read_string(scan, _both(pieces.append, emit))
            key = json.loads("".join(pieces)) if len(stack) == 1 else key
            wants, gap = "colon", ""
        elif character in ("{", "["):
            scan.advance(1)
            emit(gap + character)
            stack.append("}" if character == "{" else "]")
            wants, gap = ("key" if character == "{" else "value"), ""
        else:
            emit(gap)
            gap, wants = "", "next"
            if character in QUOTES and stack == ["}"] and key in converters:
                emit(converters[key]((yield from read_string_value(scan))))
            elif character in QUOTES:
                yield from read_string(scan, emit)
            else:
                emit((yield from _read_plain_value(scan)))
        if not stack and wants == "next":
            return


def _both(first: Callable[[str], None], second: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes a text on to two others."""

    def emit(text: str) -> None:
        first(text)
        second(text)

    return emit


def _read_plain_value(scan: CallScanner) -> Reading[str]:
    """Read a number, true, false or null."""
    word = yield from scan.take_before(BLANKS + ',:]}[{"<')
    value = _WORDS.get(word, word if _NUMBER.fullmatch(word) else None)
    # A value at the very end of the answer is refused: its last digits may be missing.
    if value is None or not (yield from scan.peek()):
        raise NotACallError(f"{word!r} is not a JSON value.")
    return value


def read_string_value(scan: CallScanner) -> Reading[str]:
    """Read a string of JSON or Python and return its text."""
    pieces: list[str] = []
    yield from read_string(scan, pieces.append)
    text: str = json.loads("".join(pieces))
    return text


def whole_json(text: str, converters: Converters = NO_CONVERTERS) -> str | None:
    """Return a text that is one JSON value, with small mistakes mended; None if it is not one.

    If the value is an object, strings whose keys are in `converters` are converted.
    """
    scan = CallScanner(())
    scan.push(text.strip() + "\n")
    scan.ended = True
    pieces: list[str] = []
    try:
        for _ in read_json_value(scan, pieces.append, converters=converters):
            raise AssertionError("a reader waited for more of a text that has ended")
    except NotACallError:
        return None
    return None if scan.rest.strip() else "".join(pieces)
