"""Turns the engine's token events into the thoughts, text and tool calls of answers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headroom.engine.engine import Engine
from headroom.engine.request import (
    FinishReason,
    GenerationRequest,
    Timings,
    TokenEvent,
    TokenLogprobs,
)
from headroom.text.answer import AnswerText
from headroom.text.answer_parser import AnswerParser, AnswerParts, CallDelta, ToolCall, join_calls
from headroom.text.thought_budget import AnswerConstraint
from headroom.text.tokenizer import Tokenizer

NO_TIME = Timings(queue_s=0.0, prefill_s=0.0, decode_s=0.0)


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """One token of an answer, and where it begins in the answer's text."""

    id: int
    offset: int  # characters of the answer before this token
    logprobs: TokenLogprobs | None  # None if not asked for


@dataclass(frozen=True, slots=True)
class _HeldToken:
    """A token of which it is not known yet whether the answer's text shows it."""

    token: AnswerToken
    end: int  # characters of the answer up to its end; at least one more than its offset


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishDetails:
    """How long a model thought, and how its thought ended."""

    close_kind: Literal["natural", "hard"]  # hard: the thought budget ended it
    thinking_tokens: int  # tokens of the thought, its marks included
    content_tokens: int  # all other tokens, the one that ended the answer included
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelta:
    """What one token event adds to an answer; the last delta has a finish reason."""

    index: int = 0  # the answer's number, if several are read together
    text: str = ""  # empty while a character is incomplete or a stop text may have begun
    thought: str = ""
    calls: tuple[CallDelta, ...] = ()
    token: int | None = None  # the event's token, even if its text is hidden or held back
    logprobs: TokenLogprobs | None = None  # of `token`, if asked for
    shown_tokens: tuple[AnswerToken, ...] = ()  # tokens whose text this delta completes
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first delta, if asked for
    finish_reason: FinishReason | None = None
    stop_text: str | None = None  # with the last delta, if a stop text ended the answer
    error: str = ""  # with finish reason "error"
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, which an earlier request had computed
    generated_tokens: int = 0  # so far
    thought_tokens: int = 0  # so far: the part of the generated tokens that is thought
    timings: Timings = NO_TIME  # up to this delta
    finish_details: FinishDetails | None = None  # with the last delta, if the model can think

    @property
    def is_empty(self) -> bool:
        """Whether the delta has no token, ends nothing and shows nothing."""
        return self.token is None and self.finish_reason is None and not self.shows

    @property
    def shows(self) -> bool:
        """Whether the delta has anything that a client can see."""
        parts = self.text or self.thought or self.calls
        return bool(parts or self.shown_tokens or self.prompt_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    thought: str = ""  # the model's reasoning
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...]  # with the token that ended the answer, if one did
    finish_reason: FinishReason
    stop_text: str | None = None  # the stop text that ended the answer, if one did
    prompt_tokens: int
    cached_tokens: int  # of the prompt, which an earlier request had computed
    generated_tokens: int
    thought_tokens: int  # the part of the generated tokens that is thought
    logprobs: tuple[TokenLogprobs, ...]  # one per token id, if asked for
    shown_tokens: tuple[AnswerToken, ...]  # the tokens of `text`
    prompt_logprobs: tuple[TokenLogprobs | None, ...]  # one per prompt token, if asked for
    timings: Timings
    finish_details: FinishDetails | None = None  # None if the model cannot think


