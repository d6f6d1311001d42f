"""ExpertTelemetry: how often the chosen experts were hot, and what the cold ones cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from headroom.experts.placement import ExpertPlacement

TIMES = ("hot", "cold", "wait")  # keys of `seconds`: small steps that ask a CPU
COPIES = "copies"  # another: the GPU's computing waited for copies of cold experts, long steps


@dataclass(frozen=True, slots=True)
class ColdFigures:
    """Totals since the start that only those know who compute experts."""

    read_bytes: Mapping[str, int] = field(default_factory=dict)  # by path: "gpu", "cpu", "stream"
    seconds: Mapping[str, float] = field(
        default_factory=dict
    )  # by TIMES and COPIES; empty: not measured


@dataclass(slots=True)
class ColdCosts:
    """What cold experts have cost so far, as those count it who bring or compute them."""

    streamed_bytes: int = 0  # that came to the GPU
    cpu_bytes: int = 0  # that a CPU has read
    cpu_s: float = 0.0  # that its answers took


class ColdMeter(Protocol):
    """Asked between steps by the engine's thread; may wait for a GPU."""

    @property
    def pick_bytes(self) -> Sequence[int]:
        """Bytes that nobody counts: those that a GPU alone reads in place, of a cold choice in a
        step of few rows, by layer; empty where there are none."""

    def figures(self) -> ColdFigures: ...


class DecodeCounts(Protocol):
    """What is known of decode steps whose cold experts a CPU computes."""

    @property
    def cpu_bytes(self) -> int: ...

    @property
    def gpu_bytes(self) -> int: ...

    @property
    def hot_s(self) -> float: ...

    @property
    def cold_s(self) -> float: ...

    @property
    def wait_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class JoinedMeter:
    """Fills ColdMeter from those who compute: a worker on the CPU, a stream of long steps."""

    worker: Callable[[], DecodeCounts] | None = None
    streamed_bytes: Callable[[], int] | None = None
    prompt: Callable[[], tuple[int, float]] | None = None  # bytes and seconds of a CPU, long steps
    pick_bytes: tuple[int, ...] = ()
    copies_s: Callable[[], float] | None = None  # that a GPU waited for copies, long steps

    def figures(self) -> ColdFigures:
        """Return the figures of both as one."""
        sizes: dict[str, int] = {}
        seconds: dict[str, float] = {}
        if self.worker is not None:
            counts = self.worker()
            sizes = {"gpu": counts.gpu_bytes, "cpu": counts.cpu_bytes}
            times = (counts.hot_s, counts.cold_s, counts.wait_s)
            seconds = dict(zip(TIMES, times, strict=True))
        if self.prompt is not None:
            size, took = self.prompt()
            sizes["cpu"] = sizes.get("cpu", 0) + size
            seconds["cold"] = seconds.get("cold", 0.0) + took
        if self.streamed_bytes is not None:
            sizes["stream"] = self.streamed_bytes()
        if self.copies_s is not None:
            seconds[COPIES] = self.copies_s()
        return ColdFigures(sizes, seconds)


@dataclass(frozen=True, slots=True)
class ExpertTelemetry:
    """Totals of all layers over some time; a layer without experts has zeros."""

    picks: tuple[int, ...]  # experts chosen, by layer
    hits: tuple[int, ...]  # of them, those that were hot
    tokens: int  # rows that went through the routers, prompts included
    cold_bytes: Mapping[str, int] = field(default_factory=dict)  # read, by path
    seconds: Mapping[str, float] = field(default_factory=dict)  # by TIMES and COPIES
    swaps: int = 0

    @property
    def hit_rate(self) -> float | None:
        """The share of choices that were hot; None before the first."""
        return _share(sum(self.hits), sum(self.picks))

    @property
    def layer_hit_rates(self) -> tuple[float | None, ...]:
        """The same by layer; None where a layer chose nothing."""
        return tuple(map(_share, self.hits, self.picks))

    @property
    def cold_picks(self) -> int:
        """Choices that were cold."""
        return sum(self.picks) - sum(self.hits)

    def since(self, earlier: "ExpertTelemetry") -> "ExpertTelemetry":
        """Return what happened after an earlier reading."""
        return ExpertTelemetry(
            picks=tuple(a - b for a, b in zip(self.picks, earlier.picks, strict=True)),
            hits=tuple(a - b for a, b in zip(self.hits, earlier.hits, strict=True)),
            tokens=self.tokens - earlier.tokens,
            cold_bytes={x: n - earlier.cold_bytes.get(x, 0) for x, n in self.cold_bytes.items()},
            seconds={x: s - earlier.seconds.get(x, 0.0) for x, s in self.seconds.items()},
            swaps=self.swaps - earlier.swaps,
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
            "swaps": self.swaps,
        }


class HitCounter:
    """Keeps picks and hits while the placement changes under the counts."""

    def __init__(self, used: Sequence[int], experts: int) -> None:
        layers = len(used)
        self._used = used
        self._seen = torch.zeros(layers, experts, dtype=torch.int64)
        self._few_seen = torch.zeros(layers, experts, dtype=torch.int64)
        self._hits = torch.zeros(layers, dtype=torch.int64)
        self._few_misses = torch.zeros(layers, dtype=torch.int64)
        self._hot = torch.ones(layers, experts, dtype=torch.int64)  # until a placement is known

    def place(self, placement: ExpertPlacement) -> None:
        """Take a placement as valid for all choices that are counted from now on."""
        self._hot.zero_()
        for layer, ids in enumerate(placement.hot):
            self._hot[layer, list(ids)] = 1

    def move(self, layer: int, promoted: int, demoted: int) -> None:
        """Take a swap as done for all choices that are counted from now on."""
        self._hot[layer, promoted], self._hot[layer, demoted] = 1, 0

    def count(self, counts: torch.Tensor, few_rows: torch.Tensor) -> None:
        """Take the totals `[layers, experts]` as they are now, and those of steps of few rows."""
        self._hits += ((counts - self._seen) * self._hot).sum(1)
        self._few_misses += ((few_rows - self._few_seen) * (1 - self._hot)).sum(1)
        self._seen, self._few_seen = counts, few_rows

    def reading(self, meter: ColdMeter | None = None, swaps: int = 0) -> ExpertTelemetry:
        """Return all totals so far."""
        picks = self._seen.sum(1).tolist()
        rows = (n // used for n, used in zip(picks, self._used, strict=True) if used)
        cold = self._with_picks(meter) if meter is not None else ColdFigures()
        return ExpertTelemetry(
            picks=tuple(picks),
            hits=tuple(self._hits.tolist()),
            tokens=next(rows, 0),
            cold_bytes=cold.read_bytes,
            seconds=cold.seconds,
            swaps=swaps,
        )

    def _with_picks(self, meter: ColdMeter) -> ColdFigures:
        """A meter's figures, with what a GPU has read in place for the choices seen here."""
        found = meter.figures()
        if not meter.pick_bytes:
            return found
        sizes = zip(self._few_misses.tolist(), meter.pick_bytes, strict=True)
        by_gpu = found.read_bytes.get("gpu", 0) + sum(picks * size for picks, size in sizes)
        return replace(found, read_bytes={**found.read_bytes, "gpu": by_gpu})


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
