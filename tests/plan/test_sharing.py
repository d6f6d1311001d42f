"""Layer ranges of several devices: shares, balance, and the search against all ways there are."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.errors import OptionError, PlanError
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import make_plan
from headroom.plan.shape import LayerRange, LayerShape
from headroom.plan.sharing import (
    LayerUnits,
    RangeValue,
    parse_split,
    share_layers,
    split_by_balance,
    split_by_filling,
    split_by_weights,
)
from tests.plan.shapes import cpu, gpu, host


@pytest.mark.parametrize(
    ("layers", "weights", "ranges"),
    [
        (64, (1, 1), ((0, 31), (32, 63))),
        (40, (2, 1), ((0, 26), (27, 39))),
        (3, (1, 1), ((0, 1), (2, 2))),  # 1.5 rounds away from zero
        (4, (1000, 1, 1), ((0, 1), (2, 2), (3, 3))),  # every device has a layer
        (4, (1, 1000), ((0, 0), (1, 3))),
        (1, (5,), ((0, 0),)),
    ],
)
def test_weights_give_their_share_of_layers(
    layers: int, weights: tuple[float, ...], ranges: tuple[LayerRange, ...]
) -> None:
    assert split_by_weights(layers, weights) == ranges


def test_more_devices_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="3 devices cannot share 2 layers"):
        split_by_weights(2, (1, 1, 1))


@pytest.mark.parametrize("text", ["1,0", "1,-1", "a,b", "1,,2", "nan,1", "inf,1"])
def test_shares_that_are_no_positive_numbers_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_split(text, 2)


def fullest(costs: list[int], rooms: list[int], ranges: tuple[LayerRange, ...]) -> float:
    return max(
        sum(costs[first : last + 1]) / room
        for (first, last), room in zip(ranges, rooms, strict=True)
    )


@given(
    st.lists(st.integers(1, 100), min_size=2, max_size=12),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_balance_over_two_devices_is_the_best_there_is(
    costs: list[int], first: int, second: int
) -> None:
    rooms = [first * 10, second * 10]
    ranges = split_by_balance(costs, rooms)
    choices = [((0, cut - 1), (cut, len(costs) - 1)) for cut in range(1, len(costs))]
    best = min(fullest(costs, rooms, choice) for choice in choices)
    assert fullest(costs, rooms, ranges) == pytest.approx(best)


@given(
    st.lists(st.integers(1, 100), min_size=4, max_size=20),
    st.lists(st.integers(1, 100), min_size=1, max_size=4),
)
def test_ranges_cover_every_layer_once(costs: list[int], rooms: list[int]) -> None:
    ranges = split_by_balance(costs, rooms)
    covered = [index for first, last in ranges for index in range(first, last + 1)]
    assert covered == list(range(len(costs)))
    assert all(first <= last for first, last in ranges)


def test_the_first_or_the_last_devices_are_filled() -> None:
    costs, rooms = [10] * 6, [35, 45]
    assert split_by_filling(costs, rooms) == ((0, 2), (3, 5))
    assert split_by_filling(costs, rooms, backwards=True) == ((0, 1), (2, 5))
    assert split_by_filling(costs, [100, 100]) == ((0, 4), (5, 5))
    assert split_by_filling(costs, [25, 25]) is None


def all_ways(layers: int, devices: int) -> list[tuple[LayerRange, ...]]:
    ways = []
    for cuts in combinations(range(1, layers), devices - 1):
        edges = (0, *cuts, layers)
        ways.append(tuple(LayerRange(edges[i], edges[i + 1] - 1) for i in range(devices)))
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
    def value_of(device: int, first: int, last: int) -> RangeValue | None:
        taken = sum(costs[first : last + 1])
        if taken > rooms[device]:
            return None
        hot = min(rooms[device] - taken, 2 * (last + 1 - first))
        return RangeValue(hot, taken * slow[device], taken * 1000 // rooms[device])

    def rank(ranges: tuple[LayerRange, ...]) -> tuple[int, int, int] | None:
        values = [value_of(device, *layer_range) for device, layer_range in enumerate(ranges)]
        if any(value is None for value in values):
            return None
        found = [value for value in values if value is not None]
        return (
            -sum(value.hot for value in found),
            sum(value.time for value in found),
            max(value.load for value in found),
        )

    ranks = [x for way in all_ways(len(costs), len(rooms)) if (x := rank(way)) is not None]
    found = share_layers(len(costs), len(rooms), value_of)
    assert (found is None) == (not ranks)
    if found is not None:
        assert rank(found) == min(ranks)


def test_workers_take_turns_of_equal_length_and_the_head_is_a_part_of_one() -> None:
    model = known_shape("smollm2-135m:q8_0")
    workers = [replace(cpu(8), name=f"cpu#{n}", worker=True) for n in (1, 2)]
    plan = make_plan([model], workers, Options(parallel=8))
    first, last = (stage.decode_s for stage in plan.predicted.stages)
    layer = first / len(range(*plan.devices[0].layers))
    assert abs(first - last) < layer
    assert plan.devices[0].layers.last + 1 > len(model.layers) // 2


def test_the_lines_of_a_shared_plan_are_those_that_were_weighed() -> None:
    model = known_shape("laguna-xs.2:q4_k_m")
    devices = [gpu(6, "cuda:0"), gpu(8, "cuda:1"), gpu(6, "cuda:2"), host(64)]
    plan = make_plan([model], devices, Options(parallel=1, context=4096))
    assert plan.fits
    assert sum(device.hot_experts for device in plan.devices) > 8000
    # No device has room for one more of its experts, so no range was valued too low.
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


def layer_of(kind: str, *, owns_kv: bool = True) -> LayerShape:
    window = 512 if kind == "window" else 0
    return LayerShape(
        kind=kind,  # type: ignore[arg-type]
        core_bytes=1000,
        core_values=1000,
        kv_heads=1,
        key_dim=32,
        value_dim=32,
        window=window,
        owns_kv=owns_kv,
    )


def test_a_layer_stays_with_the_owner_of_the_cache_that_it_reads() -> None:
    own = [layer_of(kind) for kind in ("window", "full", "window", "full")]
    readers = [layer_of(kind, owns_kv=False) for kind in ("window", "full")]
    # The readers need layers 2 and 3, the last owners of their kinds.
    units = LayerUnits.of([*own, *readers])
    assert units.units == ((0, 0), (1, 1), (2, 5))
    assert LayerUnits.of(own).units == ((0, 0), (1, 1), (2, 2), (3, 3))
    # A reader of full attention alone needs layer 1 and all layers from there on.
    assert LayerUnits.of([*own[:3], layer_of("full", owns_kv=False)]).units == ((0, 0), (1, 3))
    assert units.ranges([LayerRange(0, 1), LayerRange(2, 2)]) == ((0, 1), (2, 5))
    assert units.sums([1, 2, 3, 4, 5, 6]) == [1, 2, 18]


@given(st.data())
def test_no_unit_can_be_cut_and_every_other_cut_is_allowed(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["window", "full"]), min_size=2, max_size=6))
    kinds = ["window", "full", *kinds]
    owned = [True, True, *(data.draw(st.booleans()) for _ in kinds[2:])]
    layers = [layer_of(kind, owns_kv=own) for kind, own in zip(kinds, owned, strict=True)]
    starts = {unit.first for unit in LayerUnits.of(layers).units}
    for cut in range(1, len(layers)):
        readers = [index for index in range(cut, len(layers)) if not owned[index]]
        owners = [max(i for i in range(r) if owned[i] and kinds[i] == kinds[r]) for r in readers]
        assert (cut in starts) == all(owner >= cut for owner in owners)


def test_gemma_4_e4b_is_never_cut_between_a_cache_and_its_readers() -> None:
    model = known_shape("gemma-4-e4b:q4_k_m")
    devices = [gpu(6), gpu(4, "cuda:1"), host(64)]
    plan = make_plan([model], devices, Options())
    assert plan.devices[1].layers.first <= 22  # layers 24 and later read the caches of 22 and 23
    assert all(device.allocated["kv"] > 0 for device in plan.devices)
    assert make_plan([model], devices, Options(split="21,21")).devices[1].layers == (21, 41)
    with pytest.raises(PlanError, match="cuts at layer 28, and layers 22 to 41 must"):
        make_plan([model], devices, Options(split="2,1"))


def test_more_devices_than_parts_that_can_be_cut_are_refused() -> None:
    layers = [layer_of("full"), layer_of("full", owns_kv=False)]
    with pytest.raises(PlanError, match=r"layers 0 to 1 must run on one device") as caught:
        LayerUnits.of(layers).check_count(2)
    assert caught.value.hint == "Name 1 to 1 devices."
