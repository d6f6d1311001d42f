"""AnswerParser: splits the text of an answer into thoughts, text and tool calls as it comes."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from headroom.text.call_parser import CallParser
from headroom.text.call_scanner import CallArguments, CallEvent, CallStart, Words
from headroom.text.conversation import Tool
from headroom.text.reasoning import Reasoning
from headroom.text.stops import overlap
from headroom.text.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """What a piece of an answer adds to one tool call."""

    index: int  # which call of the answer
    id: str = ""  # with the first delta of a call
    name: str = ""  # with the first delta of a call
    arguments: str = ""  # the next piece of the arguments' JSON text


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A whole tool call."""

    id: str
    name: str
    arguments: str  # a JSON object as text


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParts:
    """What a piece of an answer adds: first to its thought, then to its text, then to its calls."""

    thought: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __add__(self, more: "AnswerParts") -> "AnswerParts":
        """Return these parts with the parts that follow them."""
        return AnswerParts(
            thought=self.thought + more.thought,
            text=self.text + more.text,
            calls=self.calls + more.calls,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """A whole answer as the model wrote it, and what was read from it."""

    tokens: Sequence[int]  # without the token that ended the answer
    raw: str  # their text, with the marks that the parser reads
    rest: int  # where in `raw` the part after the thought begins; 0 without a thought
    parts: AnswerParts


def join_calls(deltas: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """Return the whole tool calls that deltas add up to."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        known = calls.get(delta.index, ToolCall(id=delta.id, name=delta.name, arguments=""))
        calls[delta.index] = replace(known, arguments=known.arguments + delta.arguments)
    return tuple(calls[index] for index in sorted(calls))


class AnswerParser:
    """Splits an answer into thoughts, text and tool calls; marks never appear in any of them.

    A thought is recognised where the prompt has opened one, or where the answer begins with its
    start mark. White space around a thought belongs to the marks and is dropped. Tool calls are
    recognised after the thought, and only where the request has tools; `CallParser` says how
    calls are told from text, and what becomes of those that break.
    """

    def __init__(
        self,
        reasoning: Reasoning | None = None,
        *,
        in_thought: bool = False,
        begun: bool = False,  # the prompt has the first words of the text: no thought can follow
        tools: Collection[Tool] = (),  # none: what looks like a call is text
        format: ToolFormat | None = None,  # how the model writes calls
        keep: Callable[[WrittenAnswer], None] | None = None,  # called with the whole answer
    ) -> None:
        self.keep = keep
        self._reasoning = reasoning
        self._format = format
        self._calls = CallParser(format, tools) if format is not None and tools else None
        self._thinking = in_thought and reasoning is not None
        self.begun = begun
        self._at_start = not begun  # of a thought or of the text after one: white space is dropped
        # Only white space came, outside a thought.
        self._may_think = reasoning is not None and not begun
        self._held = ""  # the end of the text, which may be the start of a mark
        self._thought: list[str] = []  # what was given out of it, where calls may be in it
        self._events: list[CallEvent] = []  # read from the text and not given out yet
        self._index = -1  # of the last call

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
        """Characters that were pushed and not given out yet."""
        waiting = sum(len(event.text) for event in self._events if isinstance(event, Words))
        return len(self._held) + waiting + (self._calls.held if self._calls is not None else 0)

    @property
    def marks(self) -> frozenset[int]:
        """Tokens of markup that the parser must see, even where they are control tokens."""
        marks: frozenset[int] = frozenset()
        if self._reasoning is not None:
            marks |= {self._reasoning.start_id, self._reasoning.end_id}
        if self._calls is not None and self._format is not None:
            marks |= self._format.marks
        return marks

    def push(self, text: str) -> AnswerParts:
        """Take the next piece of the answer and return what it adds.

        Text that comes after a piece of a call is returned by the next call of `push`, so that the
        order of the parts is the order in the answer.
        """
        self._held += text
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
        if self._calls is not None and content:
            self._events += self._calls.push(content)
            content = ""
        return AnswerParts(thought=thought, text=content) + self._take_parts()

    def finish(self) -> AnswerParts:
        """Return what was held back; no more text comes."""
        held, self._held = self._held, ""
        if self._thinking:
            self._events += self._calls_in_thought(held)
            return AnswerParts(thought=held.rstrip()) + self._take_parts()
        if self._calls is None:
            return AnswerParts(text=held)
        self._events += self._calls.push(held) + self._calls.finish()
        parts = AnswerParts()
        while self._events:
            parts += self._take_parts()
        return parts

    def _calls_in_thought(self, held: str) -> list[CallEvent]:
        """Return the calls with which a thought ends that the model forgot to end before them."""
        if self._format is None or self._calls is None:
            return []
        text = "".join(self._thought) + held
        for start in self._format.starts:
            place = text.find(start)
            while place >= 0:
                parser = CallParser(self._format, self._calls.tools)
                events = parser.push(text[place:]) + parser.finish()
                if not any(isinstance(event, Words) for event in events) and not parser.broke:
                    return events
                place = text.find(start, place + 1)
        return []

    def _take_parts(self) -> AnswerParts:
        """Return what was read from the text, up to text that comes after a piece of a call."""
        text = ""
        calls: list[CallDelta] = []
        while self._events and not (calls and isinstance(self._events[0], Words)):
            event = self._events.pop(0)
            if isinstance(event, Words):
                text += event.text
            elif isinstance(event, CallStart):
                assert self._format is not None
                self._index += 1
                call_id = event.id or self._format.new_id()
                calls.append(CallDelta(index=self._index, id=call_id, name=event.name))
            else:
                calls.append(self._with_arguments(calls, event))
        return AnswerParts(text=text, calls=tuple(calls))

    def _with_arguments(self, calls: list[CallDelta], event: CallArguments) -> CallDelta:
        """Return the delta of a piece of arguments, joined to the piece that was last, if any."""
        if calls and not calls[-1].name:
            last = calls.pop()
            return replace(last, arguments=last.arguments + event.json)
        return CallDelta(index=self._index, arguments=event.json)

    def _take_thought(self) -> str:
        assert self._reasoning is not None
        if self._at_start:
            self._held = self._held.lstrip()
        thought, mark, rest = self._held.partition(self._reasoning.end)
        if mark:
            self._held, self._thinking, self._at_start = rest, False, True
            return thought.rstrip()
        # White space at the end is held, too: the end mark may follow.
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
