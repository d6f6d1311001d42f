"""A round of swaps: begun, turned and ended one after another, with steps between."""

import pytest

from headroom.experts.exchange import Swap, SwapPolicy, SwapRound, plan_swaps
from headroom.experts.placement import LayerExperts
from tests.experts.pretended import PretendedExperts, swapped

COUNTS = [[0, 0, 9, 8], [7, 9, 0, 0]]


def half_hot(**more: object) -> PretendedExperts:
    return PretendedExperts([LayerExperts(4, 10)] * 2, [(0, 1), (2, 3)], **more)  # type: ignore[arg-type]


def plan(experts: PretendedExperts) -> list[Swap]:
    return plan_swaps(experts.placement(), COUNTS, experts.layers(), SwapPolicy(per_layer=2))


def run(swaps: SwapRound) -> None:
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
    swaps = SwapRound(experts, planned)
    run(swaps)
    assert (swaps.done, swaps.error) == (planned, None)
    assert experts.exchanged == [(x.layer, x.promoted, x.demoted) for x in planned]
    assert experts.placement().hot == expected.hot == ((2, 3), (0, 1))


def test_experts_change_sides_when_they_are_told_to_and_not_before() -> None:
    experts = half_hot(slow=1)
    swaps = SwapRound(experts, plan(experts)[:1])
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
    assert SwapRound(half_hot(), []).over


@pytest.mark.parametrize("where", ["begin", "ready", "turn", "move", "end"])
def test_a_failure_ends_the_round_and_keeps_the_swaps_before_it(where: str) -> None:
    experts = half_hot(fails_after=1, fails_in=where)
    swaps = SwapRound(experts, plan(experts))
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
    swaps = SwapRound(experts, plan(experts))
    swaps.give_way()
    assert swaps.over
    assert experts.placement() == before
    again = SwapRound(experts, plan(experts))
    run(again)
    assert len(again.done) == 4


def test_who_gives_way_still_ends_a_swap_that_has_turned() -> None:
    experts = half_hot()
    swaps = SwapRound(experts, plan(experts))
    swaps.turn()
    swaps.give_way()
    assert not swaps.over
    swaps.end()
    assert swaps.over
    assert len(experts.begun) == len(experts.exchanged) == 1


@pytest.mark.parametrize("turned", [False, True])
def test_a_round_that_stops_waits_for_its_copies(turned: bool) -> None:
    experts = half_hot(slow=3)
    swaps = SwapRound(experts, plan(experts))
    if turned:
        swaps.turn()
    experts.waits = 0
    swaps.stop()
    assert swaps.over
    assert experts.waits == 1
    assert len(experts.exchanged) == turned
    swaps.stop()  # there is nothing left to wait for
    assert experts.waits == 1
