"""ExpertTelemetry: how often the chosen experts were hot, and what the cold ones cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from headroom.experts.cache import Policy
from headroom.experts.placement import ExpertPlacement

# Keys of `seconds`. Of decode steps that ask the CPU: the GPU computed hot experts, the CPU cold
# ones, the GPU waited for the CPU.
TIMES = ("hot", "cold", "wait")
COPIES = "copies"  # of prefill steps: the GPU waited for copies of cold experts
# Why a picked expert was in GPU memory: the host had put it there (so it is in layers without a
# cache), a step that missed it had filled the slot, or the end of a prompt had, ahead of the steps
# that use it.
HIT_CAUSES = ("pinned", "cached", "prefetched")
# Where decode steps found experts that were not: read over the link into a slot, read in place over
# the link, or computed by the CPU. Each counts once a step, however many rows picked it.
MISS_PATHS = ("filled", "in_place", "cpu")


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """What the caches of all layers did since the start, by layer; without a cache: zeros."""

    used: tuple[bool, ...]  # whether the layer has a cache that was asked
    hits: tuple[int, ...]  # picks
    causes: tuple[Mapping[str, int], ...]  # of the hits, by HIT_CAUSES
    linked: tuple[int, ...]  # experts that crossed the link, filled or not, each once a step
    filled: tuple[int, ...]


def cache_totals(counts: torch.Tensor, fields: Sequence[str]) -> CacheTotals:
    """Return the totals that counters int64 `[layers, fields]` in host memory stand for.

    `fields` are those of the counters, and among them all that this needs.
    """
    columns = dict(zip(fields, counts.t().tolist(), strict=True))
    pinned, ahead = columns["pinned_hits"], columns["prefetched_hits"]
    return CacheTotals(
        used=tuple(steps > 0 for steps in columns["steps"]),
        hits=tuple(columns["hits"]),
        causes=tuple(
            dict(zip(HIT_CAUSES, (own, hits - own - early, early), strict=True))
            for hits, own, early in zip(columns["hits"], pinned, ahead, strict=True)
        ),
        linked=tuple(columns["linked"]),
        filled=tuple(columns["filled"]),
    )


@dataclass(frozen=True, slots=True)
class ColdPaces:
    """How cold experts are shared now; paces are speeds as shares of the calibrated ones."""

    cpu_share: float  # of the cold experts of decode steps: those that the CPU is to compute
    cpu: float  # pace of the CPU in decode steps
    cpu_prompts: float  # pace of the CPU in prompts
    link: float  # pace of copies over the link, in prompts

    def summary(self) -> dict[str, float]:
        """Return the figures as plain data."""
        return {
            "cpu_share": round(self.cpu_share, 4),
            "cpu_pace": round(self.cpu, 4),
            "cpu_pace_in_prompts": round(self.cpu_prompts, 4),
            "link_pace": round(self.link, 4),
        }


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The policy by which slots change hands, and how each policy would have done lately."""

    policy: str  # one of cache.POLICIES; several with commas, if GPUs differ
    hit_rates: Mapping[Policy, float]  # in the last comparison; empty before the first one

    def summary(self) -> dict[str, object]:
        """Return the figures as plain data."""
        rates = {name: round(rate, 4) for name, rate in self.hit_rates.items()}
        return {"policy": self.policy, "policy_hit_rates": rates}


@dataclass(frozen=True, slots=True)
class ColdFigures:
    """What cold experts have cost since the start."""

    read_bytes: Mapping[str, int] = field(default_factory=dict)  # by path: "gpu", "cpu", "stream"
    seconds: Mapping[str, float] = field(default_factory=dict)  # by TIMES and COPIES, if measured
    # Experts of decode steps, in layers that ask the CPU: read over the link; computed by the CPU.
    linked: int = 0
    by_cpu: int = 0


@dataclass(frozen=True, slots=True)
class ColdReading:
    """All that a meter tells at one moment: plain data, which another process can send."""

    figures: ColdFigures = field(default_factory=ColdFigures)
    # By layer: bytes of one cold pick in a decode step that the GPU alone reads in place. These
    # reads are not counted, so they are computed from the picks. Empty if there are none.
    pick_bytes: tuple[int, ...] = ()
    cache: CacheTotals | None = None  # of layers whose slots change hands in steps
    # By layer: bytes of an expert in a layer with a cache that never asks the CPU; 0 for others.
    cache_bytes: tuple[int, ...] = ()
    paces: ColdPaces | None = None  # if the CPU's share follows its speed
    policy: PolicyState | None = None  # if slots change hands within steps


