"""AnswerParser: splits an answer into thought, text and tool calls while it streams in."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from headroom.text.call_parser import CallParser
from headroom.text.call_scanner import CallEvent, CallStart, PlainText
from headroom.text.conversation import Tool
from headroom.text.reasoning import Reasoning
from headroom.text.stops import overlap
from headroom.text.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """What a piece of an answer adds to one tool call."""

    index: int  # the call's number in the answer, from 0
    id: str = ""  # only in the first delta of a call
    name: str = ""  # only in the first delta of a call
    arguments: str = ""  # the next piece of the arguments, as JSON text


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A whole tool call."""

    id: str
    name: str
    arguments: str  # a JSON object as text


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParts:
    """What a piece of an answer adds to the thought, then to the text, then to the calls."""

    thought: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __add__(self, more: "AnswerParts") -> "AnswerParts":
        """Return these parts and the parts that follow them as one."""
        return AnswerParts(
            thought=self.thought + more.thought,
            text=self.text + more.text,
            calls=self.calls + more.calls,
        )


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A range of the characters of an answer that are text: no thought, no call, no markup."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """A whole answer as the model wrote it, and the parts that were read from it."""

    tokens: Sequence[int]  # without the token that ended the answer
    raw: str  # the text of the tokens, markup included
    after_thought: int  # the index in `raw` after the thought's end mark; 0 without a thought
    parts: AnswerParts


def join_calls(deltas: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """Return the whole tool calls that the deltas of an answer add up to."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        known = calls.get(delta.index, ToolCall(id=delta.id, name=delta.name, arguments=""))
        calls[delta.index] = replace(known, arguments=known.arguments + delta.arguments)
    return tuple(calls[index] for index in sorted(calls))