class AnswerReader:
    """Turns the token events of one request into deltas of its answer.

    The reader hides the token that ends an answer. It also looks for stop texts, of which the
    engine knows nothing: at the first one it ends the answer and cancels the request.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        engine: Engine,
        index: int = 0,
        parser: AnswerParser | None = None,  # None: the answer continues the prompt's text
    ) -> None:
        self._request_id = request.id
        self._constraint = request.constraint
        self._engine = engine
        self._index = index
        self._parser = parser or AnswerParser()
        continues = parser is None or parser.begun
        continues = continues and not all(map(tokenizer.is_control, request.prompt))
        self._text = AnswerText(tokenizer, request.params.stop, self._parser, continues=continues)
        self._held: deque[_HeldToken] = deque()  # tokens whose text is not shown yet
        # The last delta of an answer that a stop text ended, kept until the engine's last event
        # reports what experts cost and stages took.
        self._last: AnswerDelta | None = None

    def read(self, event: TokenEvent) -> AnswerDelta:
        """Return what an event adds to the answer; nothing follows a delta with a finish reason."""
        if self._last is not None:
            return self._end_with_costs(self._last, event)
        delta = self._add(event)
        if delta.finish_reason is None or event.finish_reason is not None:
            return delta
        self._engine.cancel(self._request_id)
        if not self._engine.reports_costs:
            return delta
        self._last = AnswerDelta(
            index=self._index,
            finish_reason=delta.finish_reason,
            stop_text=delta.stop_text,
            prompt_tokens=delta.prompt_tokens,
            cached_tokens=delta.cached_tokens,
            generated_tokens=delta.generated_tokens,
            thought_tokens=delta.thought_tokens,
            timings=delta.timings,
            finish_details=delta.finish_details,
        )
        return replace(delta, finish_reason=None, stop_text=None, finish_details=None)

    def _add(self, event: TokenEvent) -> AnswerDelta:
        parts = AnswerParts()
        # The token that ends an answer is not a part of its text, control token or not.
        if event.token is not None and event.finish_reason != "stop":
            token = AnswerToken(event.token, self._text.decoded, event.logprobs)
            parts = self._text.push(event.token)
            self._held.append(_HeldToken(token, end=max(token.offset + 1, self._text.decoded)))
        if event.finish_reason is not None:
            parts += self._text.finish()
        reason: FinishReason | None = "stop" if self._text.stopped else event.finish_reason
        return AnswerDelta(
            index=self._index,
            text=parts.text,
            thought=parts.thought,
            calls=parts.calls,
            token=event.token,
            logprobs=event.logprobs,
            shown_tokens=self._release(all_held=reason is not None and not self._text.stopped),
            prompt_logprobs=event.prompt_logprobs,
            finish_reason=reason,
            stop_text=self._text.stop_text,
            error=event.error,
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
            generated_tokens=event.generated_tokens,
            thought_tokens=self._text.thought_tokens,
            timings=event.timings or NO_TIME,
            finish_details=None if reason is None else self._details(event.generated_tokens),
        )

    def _details(self, total: int) -> FinishDetails | None:
        if not self._parser.thinks:
            return None
        limits = self._constraint
        hard = isinstance(limits, AnswerConstraint) and limits.closed_hard
        thought = self._text.thought_tokens
        return FinishDetails(
            close_kind="hard" if hard else "natural",
            thinking_tokens=thought,
            content_tokens=total - thought,
            total_tokens=total,
        )

    def _release(self, *, all_held: bool) -> tuple[AnswerToken, ...]:
        """Return the held tokens whose text has been shown; drop those of thoughts and calls."""
        released, text = [], self._text
        while self._held:
            held = self._held[0]
            start = held.token.offset
            is_shown = text.is_text(start, held.end)
            if not all_held and not (start < text.shown and (is_shown or held.end <= text.shown)):
                break
            self._held.popleft()
            if is_shown:
                released.append(held.token)
        return tuple(released)

    def _end_with_costs(self, last: AnswerDelta, event: TokenEvent) -> AnswerDelta:
        """Return the answer's last delta at the engine's last event, else an empty delta.

        The engine's last event reports what experts cost and stages took, which the last delta
        must have.
        """
        if event.finish_reason is None:
            return AnswerDelta(index=self._index)
        told = event.timings or NO_TIME
        timings = replace(last.timings, experts=told.experts, stages=told.stages, parts=told.parts)
        return replace(last, timings=timings)


def join_deltas(deltas: Sequence[AnswerDelta]) -> Completion:
    """Return the whole answer that the deltas of one request add up to."""
    last = deltas[-1]
    assert last.finish_reason is not None
    return Completion(
        text="".join(delta.text for delta in deltas),
        thought="".join(delta.thought for delta in deltas),
        tool_calls=join_calls(call for delta in deltas for call in delta.calls),
        token_ids=tuple(delta.token for delta in deltas if delta.token is not None),
        finish_reason=last.finish_reason,
        stop_text=last.stop_text,
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        generated_tokens=last.generated_tokens,
        thought_tokens=last.thought_tokens,
        logprobs=tuple(delta.logprobs for delta in deltas if delta.logprobs is not None),
        shown_tokens=tuple(token for delta in deltas for token in delta.shown_tokens),
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        timings=last.timings,
        finish_details=last.finish_details,
    )
