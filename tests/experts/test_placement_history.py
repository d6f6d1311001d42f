"""Few choices move little: placements and promises of a short history are nearly the even ones."""

import random

from hypothesis import given
from hypothesis import strategies as st

from headroom.experts.placement import PRIOR_TOKENS, LayerExperts, place_experts

LAYER = LayerExperts(64, 10, used=4)
NUMBER = 6  # layers
Drawn = list[list[float]]


def uniform(seed: int, tokens: int) -> Drawn:
    """Choices of tokens that every expert gets alike."""
    draw, counts = random.Random(seed), []
    for _ in range(NUMBER):
        row = [0.0] * LAYER.experts
        for _ in range(tokens):
            for expert in draw.sample(range(LAYER.experts), LAYER.used):
                row[expert] += 1.0
        counts.append(row)
    return counts


def greedy(layers: list[LayerExperts], counts: list[list[int]], budget: int) -> list[set[int]]:
    """The most choices per byte that fit, and nothing else."""
    wanted = sorted(
        (-count / layer.expert_bytes, index, expert)
        for index, (layer, row) in enumerate(zip(layers, counts, strict=True))
        for expert, count in enumerate(row)
    )
    hot: list[set[int]] = [set() for _ in layers]
    for _, index, expert in wanted:
        if layers[index].expert_bytes <= budget:
            budget -= layers[index].expert_bytes
            hot[index].add(expert)
    return hot


@given(st.integers(0, 1 << 30), st.integers(0, 100), st.sampled_from([0.1, 0.3, 0.6, 0.9]))
def test_few_tokens_of_even_routing_leave_every_layer_its_share(
    seed: int, tokens: int, share: float
) -> None:
    budget = int(share * NUMBER * LAYER.experts) * LAYER.expert_bytes
    layers, counts = [LAYER] * NUMBER, uniform(seed, tokens)
    placement = place_experts(layers, counts, budget, LAYER.used)
    # The same room is hot, so that the true hit rate of all layers is the even one; of a single
    # layer it is less by 5 of 64 experts at most.
    assert placement.hot_bytes(layers) == budget
    even = budget / LAYER.expert_bytes / NUMBER
    assert all(abs(len(ids) - even) <= 5 for ids in placement.hot)


@given(st.integers(0, 1 << 30), st.sampled_from([1, 10, 100, 500]), st.sampled_from([0.3, 0.6]))
def test_few_tokens_of_even_routing_promise_hardly_more_than_the_share_that_is_hot(
    seed: int, tokens: int, share: float
) -> None:
    budget = int(share * NUMBER * LAYER.experts) * LAYER.expert_bytes
    layers, counts = [LAYER] * NUMBER, uniform(seed, tokens)
    placement = place_experts(layers, counts, budget, LAYER.used).with_hit_rates(layers, counts)
    for index, ids in enumerate(placement.hot):
        truth = len(ids) / LAYER.experts
        assert -1e-9 <= placement.hit_rate(index, LAYER.experts) - truth <= 0.06


def test_a_few_choices_do_not_draw_room_from_one_layer_to_another() -> None:
    # Five tokens: one layer chose four experts again and again, the other ten by turns.
    counts = [[5.0] * 4 + [0.0] * 12, [2.0] * 10 + [0.0] * 6]
    placement = place_experts([LayerExperts(16, 1, 4)] * 2, counts, 16, 4)
    assert [len(ids) for ids in placement.hot] == [8, 8]


def test_experts_that_were_never_chosen_are_spread_over_layers() -> None:
    counts = [[1.0] * 4 + [0.0] * 12] * 4
    placement = place_experts([LayerExperts(16, 1, 4)] * 4, counts, 38, 4)
    assert [len(ids) for ids in placement.hot] == [10, 10, 9, 9]


def test_without_any_choices_small_experts_have_no_precedence() -> None:
    layers = [LayerExperts(8, 9, 2), LayerExperts(8, 10, 2), LayerExperts(8, 11, 2)]
    placement = place_experts(layers, [[0.0] * 8] * 3, 120, 2)
    assert [len(ids) for ids in placement.hot] == [4, 4, 4]


@given(st.data(), st.integers(0, 500))
def test_many_tokens_decide_as_if_there_were_nothing_else(data: st.DataObject, budget: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=2, max_size=4))
    layers = [LayerExperts(6, size) for size in sizes]
    drawn = data.draw(
        st.lists(st.integers(1, 1000), min_size=6 * len(sizes), max_size=6 * len(sizes))
    )
    # Distinct choices per byte, further apart than the whole prior.
    many = 4 * PRIOR_TOKENS * 30 * len(drawn)
    counts = [
        [many * size * (len(drawn) * drawn[6 * index + i] + 6 * index + i) for i in range(6)]
        for index, size in enumerate(sizes)
    ]
    placement = place_experts(layers, counts, budget, 0)
    assert [set(ids) for ids in placement.hot] == greedy(layers, counts, budget)


@given(st.lists(st.lists(st.integers(0, 200), min_size=64, max_size=64), min_size=2, max_size=4))
def test_two_layers_differ_by_no_more_than_their_choices_explain(counts: list[list[int]]) -> None:
    placement = place_experts([LAYER] * len(counts), counts, 300 * len(counts), 0)
    numbers = [len(ids) for ids in placement.hot]
    step = LAYER.prior / LAYER.experts**2  # what one more hot expert takes from the next
    most = max(map(max, counts)) - min(map(min, counts))
    assert max(numbers) - min(numbers) <= 1 + most / step


def test_a_promise_comes_near_what_many_choices_hit() -> None:
    layer = LayerExperts(4, 1, used=2)
    placement = place_experts([layer], [[9.0, 9.0, 1.0, 1.0]], 2, 2)
    rates = [
        placement.with_hit_rates([layer], [[9.0 * n, 9.0 * n, n, n]]).hit_rate(0, 4)
        for n in (0, 1, 100, 10000)
    ]
    assert rates == sorted(rates)
    assert rates[0] == 0.5
    assert rates[1] < 0.51
    assert 0.89 < rates[3] < 0.9
