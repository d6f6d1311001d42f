"""CallScanner: the text of an answer as it comes, for generators that read tool calls from it."""

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from headroom.text.conversation import Tool
from headroom.text.stops import overlap

T = TypeVar("T")
# A reader of a part of the answer. It yields where it needs more text to decide anything, so what
# it returns depends on the whole text and never on how the text was cut into pieces.
Reading = Generator[None, None, T]
BLANKS = " \t\r\n"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_WORDS |= {"True": "true", "False": "false", "None": "null"}  # as Python prints them
_ESCAPES = '"\\/bfnrt'


class NotACallError(Exception):
    """The text is not a call, or no longer one."""


@dataclass(frozen=True, slots=True)
class Words:
    """Text for the reader of an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call whose name is known."""

    name: str
    id: str  # "" if the model gave it none


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of the last call's arguments."""

    json: str


CallEvent = Words | CallStart | CallArguments


class CallScanner:
    """Text that has come and is not read yet, and the events that were read from it."""

    def __init__(self, tools: Collection[Tool]) -> None:
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self.events: list[CallEvent] = []
        self.ended = False  # no more text comes
        self.in_call = False  # a call's name was given out, and the call has not ended
        self.calls = 0  # calls whose name was given out
        self._text = ""
        self._position = 0  # what is before it has been read
        self._kept = 0  # what is before it has been given out, or was markup of a call

    @property
    def rest(self) -> str:
        """The text that has come and is not read yet."""
        return self._text[self._position :]

    @property
    def held(self) -> int:
        """Characters that may still have to be given out as text."""
        return len(self._text) - self._kept

    def push(self, text: str) -> None:
        """Add text that has come."""
        self._text = self._text[self._kept :] + text
        self._position -= self._kept
        self._kept = 0

    def advance(self, characters: int) -> None:
        """Count characters of the rest as read."""
        self._position += characters

    def commit(self) -> None:
        """Count everything that was read as given out: it will not come back as text."""
        self._kept = self._position

    def rewind(self) -> None:
        """Go back to what was last given out: what was read since is to be read as text."""
        self._position = self._kept
        self.in_call = False

    def say(self, text: str) -> None:
        """Give out text for the reader of the answer."""
        if text:
            self.events.append(Words(text))

    def begin(self, name: str, call_id: str = "") -> None:
        """Give out the name of a call; the text is no call if no tool has the name."""
        if name not in self.tools:
            raise NotACallError(f"There is no tool {name!r}.")
        self.events.append(CallStart(name, call_id))
        self.in_call = True
        self.calls += 1
        self.commit()

    def add(self, arguments: str) -> None:
        """Give out a piece of the call's arguments."""
        assert self.in_call
        if arguments:
            self.events.append(CallArguments(arguments))
        self.commit()

    def end_call(self) -> None:
        """End the call: what follows is text again."""
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
            come = self._text[self._position : self._position + len(mark)]
            if not mark.startswith(come):
                return False
            if len(come) == len(mark):
                return True
            if self.ended:
                return False
            yield

    def take(self, mark: str) -> Reading[bool]:
        """Read a mark if it comes next, and return whether it did."""
        found = yield from self.starts_with(mark)
        if found:
            self.advance(len(mark))
        return found

    def expect(self, mark: str) -> Reading[None]:
        """Read a mark that must come next."""
        if not (yield from self.take(mark)):
            raise NotACallError(f"Expected {mark!r}.")

    def take_all(self, characters: str) -> Reading[str]:
        """Read the characters that come next as long as they are among the given ones."""
        return (yield from self._take_while(lambda character: character in characters))

    def take_before(self, characters: str) -> Reading[str]:
        """Read what comes before the first of the given characters."""
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
        """Read the name of a tool, up to one of the given characters, with white space around it.

        The text is no call as soon as it cannot become a tool's name, so that text which only looks
        like a call is not held back for long.
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
        """Read what comes before a mark, and the mark, and return the former."""
        while (place := self._text.find(mark, self._position)) < 0:
            if self.ended:
                raise NotACallError(f"There is no {mark!r}.")
            yield
        taken = self._text[self._position : place]
        self._position = place + len(mark)
        return taken

    def pieces_before(
        self,
        mark: str,
        follows: Collection[str],
        emit: Callable[[str], None],
        *,
        trims: bool,  # one line break at each end belongs to the markup
    ) -> Reading[None]:
        """Pass on the pieces of a text up to its end mark, as they come, and read the mark.

        A mark that none of `follows` follows is a part of the text: a file that a model writes may
        contain the mark. After the last mark the answer may end, too.
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
            if trims and not self.ended:
                safe = len(_without_line_break(rest[:safe]))
            self.advance(safe)
            emit(rest[:safe])
            if self.ended:
                raise NotACallError(f"There is no {mark!r}.")
            yield
        self.advance(place + len(mark))
        emit(_without_line_break(rest[:place]) if trims else rest[:place])


