"""How many experts a budget keeps hot."""

from hypothesis import given
from hypothesis import strategies as st

from headroom.plan.budget import kv_token_bytes
from headroom.plan.experts import parse_expert_budget, spread_experts
from headroom.plan.shape import LayerShape
from headroom.units import GIB, MIB
from tests.plan.shapes import laguna


def layer(experts: int, expert_bytes: int) -> LayerShape:
    return LayerShape(
        kind="full", core_bytes=0, core_values=0, experts=experts, expert_bytes=expert_bytes
    )


def test_a_budget_is_spread_evenly_and_the_rest_goes_to_small_experts() -> None:
    hot = spread_experts([layer(4, 10), layer(4, 7), layer(0, 0), layer(4, 7)], 62)
    assert hot.counts == (2, 3, 0, 3)
    assert hot.bytes == 62


def test_layers_with_few_experts_leave_their_share_to_others() -> None:
    assert spread_experts([layer(1, 10), layer(8, 10)], 60).counts == (1, 5)


def test_a_percentage_and_a_size_mean_the_same_bytes() -> None:
    assert parse_expert_budget("25%", 4 * GIB) == parse_expert_budget("1GiB", 4 * GIB) == GIB
    assert parse_expert_budget("9GiB", 4 * GIB) == 4 * GIB


def published_budget(context: int) -> int:
    """Return what a 22.00 GiB card leaves for Laguna's experts, by the published terms."""
    kv = context * sum(kv_token_bytes(x, "f16", "f16") for x in laguna().layers)
    return 22 * GIB - int(2.28 * GIB) - kv - 200 * MIB - 512 * MIB


def test_laguna_has_its_published_number_and_size_of_experts() -> None:
    assert laguna().total_experts == 9984
    assert round(laguna().expert_bytes / GIB, 2) == 17.68


def test_a_22_gibibyte_card_holds_all_of_lagunas_experts_at_8192_tokens() -> None:
    budget = published_budget(8192)
    assert round(budget / GIB, 3) == 17.775
    assert spread_experts(laguna().layers, budget).total == 9984


def test_a_22_gibibyte_card_holds_nearly_all_at_12000_tokens() -> None:
    model, budget = laguna(), published_budget(12000)
    assert round(budget / GIB, 2) == 17.19
    hot = spread_experts(model.layers, budget)
    # Published: 258 of the larger experts cold, 0.49 GiB; spread evenly the cold ones are mixed.
    assert round((model.expert_bytes - hot.bytes) / GIB, 2) == 0.49
    assert 258 <= 9984 - hot.total <= 0.49 * GIB // 1_769_472 + 1


def test_sixty_percent_of_lagunas_experts_are_their_published_bytes() -> None:
    model = laguna()
    budget = parse_expert_budget("60%", model.expert_bytes)
    assert round(budget / GIB, 2) == 10.61
    hot = spread_experts(model.layers, budget)
    assert budget - 2_039_808 < hot.bytes <= budget


layers = st.lists(st.builds(layer, st.integers(0, 16), st.integers(1, 50)), min_size=1, max_size=8)


@given(layers, st.integers(0, 4000))
def test_a_budget_is_never_exceeded_and_holds_no_further_expert(
    layers: list[LayerShape], budget: int
) -> None:
    hot = spread_experts(layers, budget)
    assert hot.bytes <= budget
    assert hot.bytes == sum(n * x.expert_bytes for n, x in zip(hot.counts, layers, strict=True))
    assert all(0 <= n <= x.experts for n, x in zip(hot.counts, layers, strict=True))


@given(layers, st.integers(0, 4000), st.integers(0, 4000))
def test_more_budget_never_keeps_fewer_experts(
    layers: list[LayerShape], budget: int, more: int
) -> None:
    assert spread_experts(layers, budget + more).total >= spread_experts(layers, budget).total
