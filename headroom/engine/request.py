"""What goes into the engine and what comes out: GenerationRequest, SamplingParams, TokenEvent."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headroom.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_LOGPROBS = 20
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn from the model's logits."""

    max_tokens: int | None = None  # tokens to generate; None: as many as the context holds
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0  # least probability, as a share of the likeliest token's
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = 256  # last tokens (prompt and generated) that penalties look at; 0: all
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    draw: int = 0  # which of several answers with the same seed this is
    logprobs: int | None = (
        None  # likeliest tokens to report beside the drawn one; None: no logprobs
    )
    prompt_logprobs: bool = False  # also report the prompt's own tokens
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # texts that end the answer; found by the caller, in text

    def __post_init__(self) -> None:
        _in_range("max_tokens", self.max_tokens, 1, None)
        _in_range("temperature", self.temperature, 0, 100)
        _in_range("top_k", self.top_k, 0, None)
        _in_range("top_p", self.top_p, 0, 1)
        _in_range("min_p", self.min_p, 0, 1)
        if not 0 < self.repetition_penalty <= 100:
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty}; it must be in (0, 100].",
                param="repetition_penalty",
            )
        _in_range("frequency_penalty", self.frequency_penalty, -100, 100)
        _in_range("presence_penalty", self.presence_penalty, -100, 100)
        _in_range("penalty_window", self.penalty_window, 0, None)
        _in_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _in_range("draw", self.draw, 0, None)
        _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for bias in self.logit_bias.values():
            _in_range("logit_bias", bias, -100, 100)
        if isinstance(self.stop, str):
            raise RequestError(
                f"stop is the text {self.stop[:40]!r}; it must be a tuple of texts.", param="stop"
            )
        if "" in self.stop:
            raise RequestError("A stop text is empty.", param="stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue."""

    id: str
    prompt: tuple[int, ...]  # token ids, at least one
    params: SamplingParams
    stop_ids: frozenset[int]  # tokens that end an answer, unless ignore_eos


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model, before any sampling setting, found a token and its rivals."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds."""

    queue_s: float  # from submission to its first step
    prefill_s: float  # from its first step to its first token
    decode_s: float  # from its first token to its last
    # With the last event, where a model has cold experts: what they cost while the request ran.
    experts: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One token of an answer, or its end; the last event of a request has a finish reason."""

    request_id: str
    token: int | None = None  # None where only the end is told
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first event, where asked for
    finish_reason: FinishReason | None = None
    error: str = ""  # with finish reason "error"
    prompt_tokens: int = 0
    generated_tokens: int = 0  # so far, this one included
    timings: Timings | None = None  # up to now


def _in_range(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None:
        return
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {value}; it must be {span}.", param=name)
