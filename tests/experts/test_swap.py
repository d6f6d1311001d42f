"""Swaps: no expert is lost or held twice, and only what pays is moved."""

from hypothesis import given
from hypothesis import strategies as st

from headroom.experts.exchange import SwapPolicy, plan_swaps, recent
from headroom.experts.placement import ExpertPlacement, LayerExperts, place_experts
from tests.experts.pretended import swapped

Problem = tuple[list[LayerExperts], list[list[int]], ExpertPlacement, SwapPolicy]


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
    policy = SwapPolicy(
        min_gain=draw(st.integers(1, 5)),
        hysteresis=draw(st.sampled_from([0.0, 0.25, 1.0])),
        per_layer=draw(st.integers(0, 3)),
        most_bytes=draw(st.none() | st.integers(0, 200)),
    )
    return layers, counts, ExpertPlacement(tuple(hot), "even"), policy


@given(problems())
def test_swaps_lose_no_expert_and_keep_every_limit(problem: Problem) -> None:
    layers, counts, placement, policy = problem
    swaps = plan_swaps(placement, counts, layers, policy)
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


@given(problems())
def test_rounds_come_to_rest_with_the_best_experts_hot(problem: Problem) -> None:
    layers, counts, placement, _ = problem
    policy = SwapPolicy(min_gain=1, hysteresis=0)
    for _ in range(64):
        swaps = plan_swaps(placement, counts, layers, policy)
        placement = swapped(placement, swaps)
    assert plan_swaps(placement, counts, layers, policy) == []
    for ids, row in zip(placement.hot, counts, strict=True):
        best = sorted(row, reverse=True)[: len(ids)]
        assert sorted((row[expert] for expert in ids), reverse=True) == best


def test_the_largest_gains_come_first() -> None:
    layers = [LayerExperts(3, 10)] * 3
    placement = ExpertPlacement(((0,), (0,), (0,)), "even")
    counts = [[1, 5, 0], [1, 9, 0], [1, 5, 0]]
    policy = SwapPolicy(most_bytes=60)
    swaps = plan_swaps(placement, counts, layers, policy)
    assert [(swap.layer, swap.promoted, swap.gain) for swap in swaps] == [(1, 1, 8), (0, 1, 4)]


def test_what_is_too_large_leaves_room_to_a_smaller_swap() -> None:
    layers = [LayerExperts(2, 20), LayerExperts(2, 10)]
    placement = ExpertPlacement(((0,), (0,)), "even")
    swaps = plan_swaps(placement, [[1, 9], [1, 5]], layers, SwapPolicy(most_bytes=59))
    assert [(swap.layer, swap.copied_bytes) for swap in swaps] == [(1, 30)]


def test_equals_do_not_change_places() -> None:
    layers = [LayerExperts(2, 10)]
    placement = place_experts(layers, [[101, 100]], 10, 1)
    assert plan_swaps(placement, [[100, 102]], layers, SwapPolicy()) == []
    assert len(plan_swaps(placement, [[100, 126]], layers, SwapPolicy())) == 1


def test_recent_counts_are_worth_so_many_tokens_at_most() -> None:
    scaled = recent([[30.0, 10.0], [1.0, 2.0], []], used=(2, 2, 0), tokens=10)
    assert scaled == ((15.0, 5.0), (1.0, 2.0), ())  # 20 choices are 10 tokens; few stay as they are
