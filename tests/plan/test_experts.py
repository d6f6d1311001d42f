"""How many experts a budget keeps hot, and the buffers through which cold experts are copied."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.options import Options
from headroom.plan.experts import (
    BUFFER_BYTES,
    bounce_bytes,
    buffer_bytes,
    downs_bytes,
    expert_staging_bytes,
    parse_expert_budget,
    spread_experts,
)
from headroom.plan.known import known_shape
from headroom.plan.plan import make_plan
from headroom.plan.shape import LayerShape
from headroom.units import GIB, MIB
from tests.plan.shapes import gpu, host, laguna

LAYERS = known_shape("qwen3.6-27b:q4_k_m").layers


def layer(experts: int, expert_bytes: int) -> LayerShape:
    return LayerShape(
        kind="full", core_bytes=0, core_values=0, experts=experts, expert_bytes=expert_bytes
    )


def test_a_budget_is_spread_evenly_and_the_rest_goes_to_small_experts() -> None:
    hot = spread_experts([layer(4, 10), layer(4, 7), layer(0, 0), layer(4, 7)], 62)
    assert hot.counts == (2, 3, 0, 3)
    assert hot.bytes == 62


@pytest.mark.parametrize(
    ("budget", "counts"),
    [
        (39, (1, 1, 1, 0)), (40, (1, 1, 1, 1)), (49, (1, 1, 1, 1)), (50, (2, 1, 1, 1)),
        (79, (2, 2, 2, 1)), (80, (2, 2, 2, 2)),
    ],
)  # fmt: skip
def test_of_layers_with_equal_experts_the_earlier_ones_get_the_rest(
    budget: int, counts: tuple[int, ...]
) -> None:
    assert spread_experts([layer(4, 10)] * 4, budget).counts == counts


def test_the_rest_of_a_budget_goes_to_small_experts_first_and_then_to_earlier_layers() -> None:
    layers = [layer(4, 10), layer(4, 10), layer(4, 9)]
    assert spread_experts(layers, 29 + 9).counts == (1, 1, 2)
    assert spread_experts(layers, 29 + 19).counts == (2, 1, 2)


def test_layers_with_few_experts_leave_their_share_to_others() -> None:
    assert spread_experts([layer(1, 10), layer(8, 10)], 60).counts == (1, 5)


def test_a_percentage_and_a_size_mean_the_same_bytes() -> None:
    assert parse_expert_budget("25%", 4 * GIB) == parse_expert_budget("1GiB", 4 * GIB) == GIB
    assert parse_expert_budget("9GiB", 4 * GIB) == 4 * GIB


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


@given(size=st.integers(1, 1 << 28), experts=st.integers(1, 512))
def test_a_buffer_holds_whole_experts_and_at_least_one(size: int, experts: int) -> None:
    found = buffer_bytes(size, experts)
    assert size <= found
    assert found % 256 == 0
    assert found < max(size, min(BUFFER_BYTES, experts * size)) + 256
    assert found > min(BUFFER_BYTES, experts * size) - size


def test_staging_is_two_buffers_the_downs_of_one_group_and_a_spare_expert() -> None:
    routed = replace(
        LAYERS[0], experts=256, experts_used=8, expert_width=512, expert_bytes=1_900_544
    )
    assert expert_staging_bytes([routed], 2048, GIB) == (2 * 35 + 1) * 1_900_544 + 512 * MIB
    mixed = expert_staging_bytes([routed, LAYERS[0]], 2048, 64 * MIB)
    assert mixed == (2 * 35 + 1) * 1_900_544 + 32 * MIB
    wider = replace(routed, expert_bytes=3_000_064)
    wide = expert_staging_bytes([routed, wider], 2048, 64 * MIB)
    assert wide == (2 * 22 + 1) * 3_000_064 + 32 * MIB


def test_kernels_that_unpack_nothing_take_one_expert_at_a_time() -> None:
    routed = replace(LAYERS[0], experts=8, expert_bytes=1000)
    assert expert_staging_bytes([routed], 2048, 0) == 2 * 1024


def test_a_group_of_one_has_room_however_little_may_be_unpacked() -> None:
    assert downs_bytes(8, 512, 2048, 1) == 2 * 512 * 2048


def test_dense_layers_stage_nothing() -> None:
    assert expert_staging_bytes(LAYERS, 2048, GIB) == 0
    assert bounce_bytes(LAYERS) == 0


def test_experts_that_are_not_pinned_pass_two_more_buffers_in_host_memory() -> None:
    spare = {}
    for no_pin in (False, True):
        options = Options(no_pin=no_pin, expert_budget="30%")
        plan = make_plan([laguna()], [gpu(12), host(64)], options)
        spare[no_pin] = next(x.bytes for x in plan.host.lines if x.name == "expert_spare")
    each = spare[False]
    assert spare[True] == each + 2 * buffer_bytes(each, 256)
