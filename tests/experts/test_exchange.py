"""Exchanges move only what pays, lose no expert and hold none twice; a failure ends a round."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.experts.copies import HostCopies, Mark
from headroom.experts.exchange import (
    Exchange,
    ExchangePolicy,
    ExchangeRound,
    StoreExchanges,
    plan_exchanges,
    recent,
)
from headroom.experts.placement import ExpertPlacement, LayerExperts, place_experts
from tests.experts.pretended import PretendedExperts, swapped

Problem = tuple[list[LayerExperts], list[list[int]], ExpertPlacement, ExchangePolicy]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Layers, a placement of part of their experts, counts and a policy."""
    layers, counts, hot = [], [], []
    for _ in range(draw(st.integers(1, 5))):
        experts = draw(st.integers(0, 8))
        layers.append(LayerExperts(experts, draw(st.integers(1, 40))))
        counts.append(draw(st.lists(st.integers(0, 30), min_size=experts, max_size=experts)))
        resident = draw(st.sets(st.sampled_from(range(experts)))) if experts else set()
        hot.append(tuple(sorted(resident)))
    policy = ExchangePolicy(
        min_gain=draw(st.integers(1, 5)),
        hysteresis=draw(st.sampled_from([0.0, 0.25, 1.0])),
        per_layer=draw(st.integers(0, 3)),
        most_bytes=draw(st.none() | st.integers(0, 200)),
    )
    return layers, counts, ExpertPlacement(tuple(hot), "even"), policy


@given(problems())
def test_swaps_lose_no_expert_and_keep_every_limit(problem: Problem) -> None:
    layers, counts, placement, policy = problem
    swaps = plan_exchanges(placement, counts, layers, policy)
    after = swapped(placement, swaps)
    assert [len(ids) for ids in after.hot] == [len(ids) for ids in placement.hot]
    assert after.hot_bytes(layers) == placement.hot_bytes(layers)
    for swap in swaps:
        assert swap.demoted in placement.hot[swap.layer]
        assert swap.promoted not in placement.hot[swap.layer]
        gain = counts[swap.layer][swap.promoted] - counts[swap.layer][swap.demoted]
        assert gain == swap.gain >= policy.min_gain
        assert gain > policy.hysteresis * counts[swap.layer][swap.demoted]
    moved = [(swap.layer, x) for swap in swaps for x in (swap.promoted, swap.demoted)]
    assert len(set(moved)) == len(moved)
    for index in range(len(layers)):
        assert sum(swap.layer == index for swap in swaps) <= policy.per_layer
    assert policy.most_bytes is None or sum(x.copied_bytes for x in swaps) <= policy.most_bytes


@pytest.mark.parametrize(("promoted", "gains"), [(4.9, False), (5.0, False), (5.1, True)])
def test_a_gain_must_exceed_the_hysteresis(promoted: float, gains: bool) -> None:
    found = plan_exchanges(
        ExpertPlacement(((0,),), "even"),
        [[4.0, promoted]],
        [LayerExperts(2, 1)],
        ExchangePolicy(min_gain=0.5, hysteresis=0.25),
    )
    assert bool(found) == gains


@pytest.mark.parametrize(("promoted", "gains"), [(1.9, False), (2.0, True)])
def test_a_gain_may_be_just_the_least_one(promoted: float, gains: bool) -> None:
    found = plan_exchanges(
        ExpertPlacement(((0,),), "even"),
        [[0.0, promoted]],
        [LayerExperts(2, 1)],
        ExchangePolicy(min_gain=2.0),
    )
    assert bool(found) == gains


@given(problems())
def test_rounds_come_to_rest_with_the_best_experts_hot(problem: Problem) -> None:
    layers, counts, placement, _ = problem
    policy = ExchangePolicy(min_gain=1, hysteresis=0)
    for _ in range(64):
        swaps = plan_exchanges(placement, counts, layers, policy)
        placement = swapped(placement, swaps)
    assert plan_exchanges(placement, counts, layers, policy) == []
    for ids, row in zip(placement.hot, counts, strict=True):
        best = sorted(row, reverse=True)[: len(ids)]
        assert sorted((row[expert] for expert in ids), reverse=True) == best


def test_the_largest_gains_come_first() -> None:
    layers = [LayerExperts(3, 10)] * 3
    placement = ExpertPlacement(((0,), (0,), (0,)), "even")
    counts = [[1, 5, 0], [1, 9, 0], [1, 5, 0]]
    policy = ExchangePolicy(most_bytes=60)
    swaps = plan_exchanges(placement, counts, layers, policy)
    assert [(swap.layer, swap.promoted, swap.gain) for swap in swaps] == [(1, 1, 8), (0, 1, 4)]


def test_what_is_too_large_leaves_room_to_a_smaller_swap() -> None:
    layers = [LayerExperts(2, 20), LayerExperts(2, 10)]
    placement = ExpertPlacement(((0,), (0,)), "even")
    swaps = plan_exchanges(placement, [[1, 9], [1, 5]], layers, ExchangePolicy(most_bytes=59))
    assert [(swap.layer, swap.copied_bytes) for swap in swaps] == [(1, 30)]


def test_equals_do_not_change_places() -> None:
    layers = [LayerExperts(2, 10)]
    placement = place_experts(layers, [[101, 100]], 10, 1)
    assert plan_exchanges(placement, [[100, 102]], layers, ExchangePolicy()) == []
    assert len(plan_exchanges(placement, [[100, 126]], layers, ExchangePolicy())) == 1


def test_recent_counts_are_worth_so_many_tokens_at_most() -> None:
    scaled = recent([[30.0, 10.0], [1.0, 2.0], []], used=(2, 2, 0), tokens=10)
    assert scaled == ((15.0, 5.0), (1.0, 2.0), ())  # 20 choices are 10 tokens; few stay as they are


