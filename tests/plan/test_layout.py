"""lay_out: every byte of weights is held exactly once, and no other sharing holds more."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headroom.errors import PlanError
from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.plan.layout import DevicePlan, Layout, Pinning, biggest_line, lay_out
from headroom.plan.lines import Line
from headroom.plan.plan import DoesNotFitError, Plan, make_plan
from headroom.plan.settings import PlanRequest
from headroom.plan.shape import LayerRange, ModelShape
from headroom.units import GIB, MIB
from tests.plan.shapes import (
    EMBED,
    HEAD,
    LOOKUP,
    NORM,
    cpu,
    gpu,
    host,
    layered,
    smollm2,
    stages_of,
)
from tests.plan.shapes import settings as plan_settings

WEIGHT_LINES = {"core_weights", "embeddings", "head", "hot_experts", "cold_experts"}


MODELS = st.builds(
    layered,
    st.lists(st.sampled_from([0, 4, 16]), min_size=3, max_size=6).map(tuple),
    st.booleans(),
    st.booleans(),
)
# GPUs with sizes in GiB; 0 is a CPU that runs layers.
MACHINES = st.lists(st.sampled_from([0.9, 1.2, 1.7, 4.0]), min_size=1, max_size=3).flatmap(
    lambda sizes: st.sampled_from([tuple(sizes), (*sizes[:2], 0), (0, *sizes[:2]), (0,)])
)


def devices_of(sizes: tuple[float, ...]) -> list[DeviceSpec]:
    stages = [gpu(size, f"cuda:{i}") if size else cpu(64) for i, size in enumerate(sizes)]
    return stages if 0 in sizes else [*stages, host(64)]


def plan_anyway(model: ModelShape, devices: list[DeviceSpec], options: Options) -> Plan:
    try:
        return make_plan([model], devices, options)
    except DoesNotFitError as error:
        return error.plan


def check_composition(model: ModelShape, plan: Plan | Layout) -> None:
    """Compare the lines of weights with the model's own numbers, one kind at a time.

    Every byte is held once. Where slots change hands, the host also has copies of hot experts.
    """
    everywhere = [x for device in plan.devices for x in device.lines] + list(plan.host.lines)
    found = {
        name: sum(line.bytes for line in everywhere if line.name == name) for name in WEIGHT_LINES
    }
    apart = model.head_bytes == 0 and len(plan.devices) > 1  # a tied head, on another device
    core = sum(layer.core_bytes for layer in model.layers) + NORM
    assert found["core_weights"] == core
    assert found["embeddings"] == EMBED + model.lookup_bytes
    assert found["head"] == model.head_bytes + (EMBED if apart else 0)
    experts = sum(layer.experts * layer.expert_bytes for layer in model.layers)
    copies = 0
    if isinstance(plan, Plan) and plan.settings.keep_host_copy:
        hot = [count for device in plan.devices for count in device.hot_by_layer]
        copies = sum(
            count * layer.expert_bytes
            for layer, count in zip(model.layers, hot, strict=True)
            if count < layer.experts
        )
    assert found["hot_experts"] + found["cold_experts"] == experts + copies
    assert sum(found.values()) == model.weight_bytes + copies + (EMBED if apart else 0)
    # Each device holds what its own layers need, and the layers are shared without gaps.
    ranges = [device.layers for device in plan.devices]
    assert (ranges[0].first, ranges[-1].last) == (0, len(model.layers) - 1)
    assert all(one.last + 1 == other.first for one, other in pairwise(ranges))
    for device in plan.devices:
        own = model.layers[device.layers.first : device.layers.last + 1]
        lines = {line.name: line.bytes for line in device.lines}
        begins, ends = device is plan.devices[0], device is plan.devices[-1]
        final = model.hidden * 4  # the final norm; the rest makes inputs of layers
        outer = (NORM - final if begins else 0) + (final if ends else 0)
        assert lines["core_weights"] == sum(x.core_bytes for x in own) + outer
        assert ("head" in lines) == (ends and (apart or bool(model.head_bytes)))
        hot = sum(n * x.expert_bytes for n, x in zip(device.hot_by_layer, own, strict=False))
        assert lines.get("hot_experts", 0) == hot


@settings(max_examples=150, deadline=None)
@given(MODELS, MACHINES, st.sampled_from([None, "0%", "40%", "100%"]))
@example(layered((4, 4, 4), True, True), (4.0,), None)
@example(layered((4, 4, 4), True, True), (4.0, 4.0), None)
@example(layered((16, 0, 16), False, True), (0.9, 0), "40%")
@example(layered((16, 0, 16), True, False), (0, 1.2, 1.2), None)
@example(layered((0, 16, 16, 16, 16), True, False), (1.2,), None)
def test_every_byte_of_weights_is_planned_exactly_once(
    model: ModelShape, sizes: tuple[float, ...], budget: str | None
) -> None:
    options = Options(weights="packed", context=1024, parallel=1, chunk=64, expert_budget=budget)
    try:
        plan = plan_anyway(model, devices_of(sizes), options)
    except PlanError:
        return  # the budget holds some experts, and fewer than one token visits
    check_composition(model, plan)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_tables_of_a_model_lie_where_they_are_read(tied: bool, count: int) -> None:
    model = layered((0, 0, 0), tied, lookup=True)
    roomy = [gpu(4, f"cuda:{index}") for index in range(count)]
    options = Options(weights="packed", context=1024, parallel=1, chunk=64)
    plan = make_plan([model], [*roomy, host(64)], options)
    first, last = plan.devices[0].allocated, plan.devices[-1].allocated
    host_lines = {line.name: line.bytes for line in plan.host.lines}
    if tied and count == 1:  # the head's own device has the table, the host the per-layer ones
        assert (first["embeddings"], host_lines["embeddings"]) == (EMBED, LOOKUP)
        assert "head" not in last
    else:
        assert first["embeddings"] == EMBED + LOOKUP
        assert "embeddings" not in host_lines
        assert last["head"] == (EMBED if tied else HEAD)
    tight = replace(roomy[0], total_bytes=GIB, available_bytes=GIB)
    plan = make_plan([model], [tight, *roomy[1:], host(64)], options)
    check_composition(model, plan)


def test_tables_move_to_a_gpu_that_has_exactly_the_room_for_them() -> None:
    model = layered((0, 0, 0), tied=False, lookup=True)
    cached = 1 << 23  # tokens, so that the reserve is not a share of a small device
    options = Options(weights="packed", context=1024, parallel=1, chunk=64, cache_tokens=cached)

    def planned(size: int) -> Plan:
        card = replace(gpu(1), total_bytes=size, available_bytes=size, card_bytes=80 * GIB)
        return make_plan([model], [card, host(64)], options)

    needed = sum(line.bytes for line in planned(64 * GIB).devices[0].lines)
    assert needed > 8 * GIB
    assert planned(needed).devices[0].free_bytes == 0
    assert planned(needed).devices[0].allocated["embeddings"] == EMBED + LOOKUP
    assert "embeddings" not in planned(needed - 1).devices[0].allocated


def test_a_cpu_that_runs_layers_is_the_host_and_no_host_has_no_memory() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options())
    assert (plan.host.total_bytes, plan.host.lines) == (24 * GIB, ())
    beside = make_plan([smollm2()], [gpu(4), cpu(16)], Options(split="1,1"))
    assert (beside.host.total_bytes, beside.host.lines) == (16 * GIB, ())
    behind = make_plan([smollm2()], [gpu(4), host(8)], Options())
    assert behind.host.total_bytes == 8 * GIB
    assert [line.name for line in behind.host.lines] == ["runtime", "reserve"]


SMALL = plan_settings(context=1024, cache_tokens=1024, chunk=64)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([0, 4, 16]), min_size=2, max_size=5),
    st.lists(st.sampled_from([0.6, 0.9, 1.2, 1.7, 4.0]), min_size=2, max_size=2),
    st.booleans(),
)
def test_no_other_sharing_of_the_layers_holds_more_experts_or_fits_instead(
    experts: list[int], sizes: list[float], tied: bool
) -> None:
    model = layered(tuple(experts), tied, lookup=False)
    devices = devices_of(tuple(sizes))
    best = lay_out(stages_of(model, devices, SMALL), devices, PlanRequest())
    for first in range(1, len(experts)):
        shares = PlanRequest(split=(first, len(experts) - first))
        other = lay_out(stages_of(model, devices, SMALL), devices, shares)
        assert [device.layers.size for device in other.devices] == [first, len(experts) - first]
        if other.fits:
            assert best.fits
            assert best.hot_experts >= other.hot_experts


def test_beside_a_cpu_experts_lie_on_the_gpus_that_hold_them_all() -> None:
    # By whole layers, the two with experts would be on one GPU and on the CPU.
    devices = [gpu(0.85), gpu(0.81, "cuda:1"), cpu(0.79)]
    found = plan_anyway(layered((0, 8, 16, 0), tied=True, lookup=False), devices, Options())
    assert found.fits
    assert [device.hot_experts for device in found.devices] == [8, 16, 0]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.integers(1, 2))
def test_a_placement_is_held_as_given_and_the_host_holds_what_it_leaves(
    data: st.DataObject, copies: bool, tied: bool, count: int
) -> None:
    experts = data.draw(st.lists(st.sampled_from([0, 4, 16]), min_size=2, max_size=5))
    placed = [data.draw(st.integers(0, number)) for number in experts]
    model = layered(tuple(experts), tied, lookup=True)
    devices = [*(gpu(4, f"cuda:{index}") for index in range(count)), host(64)]
    chosen = replace(SMALL, keep_host_copy=copies)
    found = lay_out(stages_of(model, devices, chosen), devices, PlanRequest(), placed)
    assert [n for device in found.devices for n in device.hot_by_layer or ()] == (
        placed if any(experts) else []
    )
    # Copies of hot experts are kept only in layers that also have cold ones.
    behind = sum(
        layer.expert_bytes * (layer.experts - (0 if copies else hot))
        for layer, hot in zip(model.layers, placed, strict=True)
        if hot < layer.experts
    )
    held = {line.name: line.bytes for line in found.host.lines}
    assert held.get("cold_experts", 0) == behind
    assert (found.host.pinning is None) == (behind == 0)
    if not copies:
        check_composition(model, found)


@pytest.mark.parametrize(
    ("limit", "pin", "pinning"),
    [
        (None, True, Pinning.PINNED),
        (0, True, Pinning.PINNED),
        (-1, True, Pinning.OVER_LIMIT),
        (None, False, Pinning.TURNED_OFF),
    ],
)
def test_cold_experts_are_pinned_up_to_the_limit_unless_turned_off(
    limit: int | None, pin: bool, pinning: Pinning
) -> None:
    """`limit` is counted from the bytes of the cold experts; None: there is none."""
    model = layered((16, 16), tied=True, lookup=False)
    cold = 12 * (3 * MIB + 256) + 10 * (4 * MIB + 256)
    behind = replace(host(64), pinnable_bytes=None if limit is None else cold + limit)
    chosen = replace(SMALL, pin_experts=pin)
    devices = [gpu(4), behind]
    found = lay_out(stages_of(model, devices, chosen), devices, PlanRequest(), placed=(4, 6))
    assert {line.name: line.bytes for line in found.host.lines}["cold_experts"] == cold
    assert found.host.pinning is pinning


def test_only_lines_that_can_be_made_smaller_are_the_biggest() -> None:
    kept = [
        Line("kv", 3, ""),
        Line("workspace", 5, ""),
        Line("reserve", 90, ""),
        Line("runtime", 70, ""),
    ]
    assert biggest_line(kept) == Line("workspace", 5, "")
    assert biggest_line(kept[2:]) == Line("reserve", 90, "")


def test_free_bytes_are_what_no_line_takes_and_may_be_missing() -> None:
    device = DevicePlan(
        name="cuda:0",
        kind="cuda",
        total_bytes=100,
        lines=(Line("kv", 60, ""), Line("graphs", 50, "")),
        layers=LayerRange(0, 3),
        settings=SMALL,
        hot_by_layer=(1, 0, 2, 4),
    )
    assert (device.free_bytes, device.hot_experts) == (-10, 7)
    assert device.allocated == {"kv": 60}
