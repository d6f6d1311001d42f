"""What is measured, and what came of it: plain values."""

from dataclasses import dataclass, field

from headroom.bench.expert_use import ExpertUse
from headroom.bench.timeline import PartTimes
from headroom.bench.traffic import Traffic
from headroom.errors import OptionError

KINDS = ("prompts", "decode", "verify", "parts")  # of figures
BESIDE = {"verify": ("decode",), "parts": ("prompts", "decode")}  # what each says more of
SHORT_CONTEXT = 512  # up to here a context is cheap enough to be made anew for every batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What to measure."""

    prompts: tuple[int, ...] = (512, 2048)  # tokens of each prompt
    contexts: tuple[int, ...] = (32, 16384)  # tokens before the decoded ones
    batches: tuple[int, ...] = (1, 4, 8, 16)  # sequences that decode together
    tokens: int = 128  # decoded by each sequence
    rounds: int = 3  # of every prompt; the median counts
    warm: int = 4  # tokens before those that are measured
    steps: int = 12  # whose parts are measured
    verify_rows: int = 16
    temperature: float = 1.0  # 0: sequences may fall into loops, which visit few experts
    patience_s: float = 300.0  # the most that the prompts of one context may take
    only: tuple[str, ...] = KINDS  # what is measured of all that

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.only if kind not in KINDS]:
            raise OptionError(
                f"--only has {unknown[0]!r}.", hint=f"Known: {', '.join(KINDS)}.", param="only"
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
        """Refuse kinds that say more of others where those are not measured."""
        if not self.only:
            raise OptionError(
                "--only and --no-parts leave nothing to measure.",
                hint=f"Name some of {', '.join(KINDS)}.",
                param="only",
            )
        for kind, others in BESIDE.items():
            if kind in self.only and not set(others) & set(self.only):
                raise OptionError(
                    f"--only {','.join(self.only)} has {kind} without {' or '.join(others)}, whose "
                    "steps it looks into.",
                    hint=f"Write --only {others[-1]},{','.join(self.only)}.",
                    param="only",
                )

    def room(self, context: int, batches: tuple[int, ...], chunk: int) -> int:
        """Return the tokens that a sequence needs beyond its context while batches shrink.

        Those whose prompts are read first decode while the others' are read.
        """
        waiting = -(-context * max(batches) // chunk) + 1
        margin = 64  # it takes a few steps to see that a figure is complete
        return waiting + len(batches) * (self.warm + self.tokens + margin)


QUICK = BenchSettings(
    prompts=(128, 512), contexts=(32, 512), batches=(1, 4), tokens=16, rounds=1, steps=6
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFigure:
    """One prompt, from its first step to its first token."""

    tokens: int
    seconds: float
    operations: float  # of the whole prompt's products
    experts: ExpertUse | None = None  # None: the model has none

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens in a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFigure:
    """Sequences that decode together."""

    batch: int
    context: int  # tokens of each prompt
    mean_context: float  # tokens in each one's cache while it was measured
    step_s: float  # from token to token, all of the engine included
    pipeline_s: float  # of the network alone, from tables to logits
    traffic: Traffic  # of one step
    experts: ExpertUse | None = None  # None: the model has none

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all sequences in a second."""
        return self.batch / self.step_s

    def limit(self, bandwidth: float) -> float:
        """Return the tokens per second if a step took only the time of its bytes."""
        return self.batch * bandwidth / self.traffic.total


@dataclass(frozen=True, slots=True)
class VerifyFigure:
    """A step that checks several guessed tokens of one sequence, against one that decodes."""

    rows: int
    context: int
    step_s: float  # of the network alone
    decode_s: float  # of the network alone, one row

    @property
    def ratio(self) -> float:
        """How much longer the step with several rows takes."""
        return self.step_s / self.decode_s


@dataclass(frozen=True, slots=True)
class PartFigure:
    """Where the time of a step goes."""

    # "decode", "verify", "prompt", or "network": decoding without the engine around it.
    what: str
    batch: int  # sequences; of "verify" the rows of one
    context: int  # tokens of the prompt, or before the step
    step_s: float
    times: PartTimes

    @property
    def gaps_s(self) -> float:
        """What no part accounts for."""
        return max(0.0, self.step_s - self.times.busy_s)

    @property
    def gpu_share(self) -> float | None:
        """The share of a step in which a GPU ran kernels, waiting ones too; None on a CPU."""
        return min(1.0, self.times.kernel_s / self.step_s) if self.times.kernel_s else None

    @property
    def link_share(self) -> float:
        """The share of a step in which something was copied over the link."""
        return min(1.0, self.times.link_s / self.step_s)


@dataclass(slots=True)
class Figures:
    """All that one run measured of a model."""

    prompts: list[PromptFigure] = field(default_factory=list)
    decodes: list[DecodeFigure] = field(default_factory=list)
    verify: VerifyFigure | None = None
    parts: list[PartFigure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what was asked for and why it is not here
