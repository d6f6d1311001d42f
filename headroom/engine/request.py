"""What goes into the engine and what comes out: GenerationRequest, SamplingParams, TokenEvent."""

import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from headroom.errors import ContextLengthError, RequestError
from headroom.options import DRAFT_MODEL, DRAFTERS

if TYPE_CHECKING:  # the command line reads SamplingParams, and plans need not wait for torch
    from headroom.engine.pooling import Vector
    from headroom.layers.draws import TokenMask

FinishReason = Literal["stop", "length", "cancelled", "error"]
Pooling = Literal["mean", "last"]  # of the hidden states of a prompt's tokens
MAX_LOGPROBS = 20
DRAFTS = (*DRAFTERS, DRAFT_MODEL, "none")  # what a request may choose to guess its tokens
MAX_SEED = (1 << 63) - 1
MAX_COUNT = (1 << 31) - 1  # the largest count of tokens and the largest token id
# Lower temperatures are 0. At this one, a token is e times likelier than another if their logits
# differ by 0.00001; far below it, logits divided by the temperature overflow.
LEAST_TEMPERATURE = 1e-5


def new_seed(bits: int) -> int:
    """Return a random seed of at most `bits` bits, up to 63."""
    return int.from_bytes(os.urandom(8)) >> (64 - bits)  # `secrets` takes longer to import


def setting(
    default: object = None,
    help: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    zero_below: float = 0.0,  # smaller values count as 0
) -> Any:
    """Declare one sampling setting.

    A setting with a help text is for users: the HTTP field and the command-line flag of its name
    are made from this declaration. A setting without one is set by code only.
    The limits of a number are such that neither the host's nor a device's sampler overflows.
    """
    metadata = {"help": help, "min": minimum, "max": maximum, "zero_below": zero_below}
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn from the model's logits, and when an answer ends."""

    max_tokens: int | None = setting(
        None,
        "tokens to generate; if left out, as many as the context holds",
        minimum=1,
        maximum=MAX_COUNT,
    )
    temperature: float = setting(
        1.0,
        "how freely tokens are drawn; 0 always takes the likeliest",
        minimum=0,
        maximum=100,
        zero_below=LEAST_TEMPERATURE,
    )
    top_k: int = setting(
        0, "draw from the K likeliest tokens; 0 for all", minimum=0, maximum=MAX_COUNT
    )
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
        1.0, "make tokens that came before less likely; 1 for no penalty", minimum=0.01, maximum=100
    )
    frequency_penalty: float = setting(
        0.0,
        "subtract this from a token's logit for each time it came before",
        minimum=-100,
        maximum=100,
    )
    presence_penalty: float = setting(
        0.0,
        "subtract this once from the logit of a token that came before",
        minimum=-100,
        maximum=100,
    )
    penalty_window: int = setting(
        256,
        "number of last tokens, prompt included, that the penalties count; 0 for all",
        minimum=0,
        maximum=MAX_COUNT,
    )
    logit_bias: Mapping[int, float] = setting(
        dict, "numbers to add to the logits of tokens, by token id", minimum=-100, maximum=100
    )
    seed: int = setting(
        0,
        "seed of the random numbers; if left out, every answer gets a new one",
        minimum=-MAX_SEED - 1,
        maximum=MAX_SEED,
    )
    # Which of several answers with one seed this is.
    draw: int = setting(0, minimum=0, maximum=MAX_COUNT)
    # The number of likeliest tokens to report with each drawn token; None: no logprobs.
    logprobs: int | None = setting(None, minimum=0, maximum=MAX_LOGPROBS)
    prompt_logprobs: bool = setting(False)  # also report logprobs of the prompt's tokens
    # What guesses tokens ahead: one of DRAFTS; None: what the engine was started with.
    draft: str | None = setting(None)
    ignore_eos: bool = setting(False, "do not end the answer where the model ends it")
    # The engine does not look for stop texts: `answers.AnswerReader` does.
    stop: tuple[str, ...] = setting((), "text that ends the answer; may be repeated")

    @property
    def penalises(self) -> bool:
        """Whether tokens that came before change the logits."""
        neutral = self.repetition_penalty == 1
        return not neutral or self.frequency_penalty != 0 or self.presence_penalty != 0

    def __post_init__(self) -> None:
        for declared in fields(self):
            value = _checked(declared, getattr(self, declared.name))
            object.__setattr__(self, declared.name, value)
        if isinstance(self.stop, str):
            raise RequestError(
                f"stop is the text {self.stop[:40]!r}; it must be a tuple of texts.", param="stop"
            )
        if "" in self.stop:
            raise RequestError("A stop text is empty.", param="stop")


def user_settings() -> "tuple[Field[Any], ...]":
    """Return the sampling settings that users give by name, in the order of their declaration."""
    return tuple(declared for declared in fields(SamplingParams) if declared.metadata["help"])


