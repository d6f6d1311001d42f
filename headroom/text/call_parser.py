"""CallParser: tells tool calls from the text around them, as an answer comes."""

import contextlib
from collections.abc import Collection

from headroom.text.call_scanner import (
    BLANKS,
    CallEvent,
    CallScanner,
    NotACallError,
    Reading,
)
from headroom.text.conversation import Tool
from headroom.text.stops import overlap
from headroom.text.tool_formats import ToolFormat


class CallParser:
    """Splits the text of an answer into words and calls; the result does not depend on the pieces.

    - A call is given out from the moment its name is known. What looked like a call and is none
      (no tool has the name, or the markup is wrong before the name) is given out as text.
    - A call that breaks after its name keeps the arguments that were read. They end where it broke,
      so they are an incomplete JSON text: a client must not take half a command for a whole one.
      What could not be read comes as text. Only where nothing but closing brackets is missing
      before the end mark of the call are the brackets added.
    - White space between text and a call, and between calls, belongs to neither.
    """

    def __init__(self, form: ToolFormat, tools: Collection[Tool]) -> None:
        self.tools = tools
        self.broke = False  # a call that was given out has broken
        self._format = form
        self._scan = CallScanner(tools)
        self._wrote = False  # text was given out before
        self._bare = form.begins_bare  # a call without a mark may begin here
        self._after_call = False  # only white space came since a call
        self._reading = self._read()
        next(self._reading, None)

    @property
    def held(self) -> int:
        """Characters that were pushed and not given out yet."""
        return self._scan.held

    def push(self, text: str) -> list[CallEvent]:
        """Take the next piece of the answer and return what it adds, in order."""
        self._scan.push(text)
        next(self._reading, None)
        return self._events()

    def finish(self) -> list[CallEvent]:
        """Return what was held back; no more text comes."""
        self._scan.ended = True
        next(self._reading, None)
        return self._events()

    def _events(self) -> list[CallEvent]:
        events, self._scan.events = self._scan.events, []
        return events

    def _read(self) -> Reading[None]:
        while True:
            if not (yield from self._read_text()):
                return
            yield from self._read_block()

    def _read_text(self) -> Reading[bool]:
        """Give out text up to the next start of calls; False at the end of the answer."""
        scan = self._scan
        starts = self._format.starts
        while True:
            rest = scan.rest
            stripped = rest.lstrip(BLANKS)
            if self._bare and stripped.startswith("{"):
                return True
            places = [place for mark in starts if (place := rest.find(mark)) >= 0]
            if places:
                self._say(rest[: min(places)].rstrip(BLANKS))
                return True
            if scan.ended:
                self._say(rest if stripped or not self._after_call else "")
                scan.advance(len(scan.rest))
                scan.commit()
                return False
            # White space at the end is held, too: a call may follow.
            self._say(rest[: len(rest) - overlap(rest, starts)].rstrip(BLANKS))
            yield

    def _say(self, text: str) -> None:
        """Give out text that comes next."""
        if not text:
            return
        self._scan.advance(len(text))
        self._scan.commit()
        if self._after_call and not self._wrote:
            text = text.lstrip(BLANKS)
        self._bare = self._after_call = False
        self._wrote = True
        self._scan.say(text)

    def _read_block(self) -> Reading[None]:
        scan = self._scan
        calls = scan.calls
        yield from scan.skip_blanks()
        with contextlib.suppress(NotACallError):
            yield from self._format.read(scan)
        self.broke |= scan.in_call
        scan.rewind()
        if scan.calls > calls:
            self._after_call, self._bare = True, self._format.begins_bare
        else:  # the mark is text, and what follows it is looked at again
            rest = scan.rest
            mark = len(rest) - len(rest.lstrip(BLANKS)) + 1
            self._say(rest[:mark])