class AnswerParser:
    """Splits one answer into thought, text and tool calls, without the marks between them.

    The answer begins with a thought if the prompt has opened one, or if the answer itself begins
    with the start mark. White space around a thought is dropped, and so are further start marks at
    its beginning. Later start marks are text. Tool calls come after the thought, and are looked for
    only if the request has tools. `CallParser` tells them from text.
    """

    def __init__(
        self,
        reasoning: Reasoning | None = None,
        *,
        in_thought: bool = False,  # the prompt ends inside a thought
        begun: bool = False,  # the prompt has the first words of the text: no thought can follow
        tools: Collection[Tool] = (),  # that may be called; without any, all is text
        format: ToolFormat | None = None,  # how the model writes calls
        keep: Callable[[WrittenAnswer], None] | None = None,  # called with the whole answer
    ) -> None:
        self.keep = keep
        self._reasoning = reasoning
        self._format = format
        self._calls = CallParser(format, tools) if format is not None and tools else None
        self._thinking = in_thought and reasoning is not None
        self.begun = begun
        # A thought, or the text after it, begins here: white space is dropped.
        self._at_start = not begun
        # The answer so far is white space: a thought may still begin.
        self._may_think = reasoning is not None and not begun
        self._held = ""  # the end of the text, which may be the start of a mark
        self._thought: list[str] = []  # pieces of the thought, in which calls may be found at last
        self._events: list[CallEvent] = []  # read from the text and not returned yet
        self._index = -1  # of the last call
        self._pushed = 0  # characters of the answer so far
        self._has_content = False  # text or calls have come
        self._content_start = 0  # characters of the answer before them
        self._spans: list[TextSpan] = []  # the text that was returned, in order

    @property
    def in_thought(self) -> bool:
        """Whether the text that was pushed last ended inside a thought."""
        return self._thinking

    @property
    def thinks(self) -> bool:
        """Whether the model writes thoughts at all."""
        return self._reasoning is not None

    @property
    def held(self) -> int:
        """The number of characters that were pushed and not returned yet."""
        waiting = sum(len(event.text) for event in self._events if isinstance(event, PlainText))
        return len(self._held) + waiting + (self._calls.held if self._calls is not None else 0)

    @property
    def marks(self) -> frozenset[int]:
        """Ids of the tokens whose text the parser must see, even if they are control tokens."""
        marks: frozenset[int] = frozenset()
        if self._reasoning is not None:
            marks |= {self._reasoning.start_id, self._reasoning.end_id}
        if self._calls is not None and self._format is not None:
            marks |= self._format.marks
        return marks

    def push(self, text: str) -> AnswerParts:
        """Take the next piece of the answer and return what it adds.

        Text that follows a call is returned by the next `push` or by `finish`: parts list text
        before calls, and must keep the order of the answer.
        """
        self._held += text
        self._pushed += len(text)
        thought = content = ""
        while self._held:
            before = self._held, self._thinking
            if self._thinking:
                piece = self._take_thought()
                thought += piece
                if self._calls is not None:
                    self._thought.append(piece)
            else:
                content += self._take_text()
            if before == (self._held, self._thinking):
                break
        if content:
            self._take_content(content)
        return AnswerParts(thought=thought) + self._take_parts()

    def finish(self) -> AnswerParts:
        """Return what was held back; no more text comes."""
        held, self._held = self._held, ""
        if self._thinking:
            self._events += self._calls_in_thought(held)
            return AnswerParts(thought=held.rstrip()) + self._take_parts()
        self._take_content(held)
        if self._calls is not None:
            self._events += self._calls.finish()
        parts = AnswerParts()
        while self._events:
            parts += self._take_parts()
        return parts

    def _take_content(self, content: str) -> None:
        """Take the next piece of text and calls, which ends where the answer ends now."""
        start = self._pushed - len(content)
        if self._calls is None:
            self._events += [PlainText(content, start)] if content else []
            return
        if not self._has_content:
            self._has_content, self._content_start = True, start
        self._events += self._calls.push(content)

    def is_text(self, start: int, end: int) -> bool:
        """Return whether text that was returned has characters of a range of the answer.

        Without thoughts and calls, all of an answer is text.
        """
        if self._reasoning is None and self._calls is None:
            return True
        return any(span.start < end and start < span.end for span in self._spans)

    def _add_span(self, event: PlainText) -> None:
        start = self._content_start + event.start
        end = start + len(event.text)
        if self._spans and self._spans[-1].end == start:
            start = self._spans.pop().start
        self._spans.append(TextSpan(start, end))

    def _calls_in_thought(self, held: str) -> list[CallEvent]:
        """Return the calls at the end of a thought whose end mark the model forgot."""
        if self._format is None or self._calls is None:
            return []
        text = "".join(self._thought) + held
        for start in self._format.starts:
            place = text.find(start)
            while place >= 0:
                parser = CallParser(self._format, self._calls.tools)
                events = parser.push(text[place:]) + parser.finish()
                if not any(isinstance(event, PlainText) for event in events) and not parser.broke:
                    return events
                place = text.find(start, place + 1)
        return []

    def _take_parts(self) -> AnswerParts:
        """Return the events that wait, but none from the first text after a call on."""
        text = ""
        calls: list[CallDelta] = []
        while self._events and not (calls and isinstance(self._events[0], PlainText)):
            event = self._events.pop(0)
            if isinstance(event, PlainText):
                text += event.text
                self._add_span(event)
            elif isinstance(event, CallStart):
                assert self._format is not None
                self._index += 1
                call_id = event.id or self._format.new_id()
                calls.append(CallDelta(index=self._index, id=call_id, name=event.name))
            elif calls and not calls[-1].name:  # join pieces of one call's arguments
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + event.json)
            else:
                calls.append(CallDelta(index=self._index, arguments=event.json))
        return AnswerParts(text=text, calls=tuple(calls))

    def _take_thought(self) -> str:
        assert self._reasoning is not None
        if self._at_start:
            self._held = self._held.lstrip()
            start = self._reasoning.start  # some models repeat the mark that the prompt has written
            while self._held.startswith(start):
                self._held = self._held.removeprefix(start).lstrip()
            if self._held and start.startswith(self._held):
                return ""  # the beginning of the mark
        thought, mark, rest = self._held.partition(self._reasoning.end)
        if mark:
            self._held, self._thinking, self._at_start = rest, False, True
            return thought.rstrip()
        # White space at the end is held back, too: the end mark may follow it.
        safe = len(self._held) - overlap(self._held, [self._reasoning.end])
        shown = self._held[:safe].rstrip()
        self._held = self._held[len(shown) :]
        self._at_start = self._at_start and not shown
        return shown

    def _take_text(self) -> str:
        if self._reasoning is None:
            text, self._held = self._held, ""
            return text
        if self._may_think:
            start = self._held.lstrip()
            if start.startswith(self._reasoning.start):
                self._held = start.removeprefix(self._reasoning.start)
                self._thinking = self._at_start = True
                return ""
            if self._reasoning.start.startswith(start):
                return ""  # white space, or the beginning of the start mark
            self._may_think = False
            if self._at_start:
                self._held = start
        self._at_start = False
        text, self._held = self._held, ""
        return text