def with_defaults(defaults: Mapping[str, float], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were given, with a model's defaults for the others.

    Temperature 0 asks for the model's likeliest tokens, which no default may change.
    """
    temperature = given.get("temperature")
    greedy = isinstance(temperature, int | float) and 0 <= temperature < LEAST_TEMPERATURE
    return dict(given) if greedy else {**defaults, **given}


class TokenConstraint(Protocol):
    """Limits which tokens may come next in one answer: a grammar, or a thought budget.

    A constraint holds the state of one answer, so requests never share one. Before a step is
    launched, the engine asks `may_limit` whether the step's token may be limited. If so, it calls
    `mask` before the token is drawn. It calls `advance` with every token of the answer in order.
    `mask` runs in another thread than `advance`, but never at the same time.
    """

    def may_limit(self, unread: int) -> bool:
        """Whether the token after the next `unread` tokens may be limited, whatever those are."""

    def mask(self) -> "TokenMask | None":
        """Return the mask of the tokens that may come next, at least one; None: any token may.

        The mask has a word for every 32 logits.
        """

    def advance(self, token: int) -> None:
        """Take the token that was drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue, or to make a vector of."""

    id: str
    prompt: tuple[int, ...]  # token ids, at least one
    params: SamplingParams
    stop_ids: frozenset[int]  # tokens that end an answer, unless ignore_eos
    constraint: TokenConstraint | None = None  # None: any token may come next
    pooling: Pooling | None = None  # how a vector of the prompt is made; None: an answer is wanted
    # Requests share prefixes only with those of the same key; None: with no other request.
    cache_key: str | None = ""
    # The engine adds the logprobs of the prompt's tokens here, if they are asked for. Requests for
    # several answers to one prompt share the list, so that they are computed and held once.
    prompt_logprobs: "list[TokenLogprobs | None]" = field(default_factory=list)


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
    top: tuple["TopToken", ...]  # the likeliest tokens, likeliest first


class TopToken(NamedTuple):
    """One of the likeliest tokens of a position."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Timings:
    """How long each phase of a request took, in seconds, and how many guesses were right."""

    queue_s: float  # from submission to its first step
    prefill_s: float  # from its first step to its first token
    decode_s: float  # from its first token to its last
    # What cold experts cost while the request ran; with the last event, if the model has any.
    experts: Mapping[str, object] | None = None
    # What the steps of each stage took while the request ran; with the last event, if there are
    # several stages.
    stages: Sequence[Mapping[str, object]] | None = None
    # Seconds of the steps while the request ran, by part: "embedding", "layers", "logits" and
    # "sampling"; with the last event, if CPUs run all layers.
    parts: Mapping[str, float] | None = None
    guessed: int = 0  # tokens that a drafter guessed
    accepted: int = 0  # guesses that were right
    held_back: int = 0  # further guesses, which were not checked since that would not have paid


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
    cached_tokens: int = 0  # of the prompt, which an earlier request had computed
    generated_tokens: int = 0  # so far, this event's token included
    timings: Timings | None = None  # up to this event
    vector: "Vector | None" = None  # with the only event of a request with pooling


def _checked(declared: "Field[Any]", value: object) -> object:
    """Return the value of a setting, or refuse it; numbers become plain numbers of Python."""
    if declared.type == Mapping[int, float]:
        if not isinstance(value, Mapping):
            message = f"{declared.name} is {_shown(value)}; it must be a mapping of token ids."
            raise RequestError(message, param=declared.name)
        for token, number in value.items():
            _checked_number(declared, token, whole=True, limited=False)
            _checked_number(declared, number, whole=False)
        return value  # not copied: `n` answers share one
    if declared.type in (int, float):
        return _checked_number(declared, value, whole=declared.type is int)
    if declared.type == (int | None):
        return None if value is None else _checked_number(declared, value, whole=True)
    if declared.name == "draft" and value is not None and value not in DRAFTS:
        raise RequestError(
            f"draft is {_shown(value)}; it must be one of {', '.join(DRAFTS)}.", param="draft"
        )
    return value


def _checked_number(
    declared: "Field[Any]", value: object, *, whole: bool, limited: bool = True
) -> int | float:
    """Return a number within the limits of its setting: neither NaN nor infinite nor -0.0."""
    name, rules = declared.name, declared.metadata
    low, high = (rules["min"], rules["max"]) if limited else (-math.inf, math.inf)
    number: int | float
    try:
        if isinstance(value, bool | str):
            raise TypeError
        # numpy's numbers, too; a number that no float holds is beyond every limit.
        number = operator.index(value) if whole else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if low <= number <= high:
        return 0.0 if abs(number) < rules["zero_below"] else number + 0  # -0.0 + 0 is 0.0
    kind = "" if number == number else "a whole number " if whole else "a number "
    allowed = f"{kind}from {low} to {high}" if limited else "a token id"
    raise RequestError(f"{name} is {_shown(value)}; it must be {allowed}.", param=name)


def _shown(value: object) -> str:
    """Return a value as text for an error message, cut at 40 characters."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "beyond 64 bits"  # Python refuses to write very long numbers
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
