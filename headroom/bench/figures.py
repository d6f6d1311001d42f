"""What `headroom bench` measures (BenchSettings) and its results (Figures), as plain values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headroom.bench.expert_use import ExpertUse
from headroom.bench.traffic import Traffic
from headroom.errors import OptionError
from headroom.split.pipeline import LoadTimes
from headroom.split.stage_times import NamedTimes

FIGURE_KINDS = ("prompts", "decode", "verify", "parts")
MORE_KINDS = ("prefix", "agent", "draft")  # measured only if they are asked for
# Kinds that look into the steps of other kinds, at least one of which must be measured, too.
LOOKS_INTO = {"verify": ("decode",), "parts": ("prompts", "decode")}
SHORT_CONTEXT = 512  # tokens; up to here the prompts are read again for every batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What to measure."""

    prompts: tuple[int, ...] = (512, 2048)  # tokens of each prompt
    contexts: tuple[int, ...] = (32, 16384)  # tokens before the decoded ones
    batches: tuple[int, ...] = (1, 4, 8, 16)  # sequences that decode together
    tokens: int = 128  # decoded by each sequence
    rounds: int = 3  # of every prompt; the median counts
    warm: int = 4  # tokens before the measured ones
    steps: int = 12  # number of steps whose parts are measured
    verify_rows: int = 16  # rows of one sequence in a verify step
    temperature: float = 1.0  # at 0, sequences may fall into loops, which visit few experts
    longer: int = 64  # tokens at the end of a prompt that an earlier one did not have
    agent_turns: int = 12  # prompts of an agent's session
    agent_tokens: int = 12000  # of its last prompt, if the context has room for them
    agent_answer: int = 32  # tokens of each of its answers
    patience_s: float = 300.0  # contexts whose prompts would take longer are left out
    accept: tuple[float, ...] = (0.6, 0.8, 0.9)  # shares of guesses that are made to be right
    only: tuple[str, ...] = FIGURE_KINDS  # the kinds that are measured
    # A JSON schema: decoding under it is compared with decoding freely; None: not measured.
    schema: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        known = FIGURE_KINDS + MORE_KINDS
        if unknown := [kind for kind in self.only if kind not in known]:
            raise OptionError(
                f"--only has {unknown[0]!r}.",
                hint=f"Known: {', '.join(known)}.",
                param="only",
            )
        if not self.accept or not all(0 <= share <= 1 for share in self.accept):
            raise OptionError(
                f"--accept is {','.join(map(str, self.accept)) or 'empty'}.",
                hint="Write shares from 0 to 1 with commas between them.",
                param="accept",
            )
        self._check_kinds()
        for name in ("prompts", "contexts", "batches", "tokens", "rounds"):
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            if not values or min(values) < 1:
                flag = name.replace("batches", "batch")
                raise OptionError(
                    f"--{flag} is {','.join(map(str, values)) or 'empty'}.",
                    hint="Write whole numbers above 0.",
                    param=flag,
                )

    def _check_kinds(self) -> None:
        """Refuse kinds that look into the steps of other kinds if none of those is measured."""
        if not self.only:
            raise OptionError(
                "--only and --no-parts leave nothing to measure.",
                hint=f"Name some of {', '.join(FIGURE_KINDS)}.",
                param="only",
            )
        for kind, others in LOOKS_INTO.items():
            if kind in self.only and not set(others) & set(self.only):
                raise OptionError(
                    f"--only {','.join(self.only)} has {kind} without {' or '.join(others)}, whose "
                    "steps it looks into.",
                    hint=f"Write --only {others[-1]},{','.join(self.only)}.",
                    param="only",
                )

    def room(self, context: int, batches: tuple[int, ...], chunk: int) -> int:
        """Return the tokens that a sequence needs beyond its context while batches shrink.

        Sequences whose prompts are read first decode while the prompts of the others are read.
        """
        waiting = -(-context * max(batches) // chunk) + 1
        margin = 64  # tokens: the engine goes on for a few steps when a figure is complete
        return waiting + len(batches) * (self.warm + self.tokens + margin)


QUICK = BenchSettings(
    prompts=(128, 512), contexts=(32, 512), batches=(1, 4), tokens=16, rounds=1, steps=6,
    agent_turns=4, agent_tokens=1500, agent_answer=8,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadParts:
    """Where the time went until a model was ready."""

    total_s: float
    planning_s: float  # reading headers, planning, choosing which experts are hot
    times: LoadTimes

    @property
    def other_s(self) -> float:
        """The rest: starting CUDA and threads, and checks."""
        return self.total_s - self.planning_s - self.times.weights_s - self.times.capture_s

    def as_json(self) -> dict[str, float]:
        """Return the times as JSON."""
        return {
            "planning_s": self.planning_s,
            **asdict(self.times),
            "weights_bytes_per_s": self.times.bytes_per_s,
            "other_s": self.other_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFigure:
    """The speed of one prompt, from its first step to its first token."""

    tokens: int
    seconds: float
    operations: float  # multiplications and additions of the prompt's matrix products
    experts: ExpertUse | None = None  # None: the model has no routed experts

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class StageFigure:
    """What one stage took for a step, as the mean over the measured steps."""

    device: str
    busy_s: float  # computing
    handover_s: float  # handing rows to the stage after, or taking them from the stage before


def stage_figures(before: NamedTimes, after: NamedTimes) -> tuple[StageFigure, ...]:
    """Return what the stages took between two readings; nothing if one stage runs all layers."""
    found = []
    for (device, old), (_, new) in zip(before, after, strict=True):
        steps = new.since(old)
        count = max(1, steps.steps)
        found.append(StageFigure(device, steps.busy_s / count, steps.handover_s / count))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFigure:
    """The speed of sequences that decode together."""

    batch: int
    context: int  # tokens of each prompt
    mean_context: float  # mean number of cached tokens of a sequence during the measurement
    step_s: float  # from token to token, through the engine
    pipeline_s: float  # of the network alone: a step from token ids to logits
    traffic: Traffic  # bytes of one step
    experts: ExpertUse | None = None  # None: the model has no routed experts
    stages: tuple[StageFigure, ...] = ()  # empty: one stage runs all layers

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all sequences together."""
        return self.batch / self.step_s

    def limit(self, bandwidth: float) -> float:
        """Return the tokens per second of a step that takes only the time to move its bytes."""
        return self.batch * bandwidth / self.traffic.total


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaFigure:
    """The speed of sequences that decode together, freely and under a JSON schema."""

    batch: int
    context: int  # tokens of each prompt
    free_s: float  # from token to token, through the engine
    step_s: float  # the same, with every sequence under the schema
    mask_s: float  # host time to compute the mask of one token

    @property
    def free_tokens_per_s(self) -> float:
        """Tokens per second of all sequences together, without a schema."""
        return self.batch / self.free_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all sequences together, under the schema."""
        return self.batch / self.step_s

    @property
    def loss(self) -> float:
        """The share of the free speed that the schema costs; below 0 if it was faster."""
        return 1 - self.free_s / self.step_s


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What one prompt took until its first token."""

    prompt: int  # tokens
    cached: int  # of them, which an earlier prompt had computed
    seconds: float  # from the submission to the first token

    @property
    def computed(self) -> int:
        """The tokens that were computed."""
        return self.prompt - self.cached


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFigure:
    """The time to the first token of a prompt that is new, and of prompts that begin like it."""

    cold: FirstToken
    same: FirstToken  # the very same prompt
    longer: FirstToken  # with more tokens at the end
    branch: FirstToken  # with other tokens from the middle on

    @property
    def warm(self) -> Mapping[str, FirstToken]:
        """The prompts after the cold one, by name."""
        return {"same": self.same, "longer": self.longer, "branch": self.branch}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFigure:
    """A session of an agent: prompts that grow, with the prefix cache and without it."""

    warm: tuple[FirstToken, ...]
    cold: tuple[FirstToken, ...]  # the same turns without the cache
    answer_tokens: int  # of each answer
    equal_answers: int  # turns whose answers are equal with and without the cache

    @property
    def warm_s(self) -> float:
        """The time to the first token of all turns together, with the cache."""
        return sum(turn.seconds for turn in self.warm)

    @property
    def cold_s(self) -> float:
        """The time to the first token of all turns together, without the cache."""
        return sum(turn.seconds for turn in self.cold)


@dataclass(frozen=True, slots=True)
class DraftFigure:
    """An answer with guesses, a given share of which was right, against the same without them."""

    share: float  # of the guesses that were made to be right
    guesses: int  # in a step, at most
    context: int  # tokens of the prompt
    tokens: int  # of the answer, but for the first
    steps: int
    guessed: int
    right: int  # guesses that were right, after right ones
    seconds: float
    plain_s: float  # without guesses
    equal: bool  # the answer has the same tokens without guesses

    @property
    def accepted_length(self) -> float:
        """Tokens for each step."""
        return self.tokens / self.steps

    @property
    def speed_up(self) -> float:
        """How many times as fast the answer was."""
        return self.plain_s / self.seconds

    @property
    def step_ratio(self) -> float:
        """How many times as long a step took as one without guesses."""
        return self.seconds / self.steps / (self.plain_s / self.tokens)


@dataclass(frozen=True, slots=True)
class VerifyFigure:
    """A step that verifies several drafted tokens of one sequence, against one that decodes."""

    rows: int
    context: int
    step_s: float  # with `rows` rows, network alone
    decode_s: float  # with one row, network alone

    @property
    def ratio(self) -> float:
        """How many times as long the step with several rows takes."""
        return self.step_s / self.decode_s


@dataclass(frozen=True, slots=True)
class PartTimes:
    """The parts of a step, as the mean over some steps, in seconds."""

    steps: int
    step_s: float  # from the start of one step to the start of the next
    parts: dict[str, float]
    kernels: dict[str, dict[str, float]]  # on a GPU: the kernels of each part, longest first
    kernel_s: float = 0.0  # time in which a GPU ran at least one kernel
    link_s: float = 0.0  # time in which something was copied between the GPU and the host

    @property
    def busy_s(self) -> float:
        """The time of all parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class PartFigure:
    """Where the time of a step goes."""

    # "decode", "verify", "prompt", or "network": decode steps without the engine.
    what: str
    batch: int  # sequences; for "verify" the rows of one sequence
    context: int  # tokens of the prompt, or tokens before the step
    step_s: float
    times: PartTimes

    @property
    def gaps_s(self) -> float:
        """The time of a step that belongs to no part."""
        return max(0.0, self.step_s - self.times.busy_s)

    @property
    def gpu_share(self) -> float | None:
        """The share of a step in which a GPU ran kernels, also ones that wait; None on a CPU."""
        return min(1.0, self.times.kernel_s / self.step_s) if self.times.kernel_s else None

    @property
    def link_share(self) -> float:
        """The share of a step in which something was copied over the link."""
        return min(1.0, self.times.link_s / self.step_s)


@dataclass(slots=True)
class Figures:
    """All measurements of one run."""

    prompts: list[PromptFigure] = field(default_factory=list)
    decodes: list[DecodeFigure] = field(default_factory=list)
    schemas: list[SchemaFigure] = field(default_factory=list)
    prefixes: list[PrefixFigure] = field(default_factory=list)
    agent: AgentFigure | None = None
    drafts: list[DraftFigure] = field(default_factory=list)
    verify: VerifyFigure | None = None
    parts: list[PartFigure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what was not measured, and why
