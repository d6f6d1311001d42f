"""CacheModel: how the slots of one layer change hands while tokens are computed.

A layer has fewer slots in GPU memory than experts. Every expert also has its own row in host
memory, so giving up a slot writes nothing back. A step resolves its picks: experts in slots are
hits; a missing expert crosses the link, and a policy says whether it takes over a slot and whose.

This is the plain statement of that rule, in integers, without torch and numpy. The engine's kernel
and the simulator of traces must agree with it exactly, and tests compare them with it.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from headroom.kernels.cuda.expert_rules import LEAST_TOKENS, CacheRules

Policy = Literal["static", "lru", "spare", "counts"]
# "static": the experts of the placement stay.
# "lru":    the expert whose last use is longest ago gives up its slot.
# "spare":  as "lru", but each hit since an expert was filled counts as SPARE_STEPS later steps.
# "counts": the expert with the smallest decayed count gives up its slot to one with a larger count.
POLICIES: tuple[Policy, ...] = ("static", "lru", "spare", "counts")

# What a use in a step adds to the decayed count; counts stay below SCORE_ONE << SCORE_SHIFT.
SCORE_ONE = 4096
# Every step takes 1/64 of the decayed count away: it halves in about 44 steps. Halving in 11 steps
# hit as often on routing with a short memory, and 5 % less on skewed routing (2026-11, replayed).
SCORE_SHIFT = 6
SPARE_STEPS = 1  # steps of "spare" that a hit is worth
SPARE_MOST = 16  # hits of "spare" that count, so that no expert stays for ever
RULES = CacheRules(
    score_one=SCORE_ONE,
    score_shift=SCORE_SHIFT,
    spare_steps=SPARE_STEPS,
    spare_most=SPARE_MOST,
)  # as the kernel takes them


def policies_for(slots: int, used: int) -> tuple[Policy, ...]:
    """Return the policies that a layer may have: only "static" if it has too few slots."""
    return POLICIES if slots >= LEAST_TOKENS * used else ("static",)


# Why an expert is in its slot: the host put it there ("placed"), a step that missed it filled the
# slot ("step"), or the end of a prompt did, ahead of the steps that use it ("ahead").
Origin = Literal["placed", "step", "ahead"]


class Fill(NamedTuple):
    """A missing expert that took over a slot in a step."""

    expert: int
    slot: int
    victim: int  # the expert that had the slot before


@dataclass(frozen=True, slots=True)
class Resolution:
    """Where the distinct experts of one step are computed; every list is in the order of picks."""

    hits: list[int]  # in a slot since before the step
    filled: list[Fill]  # crossed the link into a slot
    bypassed: list[int]  # read over the link, without a slot
    left_to_cpu: list[int]  # not for the link, by its table


@dataclass(slots=True)
class CacheCounts:
    """What a layer's cache did since the start."""

    steps: int = 0
    picks: int = 0  # of all rows: an expert that two rows picked counts twice
    hits: int = 0  # picks whose expert was a hit
    # Distinct missing experts that crossed the link, filled or bypassed. It carries each once a
    # step, however many rows picked it.
    linked: int = 0
    filled: int = 0
    bypassed: int = 0
    left_to_cpu: int = 0  # distinct missing experts
    pinned_hits: int = 0  # hits of experts that no fill brought
    prefetched_hits: int = 0  # hits of experts that were filled ahead of the steps that used them


@dataclass(slots=True)
class _Expert:
    slot: int = -1  # -1: not resident
    last: int = 0  # step of its last use
    uses: int = 0  # hits since it was filled
    score: int = 0  # decayed count
    pinned: bool = False  # never gives up its slot
    origin: Origin = "placed"


