"""ExpertTelemetry: how often the chosen experts were hot, and what the cold ones cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from headroom.experts.placement import ExpertPlacement

# Keys of `seconds`. Of decode steps that ask the CPU: the GPU computed hot experts, the CPU cold
# ones, the GPU waited for the CPU.
TIMES = ("hot", "cold", "wait")
COPIES = "copies"  # of prefill steps: the GPU waited for copies of cold experts


@dataclass(frozen=True, slots=True)
class ColdFigures:
    """What cold experts have cost since the start."""

    read_bytes: Mapping[str, int] = field(default_factory=dict)  # by path: "gpu", "cpu", "stream"
    seconds: Mapping[str, float] = field(default_factory=dict)  # by TIMES and COPIES, if measured


@dataclass(slots=True)
class ColdCosts:
    """Running totals, counted by the code that copies or computes cold experts."""

    streamed_bytes: int = 0  # copied to the GPU
    cpu_bytes: int = 0  # read by the CPU
    cpu_s: float = 0.0  # that the CPU took for its answers


@dataclass(frozen=True, slots=True)
class DecodeCounts:
    """Totals of decode steps in layers that ask the CPU."""

    cpu_bytes: int  # read by the CPU
    gpu_bytes: int  # read by the GPU over the link; an expert that two rows chose counts twice
    hot_s: float  # from a request to the time when the GPU had nothing else to do
    wait_s: float  # of the GPU, from then to the answer
    cold_s: float  # of the CPU, from requests to answers


@dataclass(frozen=True, slots=True)
class ColdMeter:
    """Reads what cold experts cost; for the engine's thread between steps. May wait for a GPU."""

    worker: Callable[[], DecodeCounts] | None = None  # of decode steps that ask the CPU
    costs: tuple[ColdCosts, ...] | None = None  # of prefill steps and of plain kernels
    cpu_costs: bool = False  # whether those may ask the CPU
    # By layer: bytes of one cold pick in a decode step that the GPU alone reads in place. These
    # reads are not counted, so they are computed from the picks. Empty if there are none.
    pick_bytes: tuple[int, ...] = ()
    copies_s: Callable[[], float] | None = None  # that the GPU waited for copies in prefill steps

    def figures(self) -> ColdFigures:
        """Return the totals of all paths, without what follows from `pick_bytes`."""
        sizes: dict[str, int] = {}
        seconds: dict[str, float] = {}
        if self.worker is not None:
            counts = self.worker()
            sizes = {"gpu": counts.gpu_bytes, "cpu": counts.cpu_bytes}
            times = (counts.hot_s, counts.cold_s, counts.wait_s)
            seconds = dict(zip(TIMES, times, strict=True))
        if self.costs is not None:
            if self.cpu_costs:
                sizes["cpu"] = sizes.get("cpu", 0) + sum(x.cpu_bytes for x in self.costs)
                seconds["cold"] = seconds.get("cold", 0.0) + sum(x.cpu_s for x in self.costs)
            sizes["stream"] = sum(x.streamed_bytes for x in self.costs)
        if self.copies_s is not None:
            seconds[COPIES] = self.copies_s()
        return ColdFigures(sizes, seconds)


