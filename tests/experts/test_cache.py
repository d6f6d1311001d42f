"""The model of a layer's cache: slots and experts always agree, and victims are the right ones."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.experts.cache import (
    LEAST_TOKENS,
    POLICIES,
    SCORE_ONE,
    SPARE_MOST,
    SPARE_STEPS,
    CacheModel,
    Fill,
    Origin,
    Policy,
    Resolution,
    distinct_picks,
    policies_for,
)

Picks = list[list[int]]  # [rows][used]


@dataclass(frozen=True, slots=True)
class Case:
    """A layer, its first residents, and the picks of its steps."""

    policy: Policy
    experts: int
    resident: frozenset[int]
    pinned: frozenset[int]
    steps: list[Picks]
    link: list[int] | None

    def start(self) -> CacheModel:
        return CacheModel.start(self.policy, self.experts, self.resident, self.pinned)


@st.composite
def cases(draw: st.DrawFn, policy: Policy | None = None) -> Case:
    experts = draw(st.integers(1, 12))
    everyone = st.integers(0, experts - 1)
    resident = draw(st.frozensets(everyone))
    pinned = draw(st.frozensets(st.sampled_from(sorted(resident)))) if resident else frozenset()
    used = draw(st.integers(1, 4))
    row = st.lists(st.integers(-1, experts - 1), min_size=used, max_size=used)
    steps = draw(st.lists(st.lists(row, min_size=1, max_size=3), max_size=25))
    most = draw(st.integers(0, 6))
    tables = st.tuples(*(st.integers(0, n) for n in range(most + 1))).map(list)
    return Case(
        policy=draw(st.sampled_from(POLICIES)) if policy is None else policy,
        experts=experts,
        resident=resident,
        pinned=pinned,
        steps=steps,
        link=draw(st.none() | tables),
    )


def slots_by_expert(cache: CacheModel) -> list[int]:
    return [state.slot for state in cache.experts]


@given(cases())
def test_no_expert_is_lost_or_held_twice_and_both_tables_agree(case: Case) -> None:
    cache = case.start()
    assert cache.slots == sorted(case.resident)
    for picks in case.steps:
        cache.resolve(picks, case.link)
        assert len(cache.slots) == len(set(cache.slots)) == len(case.resident)
        expected = [-1] * case.experts
        for slot, expert in enumerate(cache.slots):
            expected[expert] = slot
        assert slots_by_expert(cache) == expected


@given(cases())
def test_every_distinct_pick_has_exactly_one_outcome(case: Case) -> None:
    cache = case.start()
    for picks in case.steps:
        before = slots_by_expert(cache)
        done = cache.resolve(picks, case.link)
        outcomes = [
            *done.hits,
            *(fill.expert for fill in done.filled),
            *done.bypassed,
            *done.left_to_cpu,
        ]
        picked = {expert for row in picks for expert in row} - {-1}
        assert sorted(outcomes) == sorted(picked)
        assert set(done.hits) == {expert for expert in picked if before[expert] >= 0}


@given(cases())
def test_pinned_experts_and_those_of_the_step_keep_their_slots(case: Case) -> None:
    cache = case.start()
    for picks in case.steps:
        before = slots_by_expert(cache)
        done = cache.resolve(picks, case.link)
        keep = case.pinned | set(done.hits)
        assert [cache.experts[expert].slot for expert in keep] == [before[e] for e in keep]
        filled_now = {fill.expert: fill.slot for fill in done.filled}
        assert {expert: cache.experts[expert].slot for expert in filled_now} == filled_now


@given(cases())
def test_a_fill_names_the_slot_that_its_victim_had(case: Case) -> None:
    cache = case.start()
    for picks in case.steps:
        before = slots_by_expert(cache)
        for fill in cache.resolve(picks, case.link).filled:
            assert before[fill.victim] == fill.slot
            assert before[fill.expert] == cache.experts[fill.victim].slot == -1


@given(cases())
def test_the_link_takes_the_first_misses_by_its_table(case: Case) -> None:
    cache = case.start()
    for picks in case.steps:
        before = slots_by_expert(cache)
        done = cache.resolve(picks, case.link)
        misses = [expert for expert in in_order(picks) if before[expert] < 0]
        taken = len(misses)
        if case.link is not None:
            taken = case.link[-1] if len(misses) >= len(case.link) else case.link[len(misses)]
        linked = {fill.expert for fill in done.filled} | set(done.bypassed)
        assert linked == set(misses[:taken])
        assert list(done.left_to_cpu) == misses[taken:]


def in_order(picks: Picks) -> list[int]:
    """Return the distinct picks by rank, then by row: a second way to say it."""
    placed = [
        (rank, row, expert)
        for row, experts in enumerate(picks)
        for rank, expert in enumerate(experts)
        if expert >= 0
    ]
    seen: list[int] = []
    for _, _, expert in sorted(placed):
        if expert not in seen:
            seen.append(expert)
    return seen


@given(cases())
def test_distinct_picks_come_by_rank_and_then_by_row(case: Case) -> None:
    for picks in case.steps:
        assert distinct_picks(picks) == in_order(picks)


@given(cases("static"))
def test_static_never_changes(case: Case) -> None:
    cache = case.start()
    for picks in case.steps:
        assert cache.resolve(picks, case.link).filled == []
        assert cache.slots == sorted(case.resident)


class RecencyList:
    """LRU as an ordered dictionary of residents, least recently used first."""

    def __init__(self, resident: Sequence[int]) -> None:
        self.by_use = OrderedDict((expert, slot) for slot, expert in enumerate(sorted(resident)))

    def step(self, picks: Picks) -> Resolution:
        order = in_order(picks)
        hits = [expert for expert in order if expert in self.by_use]
        misses = [expert for expert in order if expert not in self.by_use]
        # Experts used by one step are equally recent; the one with the smaller number leaves first.
        for expert in sorted(hits):
            self.by_use.move_to_end(expert)
        filled, bypassed = [], []
        free = [expert for expert in self.by_use if expert not in hits]
        for expert in misses:
            if not free:
                bypassed.append(expert)
                continue
            victim = free.pop(0)
            filled.append(Fill(expert, self.by_use.pop(victim), victim))
        now = sorted(
            [(expert, self.by_use[expert]) for expert in hits]
            + [(fill.expert, fill.slot) for fill in filled]
        )
        for expert, slot in now:
            self.by_use.pop(expert, None)
            self.by_use[expert] = slot
        return Resolution(hits, filled, bypassed, [])


@given(cases("lru"))
def test_lru_is_an_ordered_dictionary(case: Case) -> None:
    cache = CacheModel.start("lru", case.experts, case.resident)
    expected = RecencyList(sorted(case.resident))
    for picks in case.steps:
        assert cache.resolve(picks) == expected.step(picks)


def test_lru_evicts_the_least_recent_expert_and_of_equals_the_first() -> None:
    cache = CacheModel.start("lru", 6, [1, 2, 4])
    assert cache.resolve([[5]]) == Resolution([], [Fill(5, 0, 1)], [], [])
    assert cache.resolve([[2]]) == Resolution([2], [], [], [])
    assert cache.resolve([[0]]) == Resolution([], [Fill(0, 2, 4)], [], [])
    assert cache.resolve([[3]]) == Resolution([], [Fill(3, 0, 5)], [], [])
    assert cache.slots == [3, 2, 0]


def test_misses_are_filled_in_the_order_of_ranks() -> None:
    cache = CacheModel.start("lru", 8, [0, 1])
    done = cache.resolve([[7, 4], [6, 7]])
    assert done == Resolution([], [Fill(7, 0, 0), Fill(6, 1, 1)], [4], [])


@pytest.mark.parametrize(("policy", "given_up"), [("lru", 0), ("spare", 2)])
def test_spare_keeps_an_expert_with_hits_where_lru_does_not(policy: Policy, given_up: int) -> None:
    cache = CacheModel.start(policy, 4, [0, 1])
    cache.resolve([[0]])
    cache.resolve([[0]])  # last used in step 2, with two hits
    assert [fill.victim for fill in cache.resolve([[2]]).filled] == [1]
    assert [fill.victim for fill in cache.resolve([[3]]).filled] == [given_up]


@pytest.mark.parametrize("hits", [1, SPARE_MOST, SPARE_MOST + 5])
def test_a_hit_spares_an_expert_for_one_step_and_at_most_sixteen_hits_count(hits: int) -> None:
    assert (SPARE_STEPS, SPARE_MOST) == (1, 16)
    cache = CacheModel.start("spare", 100, [0, 1])
    for _ in range(hits):
        cache.resolve([[0]])
    misses = 0
    while 0 in cache.slots:
        cache.resolve([[2 + misses]])
        misses += 1
    # The first miss evicts expert 1, the later ones evict each other, until the last use of the
    # evicted one is as recent as expert 0 counts.
    assert misses == 1 + SPARE_STEPS * min(hits, SPARE_MOST)


def test_counts_admits_only_an_expert_with_a_larger_score() -> None:
    cache = CacheModel.start("counts", 4, [0, 1])
    for _ in range(3):
        cache.resolve([[0, 1]])
    assert cache.resolve([[2]]) == Resolution([], [], [2], [])
    outcomes = [cache.resolve([[2]]) for _ in range(3)]
    assert [bool(done.bypassed) for done in outcomes] == [True, False, False]
    assert outcomes[1].filled == [Fill(2, 0, 0)]
    assert outcomes[2].hits == [2]


def test_scores_lose_a_64th_in_every_step() -> None:
    cache = CacheModel.start("counts", 2, [0])
    cache.resolve([[0]])
    assert cache.experts[0].score == SCORE_ONE
    cache.resolve([[0]])
    assert cache.experts[0].score == 4096 - 64 + 4096
    cache.resolve([[1]])
    assert cache.experts[0].score == 8128 - 127
    for _ in range(10_000):
        cache.resolve([[0]])
    assert cache.experts[0].score <= 2**18  # 32 bits always suffice


@given(cases())
def test_counters_add_up_what_steps_did(case: Case) -> None:
    cache = case.start()
    picks = hits = filled = bypassed = left = 0
    for step in case.steps:
        before = slots_by_expert(cache)
        done = cache.resolve(step, case.link)
        flat = [expert for row in step for expert in row if expert >= 0]
        picks += len(flat)
        hits += len([expert for expert in flat if before[expert] >= 0])
        filled, bypassed = filled + len(done.filled), bypassed + len(done.bypassed)
        left += len(done.left_to_cpu)
    counts = cache.counts
    assert (counts.steps, counts.picks, counts.hits) == (len(case.steps), picks, hits)
    assert (counts.filled, counts.bypassed, counts.left_to_cpu) == (filled, bypassed, left)
    assert counts.linked == filled + bypassed


@given(cases())
def test_hits_are_counted_by_what_put_the_expert_into_its_slot(case: Case) -> None:
    cache = case.start()
    why = dict.fromkeys(case.resident, "placed")  # of the experts in slots
    counted: Counter[str] = Counter()
    for number, step in enumerate(case.steps):
        counted.update(why[expert] for row in step for expert in row if expert in why)
        origin: Origin = "ahead" if number % 3 == 1 else "step"
        for fill in cache.resolve(step, case.link, origin).filled:
            del why[fill.victim]
            why[fill.expert] = origin
        assert {e: cache.experts[e].origin for e in cache.slots} == why
    counts = cache.counts
    assert (counts.pinned_hits, counts.prefetched_hits) == (counted["placed"], counted["ahead"])
    assert counts.hits == counted.total()


def test_too_few_slots_for_the_experts_of_a_few_tokens_leave_only_static() -> None:
    assert LEAST_TOKENS == 4
    assert policies_for(31, 8) == ("static",)
    assert policies_for(32, 8) == POLICIES == ("static", "lru", "spare", "counts")


@pytest.mark.parametrize(
    ("resident", "pinned"), [([0, 0], []), ([4], []), ([-1], []), ([0, 1], [2])]
)
def test_a_start_that_is_none_is_refused(resident: list[int], pinned: list[int]) -> None:
    with pytest.raises(ValueError, match=r"experts of 4|only"):
        CacheModel.start("lru", 4, resident, pinned)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'mru' is no policy"):
        CacheModel.start("mru", 4, [0])  # type: ignore[arg-type]
