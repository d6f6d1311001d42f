"""Replay a routing trace through the cache of a model's experts, and count hits and misses.

`CacheModel` states the rule for one layer, expert by expert. Here the same rule runs for all layers
of a trace at once, on arrays, so that thousands of tokens take seconds; tests compare the two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headroom.experts.cache import (
    POLICIES,
    SCORE_ONE,
    SCORE_SHIFT,
    SPARE_MOST,
    SPARE_STEPS,
    CacheCounts,
    Policy,
)
from headroom.experts.traces.trace import Ids, RoutingTrace, TracedLayer

Residents = Sequence[Sequence[int]]  # the experts in slots, for each traced layer
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_BLOCK_PICKS = 1 << 20  # steps are prepared together up to so many picks
# What is counted of each layer, by the names of CacheCounts; the others follow from these.
_TOTALS = (
    *("picks", "hits", "linked", "filled", "left_to_cpu"),
    *("pinned_hits", "prefetched_hits"),
)
_NEVER = np.int64(1) << 62  # the key of an expert that is no victim


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How a trace is replayed."""

    policy: Policy
    sequences: int = 1  # that run together, one token of each in a step
    # Entry n: of n distinct misses of a layer in a step, those that cross the link; the CPU
    # computes the others. None: all cross it.
    link: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """What the caches of all layers did in a replay."""

    settings: ReplaySettings
    slots: tuple[int, ...]  # of each traced layer
    tokens: int
    counts: tuple[CacheCounts, ...]  # of each traced layer

    @property
    def hit_rate(self) -> float:
        """The share of picks whose expert was in a slot before the step."""
        return _share(self._sum("hits"), self._sum("picks"))

    @property
    def misses(self) -> float:
        """Distinct missing experts of a layer in a step, on average."""
        missing = self._sum("linked") + self._sum("left_to_cpu")
        return _share(missing, self._sum("steps"))

    @property
    def linked(self) -> float:
        """Missing experts of a layer that cross the link in a step, on average."""
        return _share(self._sum("linked"), self._sum("steps"))

    @property
    def filled(self) -> float:
        """Missing experts of a layer that take over a slot in a step, on average."""
        return _share(self._sum("filled"), self._sum("steps"))

    @property
    def layer_hit_rates(self) -> tuple[float, ...]:
        """The hit rate of each traced layer."""
        return tuple(_share(one.hits, one.picks) for one in self.counts)

    def bytes_per_token(self, expert_bytes: Sequence[int]) -> dict[str, float]:
        """Return the bytes of missing experts that link and CPU read for a token.

        `expert_bytes` has the bytes of one expert of each traced layer.
        """
        pairs = list(zip(self.counts, expert_bytes, strict=True))
        return {
            "link": _share(sum(one.linked * size for one, size in pairs), self.tokens),
            "cpu": _share(sum(one.left_to_cpu * size for one, size in pairs), self.tokens),
        }

    def _sum(self, name: str) -> int:
        return sum(getattr(one, name) for one in self.counts)


def replay_halves(trace: RoutingTrace, slots: Sequence[int], settings: ReplaySettings) -> Replay:
    """Replay each half of a trace from the experts that the other half chose most often.

    So no policy, and least of all "static", knows the text that it is measured on. `slots` has the
    slots of each traced layer.
    """
    halves = split_halves(trace)
    parts = [
        replay(own, most_chosen(other, slots), settings)
        for own, other in (halves, (halves[1], halves[0]))
    ]
    return Replay(
        settings,
        tuple(slots),
        sum(part.tokens for part in parts),
        tuple(map(_added, *(part.counts for part in parts))),
    )


def replay(trace: RoutingTrace, residents: Residents, settings: ReplaySettings) -> Replay:
    """Replay a trace from the given experts in slots, pinning none.

    Sequence n of those that run together begins at token n * (tokens // sequences), as `bench`
    imposes a trace; the remainder of the division is not replayed.
    """
    caches = LayerCaches(settings.policy, trace.layers, residents)
    for picks in step_picks(trace, settings.sequences):
        for step in picks:
            caches.resolve(step, settings.link)
    tokens = trace.tokens // settings.sequences * settings.sequences
    return Replay(settings, tuple(map(len, residents)), tokens, caches.counts())