@dataclass(frozen=True, slots=True)
class ExpertTelemetry:
    """Totals of all layers over a time; a layer without experts has zeros."""

    picks: tuple[int, ...]  # experts chosen, by layer
    hits: tuple[int, ...]  # picks that were hot, by layer
    tokens: int  # rows that went through the routers, prompts included
    cold_bytes: Mapping[str, int] = field(default_factory=dict)  # read, by path
    seconds: Mapping[str, float] = field(default_factory=dict)  # by TIMES and COPIES
    exchanges: int = 0  # experts that became hot

    @property
    def hit_rate(self) -> float | None:
        """The share of picks that were hot; None before the first pick."""
        return _share(sum(self.hits), sum(self.picks))

    @property
    def layer_hit_rates(self) -> tuple[float | None, ...]:
        """The share of picks that were hot, by layer; None for a layer without picks."""
        return tuple(map(_share, self.hits, self.picks))

    @property
    def cold_picks(self) -> int:
        """The number of picks that were cold."""
        return sum(self.picks) - sum(self.hits)

    def since(self, earlier: "ExpertTelemetry") -> "ExpertTelemetry":
        """Return the totals since an earlier reading."""
        return ExpertTelemetry(
            picks=tuple(a - b for a, b in zip(self.picks, earlier.picks, strict=True)),
            hits=tuple(a - b for a, b in zip(self.hits, earlier.hits, strict=True)),
            tokens=self.tokens - earlier.tokens,
            cold_bytes={x: n - earlier.cold_bytes.get(x, 0) for x, n in self.cold_bytes.items()},
            seconds={x: s - earlier.seconds.get(x, 0.0) for x, s in self.seconds.items()},
            exchanges=self.exchanges - earlier.exchanges,
        )

    def summary(self) -> dict[str, object]:
        """Return the figures as plain data, for a request's timings and for reports."""
        tokens = max(1, self.tokens)
        return {
            "hit_rate": _rounded(self.hit_rate),
            "layer_hit_rates": [_rounded(rate) for rate in self.layer_hit_rates],
            "cold_picks": self.cold_picks,
            "cold_bytes_per_token": {
                path: round(size / tokens) for path, size in self.cold_bytes.items()
            },
            "ms": {word: round(1000 * s, 3) for word, s in self.seconds.items()},
            "swaps": self.exchanges,
        }


class HitCounter:
    """Counts picks and hits while exchanges change the placement."""

    def __init__(self, used: Sequence[int], experts: int) -> None:
        layers = len(used)
        self._used = used
        self._seen = torch.zeros(layers, experts, dtype=torch.int64)
        self._decode_seen = torch.zeros(layers, experts, dtype=torch.int64)
        self._hits = torch.zeros(layers, dtype=torch.int64)
        self._decode_misses = torch.zeros(layers, dtype=torch.int64)
        self._hot = torch.ones(layers, experts, dtype=torch.int64)  # until a placement is known

    def set_placement(self, placement: ExpertPlacement) -> None:
        """Set the placement that holds for all picks counted from now on."""
        self._hot.zero_()
        for layer, ids in enumerate(placement.hot):
            self._hot[layer, list(ids)] = 1

    def move(self, layer: int, promoted: int, demoted: int) -> None:
        """Apply one exchange to the placement, for all picks counted from now on."""
        self._hot[layer, promoted], self._hot[layer, demoted] = 1, 0

    def count(self, counts: torch.Tensor, decode: torch.Tensor) -> None:
        """Count the new picks in totals `[layers, experts]` of all steps and of decode steps."""
        self._hits += ((counts - self._seen) * self._hot).sum(1)
        self._decode_misses += ((decode - self._decode_seen) * (1 - self._hot)).sum(1)
        self._seen, self._decode_seen = counts, decode

    def reading(self, meter: ColdMeter | None = None, exchanges: int = 0) -> ExpertTelemetry:
        """Return all totals so far; `exchanges` counts those that are done."""
        picks = self._seen.sum(1).tolist()
        rows = (n // used for n, used in zip(picks, self._used, strict=True) if used)
        cold = self._with_picks(meter) if meter is not None else ColdFigures()
        return ExpertTelemetry(
            picks=tuple(picks),
            hits=tuple(self._hits.tolist()),
            tokens=next(rows, 0),
            cold_bytes=cold.read_bytes,
            seconds=cold.seconds,
            exchanges=exchanges,
        )

    def _with_picks(self, meter: ColdMeter) -> ColdFigures:
        """Return the figures of a meter, with the bytes that the GPU alone has read in place."""
        found = meter.figures()
        if not meter.pick_bytes:
            return found
        sizes = zip(self._decode_misses.tolist(), meter.pick_bytes, strict=True)
        by_gpu = found.read_bytes.get("gpu", 0) + sum(picks * size for picks, size in sizes)
        return replace(found, read_bytes={**found.read_bytes, "gpu": by_gpu})


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
