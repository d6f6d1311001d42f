"""What goes into the engine and what comes out: GenerationRequest, SamplingParams, TokenEvent."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headroom.errors import ContextLengthError, RequestError

if TYPE_CHECKING:  # the command line reads SamplingParams, and plans need not wait for torch
    from headroom.engine.pooling import Vector
    from headroom.layers.draws import TokenMask

FinishReason = Literal["stop", "length", "cancelled", "error"]
Pooling = Literal["mean", "last"]  # of the hidden states of a prompt's tokens
MAX_LOGPROBS = 20
MAX_SEED = (1 << 63) - 1


def new_seed(bits: int) -> int:
    """Return a random seed of at most `bits` bits, up to 63."""
    return int.from_bytes(os.urandom(8)) >> (64 - bits)  # `secrets` takes longer to import


def setting(
    default: object = None,
    help: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,  # like `minimum`, but the value itself is refused
) -> Any:
    """Declare one sampling setting.

    A setting with a help text is a user's: the HTTP field and the command-line flag of its name
    are made from this declaration. Settings without one are set by the code that makes a request.
    """
    metadata = {"help": help, "min": minimum, "max": maximum, "above": above}
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn from the model's logits, and when an answer ends."""

    max_tokens: int | None = setting(
        None, "tokens to generate; if left out, as many as the context holds", minimum=1
    )
    temperature: float = setting(
        1.0, "how freely tokens are drawn; 0 always takes the likeliest", minimum=0, maximum=100
    )
    top_k: int = setting(0, "draw from the K likeliest tokens; 0 for all", minimum=0)
    top_p: float = setting(
        1.0,
        "draw from the likeliest tokens that together have this probability",
        minimum=0,
        maximum=1,
    )
    min_p: float = setting(
        0.0,
        "drop tokens below this share of the likeliest token's probability",
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float = setting(
        1.0, "make tokens that were seen less likely; 1 for none", above=0, maximum=100
    )
    frequency_penalty: float = setting(
        0.0,
        "subtract this from a token's logit for each time it was seen",
        minimum=-100,
        maximum=100,
    )
    presence_penalty: float = setting(
        0.0, "subtract this once from the logit of a token that was seen", minimum=-100, maximum=100
    )
    penalty_window: int = setting(
        256,
        "number of last tokens, prompt included, that the penalties look at; 0 for all",
        minimum=0,
    )
    logit_bias: Mapping[int, float] = setting(
        dict, "numbers to add to the logits of single tokens", minimum=-100, maximum=100
    )
    seed: int = setting(
        0,
        "start of the random numbers; a new one for every answer if left out",
        minimum=-MAX_SEED - 1,
        maximum=MAX_SEED,
    )
    draw: int = setting(0, minimum=0)  # which of several answers with one seed this is
    # The number of likeliest tokens to report with each drawn token; None: no logprobs.
    logprobs: int | None = setting(None, minimum=0, maximum=MAX_LOGPROBS)
    prompt_logprobs: bool = setting(False)  # also report logprobs of the prompt's tokens
    ignore_eos: bool = setting(False, "go on where the model would end its answer")
    # The engine does not look for stop texts: `answers.AnswerReader` does, which makes the text.
    stop: tuple[str, ...] = setting((), "text that ends the answer; may be repeated")

    @property
    def penalises(self) -> bool:
        """Whether tokens that came before change the logits."""
        neutral = self.repetition_penalty == 1
        return not neutral or self.frequency_penalty != 0 or self.presence_penalty != 0

    def __post_init__(self) -> None:
        for declared in fields(self):
            value = getattr(self, declared.name)
            for number in value.values() if isinstance(value, Mapping) else (value,):
                _check_range(declared, number)
        if isinstance(self.stop, str):
            raise RequestError(
                f"stop is the text {self.stop[:40]!r}; it must be a tuple of texts.", param="stop"
            )
        if "" in self.stop:
            raise RequestError("A stop text is empty.", param="stop")


def user_settings() -> "tuple[Field[Any], ...]":
    """Return the sampling settings that users give by name, in the order of their declaration."""
    return tuple(declared for declared in fields(SamplingParams) if declared.metadata["help"])


class TokenConstraint(Protocol):
    """Limits which tokens may come next in one answer: a grammar, or a budget of thoughts.

    A constraint has the state of one answer, so requests never share one. The engine calls
    `advance` with each token of the answer in order, then `mask` once before the next token is
    drawn; never both at the same time, but `mask` from a thread of its own. Before it launches a
    step it asks by `may_limit`, and if the answer is no, it does not ask for the mask.
    """

    def may_limit(self, unread: int) -> bool:
        """Whether the token after `unread` more tokens, whatever they are, may be limited."""

    def mask(self) -> "TokenMask | None":
        """Return the tokens that may come next, at least one; None means that any token may come.

        The mask has a word for every 32 rows of logits.
        """

    def advance(self, token: int) -> None:
        """Take the token that was drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue."""

    id: str
    prompt: tuple[int, ...]  # token ids, at least one
    params: SamplingParams
    stop_ids: frozenset[int]  # tokens that end an answer, unless ignore_eos
    constraint: TokenConstraint | None = None  # None: any token may come next
    pooling: Pooling | None = None  # a vector of the prompt is wanted, and no answer


def check_request(request: GenerationRequest, context: int, vocab: int) -> None:
    """Refuse a request that an engine of this context and vocabulary (in tokens) cannot run."""
    if not request.prompt:
        raise RequestError("The prompt is empty.", param="prompt")
    if len(request.prompt) >= context:
        raise ContextLengthError(
            f"The prompt has {len(request.prompt)} tokens and the context holds {context}, "
            "the answer included.",
            hint="Shorten the prompt or raise --context.",
            param="prompt",
            tokens=len(request.prompt),
            context=context,
        )
    check_token_ids(request.prompt, vocab, "prompt")
    check_token_ids(request.params.logit_bias, vocab, "logit_bias")


def check_token_ids(ids: Iterable[int], vocab: int, param: str) -> None:
    """Refuse token ids outside a vocabulary of `vocab` tokens; `param` is the field at fault."""
    for token in ids:
        if not 0 <= token < vocab:
            raise RequestError(
                f"Token id {token} is outside the vocabulary of {vocab}.", param=param
            )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one position, from the model's logits before any sampling setting."""

    logprob: float  # of the token that stands at the position
    top: tuple[tuple[int, float], ...]  # the likeliest tokens: (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds."""

    queue_s: float  # from submission to its first step
    prefill_s: float  # from its first step to its first token
    decode_s: float  # from its first token to its last
    # With the last event, if the model has cold experts: what they cost while the request ran.
    experts: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One token of an answer, or the answer's end; a request's last event has a finish reason."""

    request_id: str
    token: int | None = None  # None if the event only reports the end
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first event, if asked for
    finish_reason: FinishReason | None = None
    error: str = ""  # with finish reason "error"
    prompt_tokens: int = 0
    generated_tokens: int = 0  # so far, this event's token included
    timings: Timings | None = None  # up to this event
    vector: "Vector | None" = None  # with the only event of a request with pooling


def _check_range(declared: "Field[Any]", value: object) -> None:
    """Refuse a number outside the bounds that its setting was declared with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    name, rules = declared.name, declared.metadata
    low, high, above = rules["min"], rules["max"], rules["above"]
    if (
        math.isfinite(value)
        and (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
    ):
        return
    if above is not None:
        allowed = f"in ({above}, {high}]"
    else:
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
    raise RequestError(f"{name} is {value}; it must be {allowed}.", param=name)
