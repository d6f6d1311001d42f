"""AnswerParser: splits the text of an answer into thoughts, text and tool calls as it comes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headroom.text.reasoning import Reasoning
from headroom.text.stops import overlap


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
    """What a piece of an answer adds to its thought, its text and its tool calls."""

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


def join_calls(deltas: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """Return the whole tool calls that deltas add up to."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        known = calls.get(delta.index, ToolCall(id=delta.id, name=delta.name, arguments=""))
        calls[delta.index] = replace(known, arguments=known.arguments + delta.arguments)
    return tuple(calls[index] for index in sorted(calls))


class AnswerParser:
    """Splits an answer into thoughts and text; marks never appear in either.

    A thought is recognised where the prompt has opened one, or where the answer begins with its
    start mark. White space around a thought belongs to the marks and is dropped.
    """

    def __init__(self, reasoning: Reasoning | None = None, *, in_thought: bool = False) -> None:
        self._reasoning = reasoning
        self._thinking = in_thought and reasoning is not None
        self._at_start = True  # of a thought or of the text after one: white space is dropped
        self._may_think = reasoning is not None  # only white space came, outside a thought
        self._held = ""  # the end of the text, which may be the start of a mark

    @property
    def in_thought(self) -> bool:
        """Whether the text that was pushed last ended inside a thought."""
        return self._thinking

    @property
    def held(self) -> int:
        """Characters that were pushed and not given out yet."""
        return len(self._held)

    def push(self, text: str) -> AnswerParts:
        """Take the next piece of the answer and return what it adds."""
        self._held += text
        thought = content = ""
        while self._held:
            before = self._held, self._thinking
            if self._thinking:
                thought += self._take_thought()
            else:
                content += self._take_text()
            if before == (self._held, self._thinking):
                break
        return AnswerParts(thought=thought, text=content)

    def finish(self) -> AnswerParts:
        """Return what was held back; no more text comes."""
        held, self._held = self._held, ""
        if self._thinking:
            return AnswerParts(thought=held.rstrip())
        return AnswerParts(text=held)

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