def _without_line_break(text: str) -> str:
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def read_string(scan: CallScanner, emit: Callable[[str], None]) -> Reading[None]:
    """Pass on a JSON string as it comes.

    Models forget to escape line breaks and backslashes; here they are escaped. Half a surrogate
    pair stands for no character and becomes the replacement character.
    """
    yield from scan.expect('"')
    emit('"')
    while True:
        emit((yield from _string_run(scan)))
        character = yield from scan.peek()
        if not character:
            raise NotACallError("A string has no end.")
        if character == '"':
            scan.advance(1)
            emit('"')
            return
        if character == "\\":
            emit((yield from _read_escape(scan)))
        elif character < " ":
            scan.advance(1)
            emit(json.dumps(character)[1:-1])


def _string_run(scan: CallScanner) -> Reading[str]:
    """Read the plain characters of a string that have come."""
    yield from scan.peek()
    rest = scan.rest
    end = 0
    while end < len(rest) and rest[end] not in '"\\' and rest[end] >= " ":
        end += 1
    scan.advance(end)
    return rest[:end]


def _read_escape(scan: CallScanner) -> Reading[str]:
    yield from scan.expect("\\")
    kind = yield from scan.peek()
    if not kind:
        raise NotACallError("A string has no end.")
    if kind != "u":
        if kind in _ESCAPES:
            scan.advance(1)
            return "\\" + kind
        return "\\\\"  # as in a regular expression that was not escaped
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
    alone = 0xD800 <= int(second, 16) < 0xDC00
    return "\\ufffd" + ("\\ufffd" if alone else f"\\u{second}")


def _hex_digits(scan: CallScanner) -> Reading[str | None]:
    digits = ""
    while len(digits) < 4:
        digit = yield from scan.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            scan.advance(-len(digits))
            return None
        digits += digit
        scan.advance(1)
    return digits


def read_json(
    scan: CallScanner, emit: Callable[[str], None], ends: Collection[str] = ()
) -> Reading[None]:
    """Pass on one JSON value as it comes, in pieces that are valid so far.

    A comma before a closing bracket is left out, Python's True, False and None become JSON's words,
    and brackets that are still open at one of the `ends` are closed.
    """
    stack: list[str] = []  # the brackets to close
    gap = ""  # white space and commas since the last piece
    wants = "value"  # or "key", "colon", "next"
    while True:
        gap += yield from scan.take_all(BLANKS)
        character = yield from scan.peek()
        closes = bool(stack) and character == stack[-1]
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
                if not (yield from _any_of(scan, ends)):
                    raise NotACallError("A comma or a bracket is missing.")
                emit("".join(reversed(stack)))
                return
        elif wants == "colon":
            yield from scan.expect(":")
            emit(gap + ":")
            wants, gap = "value", ""
        elif wants == "key":
            if character != '"':
                raise NotACallError("A key is missing.")
            emit(gap)
            yield from read_string(scan, emit)
            wants, gap = "colon", ""
        elif character in ("{", "["):
            scan.advance(1)
            emit(gap + character)
            stack.append("}" if character == "{" else "]")
            wants, gap = ("key" if character == "{" else "value"), ""
        else:
            emit(gap)
            gap, wants = "", "next"
            if character == '"':
                yield from read_string(scan, emit)
            else:
                emit((yield from _read_plain_value(scan)))
        if not stack and wants == "next":
            return


def _any_of(scan: CallScanner, marks: Collection[str]) -> Reading[bool]:
    for mark in marks:
        if (yield from scan.starts_with(mark)):
            return True
    return False


def _read_plain_value(scan: CallScanner) -> Reading[str]:
    """Read a number, true, false or null."""
    word = yield from scan.take_before(BLANKS + ',:]}[{"<')
    value = _WORDS.get(word, word if _NUMBER.fullmatch(word) else None)
    if value is None or not (yield from scan.peek()):  # at the end, digits may be missing
        raise NotACallError(f"{word!r} is no JSON value.")
    return value


def read_string_value(scan: CallScanner) -> Reading[str]:
    """Read a JSON string and return its text."""
    pieces: list[str] = []
    yield from read_string(scan, pieces.append)
    text: str = json.loads("".join(pieces))
    return text


def whole_json(text: str) -> str | None:
    """Return a text as one JSON value, with small mistakes mended; None if it is none."""
    scan = CallScanner(())
    scan.push(text.strip() + "\n")
    scan.ended = True
    pieces: list[str] = []
    try:
        for _ in read_json(scan, pieces.append):
            raise AssertionError("a text that has ended is never waited for")
    except NotACallError:
        return None
    return None if scan.rest.strip() else "".join(pieces)