@dataclass(slots=True)
class CacheModel:
    """The cache of one layer: which expert has which slot, step after step."""

    policy: Policy
    experts: list[_Expert] = field(repr=False)
    slots: list[int]  # the expert in each slot
    counts: CacheCounts = field(default_factory=CacheCounts)

    @classmethod
    def start(
        cls,
        policy: Policy,
        experts: int,
        resident: Collection[int],
        pinned: Collection[int] = (),
    ) -> "CacheModel":
        """Return the cache of a layer whose placement keeps the experts `resident` in slots.

        They lie in ascending order. Those of them that are `pinned` never leave.
        """
        if policy not in POLICIES:
            raise ValueError(f"{policy!r} is no policy; there are {', '.join(POLICIES)}")
        slots = sorted(set(resident))
        if len(slots) != len(resident) or not set(slots) <= set(range(experts)):
            raise ValueError(f"{list(resident)} are not distinct experts of {experts}")
        if not set(pinned) <= set(slots):
            raise ValueError(f"{list(pinned)} are pinned, but only {slots} are resident")
        states = [_Expert(pinned=expert in pinned) for expert in range(experts)]
        for slot, expert in enumerate(slots):
            states[expert].slot = slot
        return cls(policy, states, slots)

    def resolve(
        self,
        picks: Sequence[Sequence[int]],
        link: Sequence[int] | None = None,
        origin: Origin = "step",  # of the experts that are filled
    ) -> Resolution:
        """Resolve the picks of a step, `[rows][used]` with -1 for none, and count them.

        `link[n]` of n missing experts cross the link; beyond the table its last entry holds. The
        CPU computes the rest. Without `link`, all cross.
        """
        self.counts.steps += 1
        step = self.counts.steps
        distinct = distinct_picks(picks)
        for state in self.experts:
            state.score -= state.score >> SCORE_SHIFT
        hits: list[int] = []
        misses: list[int] = []
        for expert in distinct:
            state = self.experts[expert]
            state.score += SCORE_ONE
            state.last = step
            if state.slot >= 0:
                state.uses += 1
                hits.append(expert)
            else:
                misses.append(expert)
        origins = {expert: self.experts[expert].origin for expert in hits}
        linked = len(misses) if link is None else link[min(len(misses), len(link) - 1)]
        filled: list[Fill] = []
        bypassed: list[int] = []
        in_step = set(distinct)
        for expert in misses[:linked]:
            fill = self._fill(expert, in_step, origin)
            if fill is None:
                bypassed.append(expert)
            else:
                filled.append(fill)
        resolution = Resolution(hits, filled, bypassed, misses[linked:])
        self._count(picks, resolution, origins)
        return resolution

    def _fill(self, expert: int, in_step: set[int], origin: Origin) -> Fill | None:
        """Move a missing expert into the slot of the policy's victim.

        Return the fill, or None if no slot may be given up for it.
        """
        victim = self._victim(in_step)
        if victim is None or not self._admits(expert, victim):
            return None
        state, given_up = self.experts[expert], self.experts[victim]
        state.slot, given_up.slot = given_up.slot, -1
        state.uses = 0
        state.origin, given_up.origin = origin, "placed"
        self.slots[state.slot] = expert
        return Fill(expert, state.slot, victim)

    def _victim(self, in_step: set[int]) -> int | None:
        """Return the resident expert with the smallest key, and of equal keys the first.

        Pinned experts and those that the step uses are never victims.
        """
        may_leave = [
            (self._key(self.experts[expert]), expert)
            for expert in self.slots
            if not self.experts[expert].pinned and expert not in in_step
        ]
        return min(may_leave)[1] if may_leave else None

    def _key(self, state: _Expert) -> int:
        if self.policy == "spare":
            return state.last + SPARE_STEPS * min(state.uses, SPARE_MOST)
        return state.score if self.policy == "counts" else state.last

    def _admits(self, expert: int, victim: int) -> bool:
        if self.policy == "counts":
            return self.experts[expert].score > self.experts[victim].score
        return self.policy != "static"

    def _count(
        self,
        picks: Sequence[Sequence[int]],
        resolution: Resolution,
        origins: Mapping[int, Origin],  # of the hits
    ) -> None:
        flat = [expert for row in picks for expert in row if expert >= 0]
        by_cause = Counter(origins[expert] for expert in flat if expert in origins)
        self.counts.picks += len(flat)
        self.counts.hits += by_cause.total()
        self.counts.pinned_hits += by_cause["placed"]
        self.counts.prefetched_hits += by_cause["ahead"]
        self.counts.linked += len(resolution.filled) + len(resolution.bypassed)
        self.counts.filled += len(resolution.filled)
        self.counts.bypassed += len(resolution.bypassed)
        self.counts.left_to_cpu += len(resolution.left_to_cpu)


def distinct_picks(picks: Sequence[Sequence[int]]) -> list[int]:
    """Return the experts that the rows of a step picked, each once.

    The best picks of all rows come first, then the second picks of all rows, and so on; -1 is none.
    """
    by_rank = (expert for rank in zip(*picks, strict=True) for expert in rank)
    return list(dict.fromkeys(expert for expert in by_rank if expert >= 0))
