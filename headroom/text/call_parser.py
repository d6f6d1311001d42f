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
from headroom.text.tool_formats import ToolFormat, is_cut_markup


class CallParser:
    """Splits an answer into text and calls; the result does not depend on how the text is cut.

    - A call begins as soon as its name is known; a call in JSON, as soon as its name is known and
      its arguments begin. Text that only looks like a call (no tool has the name, or the markup
      before that place is wrong) stays text.
    - A call may break off after that place. It keeps the arguments up to there, which are
      incomplete JSON, so that no client runs half a command; what follows is text. But if only
      closing brackets are missing before the call's end mark, they are added.
    - If the answer breaks off with nothing but markup after a call's name or an argument, that
      markup is dropped.
    - Fields of a call's JSON after its arguments that are not the call's own become text.
    - White space between text and a call, and between calls, is dropped.
    """

    def __init__(self, form: ToolFormat, tools: Collection[Tool]) -> None:
        self.tools = tools
        self.broke = False  # a call has begun and broken off
        self._format = form
        self._scan = CallScanner(tools)
        self._bare = form.begins_bare  # a call without a mark may begin here
        self._after_call = False  # only white space came since a call
        self._reading = self._read()
        next(self._reading, None)

    @property
    def held(self) -> int:
        """The number of characters that were pushed and are not in any event yet."""
        return self._scan.held

    def push(self, text: str) -> list[CallEvent]:
        """Take the next piece of the answer and return its events in order."""
        self._scan.push(text)
        return self._read_on()

    def finish(self) -> list[CallEvent]:
        """Return the events of the text that was held back; no more text comes."""
        self._scan.ended = True
        return self._read_on()

    def _read_on(self) -> list[CallEvent]:
        next(self._reading, None)
        events, self._scan.events = self._scan.events, []
        return events

    def _read(self) -> Reading[None]:
        while True:
            if not (yield from self._read_text()):
                return
            yield from self._read_block()

    def _read_text(self) -> Reading[bool]:
        """Emit text up to the next start of calls; return False at the end of the answer."""
        scan = self._scan
        starts = self._format.starts
        while True:
            rest = scan.rest
            stripped = rest.lstrip(BLANKS)
            if self._bare and stripped.startswith("{"):
                return True
            places = [place for mark in starts if (place := rest.find(mark)) >= 0]
            if places:
                self._emit_text(rest[: min(places)].rstrip(BLANKS))
                return True
            if scan.ended:
                self._emit_text(rest if stripped or not self._after_call else "")
                scan.advance(len(scan.rest))
                scan.commit()
                return False
            # White space at the end is held back, too: a call may follow it.
            self._emit_text(rest[: len(rest) - overlap(rest, starts)].rstrip(BLANKS))
            yield

    def _emit_text(self, text: str) -> None:
        """Read and emit the text that comes next."""
        if not text:
            return
        self._scan.advance(len(text))
        self._scan.commit()
        if self._after_call and not self._scan.has_text:
            text = text.lstrip(BLANKS)
        self._bare = self._after_call = False
        self._scan.emit_text(text)

    def _read_block(self) -> Reading[None]:
        """Read a block of calls; if it is none, emit its first character as text."""
        scan = self._scan
        calls = scan.calls
        yield from scan.skip_blanks()
        with contextlib.suppress(NotACallError):
            yield from self._format.read(scan)
        self.broke |= scan.in_call
        scan.rewind()
        if scan.calls > calls:
            self._after_call, self._bare = True, self._format.begins_bare
            if scan.ended and is_cut_markup(scan.rest):
                scan.advance(len(scan.rest))
                scan.commit()
        else:  # a call may still begin after the first character of what is no mark
            rest = scan.rest
            blanks = len(rest) - len(rest.lstrip(BLANKS))
            self._emit_text(rest[: blanks + 1])
