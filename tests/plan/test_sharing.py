"""The search over spans: against all ways there are, and against the lines of a plan."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import make_plan
from headroom.plan.sharing import SpanValue, share_layers
from headroom.plan.spans import Span
from tests.plan.shapes import gpu, host


def all_ways(layers: int, devices: int) -> list[tuple[Span, ...]]:
    ways = []
    for cuts in combinations(range(1, layers), devices - 1):
        edges = (0, *cuts, layers)
        ways.append(tuple((edges[i], edges[i + 1] - 1) for i in range(devices)))
    return ways


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=7),
    st.lists(st.integers(5, 40), min_size=2, max_size=3),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
)
def test_no_way_to_share_layers_is_better_than_the_one_found(
    costs: list[int], rooms: list[int], slow: list[int]
) -> None:
    def judge(device: int, first: int, last: int) -> SpanValue | None:
        taken = sum(costs[first : last + 1])
        if taken > rooms[device]:
            return None
        hot = min(rooms[device] - taken, 2 * (last + 1 - first))
        return SpanValue(hot, taken * slow[device], taken * 1000 // rooms[device])

    def rank(spans: tuple[Span, ...]) -> tuple[int, int, int] | None:
        values = [judge(device, *span) for device, span in enumerate(spans)]
        if any(value is None for value in values):
            return None
        found = [value for value in values if value is not None]
        return (
            -sum(value.hot for value in found),
            sum(value.time for value in found),
            max(value.fill for value in found),
        )

    ranks = [x for way in all_ways(len(costs), len(rooms)) if (x := rank(way)) is not None]
    found = share_layers(len(costs), len(rooms), judge)
    assert (found is None) == (not ranks)
    if found is not None:
        assert rank(found) == min(ranks)


def test_the_lines_of_a_shared_plan_are_those_that_were_weighed() -> None:
    model = known_shape("laguna-xs.2:q4_k_m")
    devices = [gpu(6, "cuda:0"), gpu(8, "cuda:1"), gpu(6, "cuda:2"), host(64)]
    plan = make_plan([model], devices, Options(parallel=1, context=4096))
    assert plan.fits
    assert sum(device.hot_experts for device in plan.devices) > 8000
    # No device has room for one more expert of its own, so that nothing was weighed too dear.
    cold = [device for device in plan.devices if device.hot_experts < device.total_experts]
    assert cold
    assert all(device.free_bytes < 2_039_808 for device in cold)


def test_experts_of_two_cards_are_not_fewer_than_those_of_the_larger_one() -> None:
    model, options = known_shape("qwen3.6-35b-a3b:q4_k_m"), Options(context=4096, parallel=1)
    one = make_plan([model], [gpu(12), host(64)], options)
    two = make_plan([model], [gpu(12, "cuda:0"), gpu(6, "cuda:1"), host(64)], options)
    assert sum(x.hot_experts for x in two.devices) > one.devices[0].hot_experts


def test_a_fixed_split_is_not_searched() -> None:
    model = known_shape("qwen3.6-27b:q4_k_m")
    devices = [gpu(24, "cuda:0"), gpu(24, "cuda:1"), host(64)]
    plan = make_plan([model], devices, Options(split="1,3"))
    assert [device.layers for device in plan.devices] == [(0, 15), (16, 63)]