class Meter(Protocol):
    """Reads what cold experts cost, here or in other processes."""

    def read(self) -> ColdReading:
        """Return all totals; for the engine's thread between steps. May wait for a GPU."""


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
    gpu_bytes: int  # read by the GPU over the link, each expert once a step
    hot_s: float  # from a request to the time when the GPU had nothing else to do
    wait_s: float  # of the GPU, from then to the answer
    cold_s: float  # of the CPU, from requests to answers
    linked: int = 0  # experts that the GPU read over the link, each once a step
    by_cpu: int = 0  # experts that the CPU computed, each once a step


@dataclass(frozen=True, slots=True)
class ColdMeter:
    """Reads what the cold experts of one device cost."""

    worker: Callable[[], DecodeCounts] | None = None  # of decode steps that ask the CPU
    costs: tuple[ColdCosts, ...] | None = None  # of prefill steps and of plain kernels
    cpu_costs: bool = False  # whether those may ask the CPU
    pick_bytes: tuple[int, ...] = ()  # as in ColdReading
    copies_s: Callable[[], float] | None = None  # that the GPU waited for copies in prefill steps
    cache: Callable[[], CacheTotals] | None = None  # of layers whose slots change hands in steps
    cache_bytes: tuple[int, ...] = ()  # as in ColdReading
    paces: Callable[[], ColdPaces] | None = None  # if the CPU's share follows its speed
    policy: Callable[[], PolicyState] | None = None  # if slots change hands within steps

    def read(self) -> ColdReading:
        """Return all totals so far; may wait for a GPU."""
        return ColdReading(
            figures=self.figures(),
            pick_bytes=self.pick_bytes,
            cache=None if self.cache is None else self.cache(),
            cache_bytes=self.cache_bytes,
            paces=None if self.paces is None else self.paces(),
            policy=None if self.policy is None else self.policy(),
        )

    def figures(self) -> ColdFigures:
        """Return the totals of all paths, without what follows from `pick_bytes`."""
        sizes: dict[str, int] = {}
        seconds: dict[str, float] = {}
        linked = by_cpu = 0
        if self.worker is not None:
            counts = self.worker()
            sizes = {"gpu": counts.gpu_bytes, "cpu": counts.cpu_bytes}
            times = (counts.hot_s, counts.cold_s, counts.wait_s)
            seconds = dict(zip(TIMES, times, strict=True))
            linked, by_cpu = counts.linked, counts.by_cpu
        if self.costs is not None:
            if self.cpu_costs:
                sizes["cpu"] = sizes.get("cpu", 0) + sum(x.cpu_bytes for x in self.costs)
                seconds["cold"] = seconds.get("cold", 0.0) + sum(x.cpu_s for x in self.costs)
            sizes["stream"] = sum(x.streamed_bytes for x in self.costs)
        if self.copies_s is not None:
            seconds[COPIES] = self.copies_s()
        return ColdFigures(sizes, seconds, linked, by_cpu)


@dataclass(frozen=True, slots=True)
class ExpertTelemetry:
    """Totals of all layers over a time; a layer without experts has zeros."""

    picks: tuple[int, ...]  # experts chosen, by layer
    hits: tuple[int, ...]  # picks that were hot, by layer
    tokens: int  # rows that went through the routers, prompts included
    cold_bytes: Mapping[str, int] = field(default_factory=dict)  # read, by path
    seconds: Mapping[str, float] = field(default_factory=dict)  # by TIMES and COPIES
    exchanges: int = 0  # experts that became hot
    causes: Mapping[str, int] = field(default_factory=dict)  # of all hits, by HIT_CAUSES
    misses: Mapping[str, int] = field(default_factory=dict)  # of decode steps, by MISS_PATHS
    paces: ColdPaces | None = None  # as they are now; None: nothing follows them
    policy: PolicyState | None = None  # as it is now; None: experts stay, but for exchanges

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
            cold_bytes=_less(self.cold_bytes, earlier.cold_bytes),
            seconds={x: s - earlier.seconds.get(x, 0.0) for x, s in self.seconds.items()},
            exchanges=self.exchanges - earlier.exchanges,
            causes=_less(self.causes, earlier.causes),
            misses=_less(self.misses, earlier.misses),
            paces=self.paces,
            policy=self.policy,
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
            "hits_by": dict(self.causes),
            "misses_by": dict(self.misses),
            **({} if self.paces is None else self.paces.summary()),
            **({} if self.policy is None else self.policy.summary()),
        }