COUNTS = [[0, 0, 9, 8], [7, 9, 0, 0]]


def half_hot(**more: object) -> PretendedExperts:
    return PretendedExperts([LayerExperts(4, 10)] * 2, [(0, 1), (2, 3)], **more)  # type: ignore[arg-type]


def plan(experts: PretendedExperts) -> list[Exchange]:
    return plan_exchanges(
        experts.placement(), COUNTS, experts.layers(), ExchangePolicy(per_layer=2)
    )


def run(swaps: ExchangeRound) -> None:
    """To the end, as an engine that rests does."""
    while not swaps.over:
        if swaps.turned:
            swaps.end()
        else:
            swaps.turn()


def test_all_swaps_are_done_in_the_order_that_was_planned() -> None:
    experts = half_hot()
    planned = plan(experts)
    expected = swapped(experts.placement(), planned)
    swaps = ExchangeRound(experts, planned)
    run(swaps)
    assert (swaps.done, swaps.error) == (planned, None)
    assert experts.exchanged == [(x.layer, x.promoted, x.demoted) for x in planned]
    assert experts.placement().hot == expected.hot == ((2, 3), (0, 1))


def test_experts_change_sides_when_they_are_told_to_and_not_before() -> None:
    experts = half_hot(slow=1)
    swaps = ExchangeRound(experts, plan(experts)[:1])
    assert [swaps.ready(), swaps.ready()] == [False, True]
    assert experts.placement().hot == ((0, 1), (2, 3))
    assert swaps.turn() is not None
    assert experts.placement().hot != ((0, 1), (2, 3))
    assert (swaps.done, swaps.over) == ([], False)
    assert [swaps.ready(), swaps.ready()] == [False, True]
    swaps.end()
    assert (len(swaps.done), swaps.over) == (1, True)
    assert experts.waits == 0


def test_a_round_without_swaps_is_over() -> None:
    assert ExchangeRound(half_hot(), []).over


@pytest.mark.parametrize("where", ["begin", "ready", "turn", "move", "end"])
def test_a_failure_ends_the_round_and_keeps_the_swaps_before_it(where: str) -> None:
    experts = half_hot(fails_after=1, fails_in=where)
    swaps = ExchangeRound(experts, plan(experts))
    while not swaps.over:
        assert swaps.ready()
        if swaps.turned:
            swaps.end()
        else:
            swaps.turn()
    assert str(swaps.error) == "the copy failed"
    assert len(swaps.done) == len(experts.exchanged) == 1
    assert len(experts.begun) == (1 if where == "begin" else 2)


def test_who_gives_way_forgets_a_swap_that_has_not_turned() -> None:
    experts = half_hot()
    before = experts.placement()
    swaps = ExchangeRound(experts, plan(experts))
    swaps.give_way()
    assert swaps.over
    assert experts.placement() == before
    again = ExchangeRound(experts, plan(experts))
    run(again)
    assert len(again.done) == 4


def test_who_gives_way_still_ends_a_swap_that_has_turned() -> None:
    experts = half_hot()
    swaps = ExchangeRound(experts, plan(experts))
    swaps.turn()
    swaps.give_way()
    assert not swaps.over
    swaps.end()
    assert swaps.over
    assert len(experts.begun) == len(experts.exchanged) == 1


@pytest.mark.parametrize("turned", [False, True])
def test_a_round_that_stops_waits_for_its_copies(turned: bool) -> None:
    experts = half_hot(slow=3)
    swaps = ExchangeRound(experts, plan(experts))
    if turned:
        swaps.turn()
    experts.waits = 0
    swaps.stop()
    assert swaps.over
    assert experts.waits == 1
    assert len(experts.exchanged) == turned
    swaps.stop()  # there is nothing left to wait for
    assert experts.waits == 1


LAYERS = (LayerExperts(0, 0), LayerExperts(2, 7), LayerExperts(3, 7))  # dense, all hot, some cold


@dataclass
class OneLayer:
    hot: set[int]
    expert_bytes: int = 11
    link_copies: int = 1
    told: tuple[object, ...] = ()

    @property
    def exchange_mark(self) -> Mark:
        return HostCopies().mark()

    def begin_exchange(self, promoted: int, demoted: int) -> None:
        self.told += ("begin",)
        self.pair = promoted, demoted

    def turn_exchange(self) -> None:
        self.told += ("turn",)
        promoted, demoted = self.pair
        self.hot = self.hot - {demoted} | {promoted}

    def end_exchange(self) -> None:
        self.told += ("end",)


class Store:
    def __init__(self, layer: OneLayer) -> None:
        self.layers = (None, None, layer)

    def current_placement(self) -> ExpertPlacement:
        layer = self.layers[2]
        assert layer is not None
        return ExpertPlacement(((), (0, 1), tuple(sorted(layer.hot))), "even")


def test_only_layers_with_cold_experts_change() -> None:
    layer = OneLayer({0})
    swaps = StoreExchanges(Store(layer), LAYERS, same_bits=True)
    assert swaps.layers()[2] == LayerExperts(3, 11, link_copies=1)  # as the store holds it
    planned = plan_exchanges(
        swaps.placement(), [[], [0, 9], [0, 0, 9]], swaps.layers(), ExchangePolicy(most_bytes=11)
    )
    assert len(planned) == 1
    swaps.begin(planned[0].layer, planned[0].promoted, planned[0].demoted)
    assert swaps.ready()
    swaps.turn()
    swaps.wait()
    swaps.end()
    assert layer.told == ("begin", "turn", "end")
    assert swaps.placement().hot == ((), (0, 1), (2,))