def split_halves(trace: RoutingTrace) -> tuple[RoutingTrace, RoutingTrace]:
    """Return a trace cut in two, between sequences where one begins near the middle."""
    middle = trace.tokens // 2
    nearest = min(trace.starts, key=lambda first: abs(first - middle))
    cut = nearest if abs(nearest - middle) <= trace.tokens // 4 else middle
    ends = [range(cut), range(cut, trace.tokens)]
    return tuple(_part(trace, tokens) for tokens in ends)  # type: ignore[return-value]


def most_chosen(trace: RoutingTrace, slots: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the experts that a trace chose most often, as many of each layer as it has slots.

    Of experts with equal counts, the first come first.
    """
    chosen = []
    for index, (layer, number) in enumerate(zip(trace.layers, slots, strict=True)):
        counts = np.bincount(trace.of_layer(index).ravel(), minlength=layer.experts)
        order = np.argsort(-counts, kind="stable")[:number]
        chosen.append(tuple(int(expert) for expert in np.sort(order)))
    return tuple(chosen)


class StepPicks(NamedTuple):
    """The picks of one step for all layers, `[layers, picks]`, in the order of `distinct_picks`."""

    ids: Numbers  # -1: none
    first: Flags  # whether no earlier pick of the layer and step has the same expert


def step_picks(trace: RoutingTrace, sequences: int) -> Iterator[list[StepPicks]]:
    """Yield the steps of a trace in blocks, with one token of each sequence in a step."""
    assert 1 <= sequences <= trace.tokens
    steps = trace.tokens // sequences
    used = max(layer.used for layer in trace.layers)
    picks = len(trace.layers) * used * sequences
    block = max(1, _BLOCK_PICKS // picks)
    for begin in range(0, steps, block):
        size = min(block, steps - begin)
        starts = steps * np.arange(sequences) + begin
        tokens = starts[None, :] + np.arange(size)[:, None]  # [steps, rows]
        ids = np.full((size, len(trace.layers), used, sequences), -1, np.int64)
        for index, layer in enumerate(trace.layers):
            rows: Ids = trace.of_layer(index)[tokens]  # [steps, rows, used]
            ids[:, index, : layer.used] = rows.transpose(0, 2, 1)
        flat = ids.reshape(size, len(trace.layers), -1)
        yield list(map(StepPicks, flat, _first(flat)))


def _first(ids: Numbers) -> Flags:
    """Return where along the last axis an expert stands for the first time; -1 is none."""
    order = np.argsort(ids, axis=-1, kind="stable")
    ordered = np.take_along_axis(ids, order, -1)
    fresh = np.ones(ids.shape, np.bool_)
    fresh[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    first = np.empty_like(fresh)
    np.put_along_axis(first, order, fresh, -1)
    return first & (ids >= 0)


class LayerCaches:
    """The caches of all layers of a trace, which do what a `CacheModel` for each would do."""

    def __init__(
        self,
        policy: Policy,
        layers: Sequence[TracedLayer],
        residents: Residents,
        pinned: Residents = (),
    ) -> None:
        assert policy in POLICIES
        self._policy = policy
        count, experts = len(layers), max(layer.experts for layer in layers)
        self._resident = _members(residents, count, experts)
        self._may_leave = ~_members(pinned or [()] * count, count, experts)
        self._last = np.zeros((count, experts), np.int64)
        self._uses = np.zeros((count, experts), np.int64)
        self._filled = np.zeros((count, experts), np.bool_)  # whether a step gave it its slot
        self._score = np.zeros((count, experts), np.int64)
        self._own = np.arange(count)[:, None]
        self._ids = np.arange(experts)
        self._steps = 0
        self._totals = np.zeros((len(_TOTALS), count), np.int64)

    def counts(self) -> tuple[CacheCounts, ...]:
        """Return what each layer's cache did since the start."""
        totals = [dict(zip(_TOTALS, row, strict=True)) for row in self._totals.T.tolist()]
        return tuple(
            CacheCounts(steps=self._steps, bypassed=row["linked"] - row["filled"], **row)
            for row in totals
        )

    def residents(self) -> list[list[int]]:
        """Return the experts in slots, for each layer in ascending order."""
        return [np.flatnonzero(row).tolist() for row in self._resident]

    def resolve(self, picks: StepPicks, link: Sequence[int] | None = None) -> None:
        """Resolve the picks of a step in all layers, and count them."""
        self._steps += 1
        ids, first = picks
        hit = self._resident[self._own, ids] & (ids >= 0)
        miss = first & ~hit
        missing = miss.sum(1)
        linked = missing
        if link is not None:
            linked = np.minimum(missing, np.asarray(link)[np.minimum(missing, len(link) - 1)])
        rows, columns = np.nonzero(first)
        chosen = ids[rows, columns]
        self._score -= self._score >> SCORE_SHIFT
        self._score[rows, chosen] += SCORE_ONE
        self._last[rows, chosen] = self._steps
        self._uses[rows, chosen] += 1  # of a filled expert it is set to 0 below
        pinned = (hit & ~self._filled[self._own, ids]).sum(1)
        none_ahead = filled = np.zeros_like(missing)  # a trace has no prompts, which fill ahead
        if self._policy != "static" and linked.any():
            filled = self._fill(ids, miss, linked)
        valid = (ids >= 0).sum(1)
        self._totals += np.stack(
            [valid, hit.sum(1), linked, filled, missing - linked, pinned, none_ahead]
        )

    def _fill(self, ids: Numbers, miss: Flags, linked: Numbers) -> Numbers:
        """Give the first `linked` missing experts of each layer the slots of victims.

        Returns how many of each layer got one. The keys of victims do not change within a step,
        so they are put in order once.
        """
        most = int(linked.max())
        # [layers, most]: the missing experts of each layer, in the order of picks
        order = np.argsort(~miss, axis=1, kind="stable")[:, :most]
        wanted = np.take_along_axis(ids, order, 1)
        asks = np.arange(most) < linked[:, None]
        victims, may_leave = self._victims(most)
        if self._policy == "counts":
            # The next victim stays the same until an expert with a larger count takes its slot.
            taken = np.zeros(len(ids), np.int64)
            fills = np.zeros_like(asks)
            given_up = np.zeros_like(wanted)
            own = np.arange(len(ids))
            for column in range(most):
                place = np.minimum(taken, victims.shape[1] - 1)
                victim, expert = victims[own, place], wanted[:, column]
                larger = self._score[own, expert] > self._score[own, victim]
                fits = (taken < victims.shape[1]) & may_leave[own, place]
                fills[:, column] = asks[:, column] & fits & larger
                given_up[:, column] = victim
                taken += fills[:, column]
        else:
            width = victims.shape[1]
            fills = np.zeros_like(asks)
            fills[:, :width] = asks[:, :width] & may_leave
            given_up = np.zeros_like(wanted)
            given_up[:, :width] = victims
        rows, columns = np.nonzero(fills)
        self._resident[rows, given_up[rows, columns]] = False
        entered = wanted[rows, columns]
        self._resident[rows, entered] = True
        self._uses[rows, entered] = 0
        self._filled[rows, given_up[rows, columns]] = False
        self._filled[rows, entered] = True
        filled: Numbers = fills.sum(1)
        return filled

    def _victims(self, most: int) -> tuple[Numbers, Flags]:
        """Return the first `most` victims of each layer in order, and which of them exist."""
        experts = len(self._ids)
        most = min(most, experts)
        if self._policy == "counts":
            key = self._score
        elif self._policy == "spare":
            key = self._last + SPARE_STEPS * np.minimum(self._uses, SPARE_MOST)
        else:
            key = self._last
        leaves = self._resident & self._may_leave & (self._last < self._steps)
        # Keys with the number of the expert in the last digits: no two are equal.
        keys = np.where(leaves, key * experts + self._ids, _NEVER)
        if most < experts:
            keys = np.partition(keys, most - 1, axis=1)[:, :most]
        smallest: Numbers = np.sort(keys, axis=1)
        return smallest % experts, smallest < _NEVER


def _members(lists: Residents, count: int, experts: int) -> Flags:
    """Return a table `[layers, experts]` of which experts are in the list of their layer."""
    table = np.zeros((count, experts), np.bool_)
    for row, ids in zip(table, lists, strict=True):
        row[list(ids)] = True
    return table


def _part(trace: RoutingTrace, tokens: range) -> RoutingTrace:
    """Return some tokens of a trace as one of its own."""
    first, end = tokens.start, tokens.stop
    starts = [0, *(start - first for start in trace.starts if first < start < end)]
    return RoutingTrace(
        trace.model, trace.source, trace.layers, trace.ids[first:end], tuple(starts)
    )


def _added(one: CacheCounts, other: CacheCounts) -> CacheCounts:
    names = [field.name for field in fields(CacheCounts)]
    return CacheCounts(**{name: getattr(one, name) + getattr(other, name) for name in names})


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