class HitCounter:
    """Counts picks and hits while exchanges, and caches in steps, change the placement."""

    def __init__(self, used: Sequence[int], experts: int) -> None:
        layers = len(used)
        self._used = used
        self._seen = torch.zeros(layers, experts, dtype=torch.int64)
        self._decode_seen = torch.zeros(layers, experts, dtype=torch.int64)
        self._hits = torch.zeros(layers, dtype=torch.int64)
        self._decode_hits = torch.zeros(layers, dtype=torch.int64)
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

    def hot(self) -> list[list[bool]]:
        """Return whether each expert is hot, by layer; rows of layers with fewer are too long."""
        return self._hot.bool().tolist()

    def count(self, counts: torch.Tensor, decode: torch.Tensor) -> None:
        """Count the new picks in totals `[layers, experts]` of all steps and of decode steps."""
        new = decode - self._decode_seen
        self._hits += ((counts - self._seen) * self._hot).sum(1)
        self._decode_hits += (new * self._hot).sum(1)
        self._decode_misses += (new * (1 - self._hot)).sum(1)
        self._seen, self._decode_seen = counts, decode

    def reading(self, meter: Meter | None = None, exchanges: int = 0) -> ExpertTelemetry:
        """Return all totals so far; `exchanges` counts those that are done.

        Hits of decode steps in layers with a cache are those that the cache has counted.
        """
        picks = self._seen.sum(1).tolist()
        rows = (n // used for n, used in zip(picks, self._used, strict=True) if used)
        cold = ColdReading() if meter is None else meter.read()
        cache, found = cold.cache, cold.figures
        read = {**found.read_bytes}
        linked, filled = found.linked, 0
        if cold.pick_bytes:
            sizes = zip(self._decode_misses.tolist(), cold.pick_bytes, strict=True)
            in_place = [(misses, size) for misses, size in sizes if size]
            linked += sum(misses for misses, _ in in_place)
            read["gpu"] = read.get("gpu", 0) + sum(misses * size for misses, size in in_place)
        if cache is not None:
            alone = [*zip(cache.linked, cold.cache_bytes, strict=True)]
            linked += sum(crossed for crossed, size in alone if size)
            read["gpu"] = read.get("gpu", 0) + sum(crossed * size for crossed, size in alone)
            filled = sum(cache.filled)
        hits, causes = self._hits_with(cache)
        misses = dict(zip(MISS_PATHS, (filled, linked - filled, found.by_cpu), strict=True))
        return ExpertTelemetry(
            picks=tuple(picks),
            hits=hits,
            tokens=next(rows, 0),
            cold_bytes=read,
            seconds=found.seconds,
            exchanges=exchanges,
            causes=causes,
            misses=misses,
            paces=cold.paces,
            policy=cold.policy,
        )

    def _hits_with(self, cache: CacheTotals | None) -> tuple[tuple[int, ...], dict[str, int]]:
        """Return the hits by layer, and those of all layers by cause.

        In a layer with a cache, decode steps count their hits on the GPU. Hits of prompts are
        computed from the picks and from where experts were when the picks were read.
        """
        by_layer: list[int] = []
        causes = dict.fromkeys(HIT_CAUSES, 0)
        decode = self._decode_hits.tolist()
        for layer, placed in enumerate(self._hits.tolist()):
            if cache is None or not cache.used[layer]:
                by_layer.append(placed)
                causes["pinned"] += placed
                continue
            prompts = placed - decode[layer]
            by_layer.append(prompts + cache.hits[layer])
            causes["cached"] += prompts
            for cause, count in cache.causes[layer].items():
                causes[cause] += count
        return tuple(by_layer), causes


def _less(now: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, int]:
    return {name: count - earlier.get(name, 0) for name, count in now.items()}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
