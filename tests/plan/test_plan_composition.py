"""Every byte of weights is in a plan exactly once, however layers are shared; exact limits."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headroom.errors import OptionError, PlanError
from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.plan.plan import DoesNotFitError, Plan, make_plan
from headroom.plan.settings import pages_for
from headroom.plan.shape import LayerShape, ModelShape
from headroom.units import GIB, MIB
from tests.plan.shapes import cpu, gpu, host, laguna, smollm2

WEIGHT_LINES = {"core_weights", "embeddings", "head", "hot_experts", "cold_experts"}
KINDS = ("full", "window", "recurrent")
# Sizes that no sum of the others makes up for.
EMBED, HEAD, LOOKUP, NORM = 7_000_003 * 32, 11_000_027 * 32, 13_000_027 * 32, 4096 * 4


def layered(experts: tuple[int, ...], tied: bool, lookup: bool) -> ModelShape:
    """Return a model with a layer for each number of experts; every layer has its own sizes."""
    layers = tuple(
        LayerShape(
            kind=KINDS[index % 3],  # type: ignore[arg-type]
            core_bytes=(20 + index) * MIB + 1,
            core_values=40 * MIB,
            query_heads=8,
            kv_heads=8,
            key_dim=64,
            value_dim=64,
            window=512 if index % 3 == 1 else 0,
            ffn_width=1024,
            experts=count,
            experts_used=min(2, count),
            expert_width=512 if count else 0,
            expert_bytes=(3 + index) * MIB + 256 if count else 0,
            state_values=4096 if index % 3 == 2 else 0,
            state_heads=4,
            mixer_width=1024,
        )
        for index, count in enumerate(experts)
    )
    return ModelShape(
        name="layered",
        architecture="llama",
        hidden=512,
        vocab=8192,
        context_limit=4096,
        layers=layers,
        embed_bytes=EMBED,
        embed_values=EMBED,
        head_bytes=0 if tied else HEAD,
        head_values=0 if tied else HEAD,
        lookup_bytes=LOOKUP if lookup else 0,
        lookup_values=LOOKUP if lookup else 0,
        norm_bytes=NORM,
        norm_values=NORM // 4,
        ffn_width=1024,
    )


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


def check_composition(model: ModelShape, plan: Plan) -> None:
    """Compare the lines of weights with the model's own numbers, one kind at a time."""
    everywhere = [x for place in (*plan.devices, plan.host) for x in place.lines]
    found = {
        name: sum(line.bytes for line in everywhere if line.name == name) for name in WEIGHT_LINES
    }
    apart = model.head_bytes == 0 and len(plan.devices) > 1  # a tied head, on another device
    core = sum(layer.core_bytes for layer in model.layers) + NORM
    assert found["core_weights"] == core
    assert found["embeddings"] == EMBED + model.lookup_bytes
    assert found["head"] == model.head_bytes + (EMBED if apart else 0)
    experts = sum(layer.experts * layer.expert_bytes for layer in model.layers)
    assert found["hot_experts"] + found["cold_experts"] == experts
    assert sum(found.values()) == model.weight_bytes + (EMBED if apart else 0)
    # Each device holds what its own layers need, and the layers are shared without gaps.
    ranges = [device.layers for device in plan.devices]
    assert (ranges[0].first, ranges[-1].last) == (0, len(model.layers) - 1)
    assert all(one.last + 1 == other.first for one, other in pairwise(ranges))
    for device in plan.devices:
        own = model.layers[device.layers.first : device.layers.last + 1]
        lines = {line.name: line.bytes for line in device.lines}
        ends = device is plan.devices[-1]
        assert lines["core_weights"] == sum(x.core_bytes for x in own) + (NORM if ends else 0)
        assert ("head" in lines) == (ends and (apart or bool(model.head_bytes)))
        hot = sum(n * x.expert_bytes for n, x in zip(device.hot_by_layer, own, strict=False))
        assert lines.get("hot_experts", 0) == hot


@settings(max_examples=150, deadline=None)
@given(MODELS, MACHINES, st.sampled_from([None, "0%", "40%", "100%"]))
@example(layered((4, 4, 4), True, True), (4.0,), None)
@example(layered((4, 4, 4), True, True), (4.0, 4.0), None)
@example(layered((16, 0, 16), False, True), (0.9, 0), "40%")
@example(layered((16, 0, 16), True, False), (0, 1.2, 1.2), None)
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


def fixed(model: ModelShape, size: int, **more: object) -> Plan:
    """Plan a model with all settings fixed on a CPU with so many bytes."""
    device = replace(cpu(1), total_bytes=size, available_bytes=size)
    given = {"context": 8192, "parallel": 4, "chunk": 512, "cache_tokens": 1 << 18}
    options = Options(weights="packed", **(given | more))  # type: ignore[arg-type]
    return make_plan([model], [device], options)


def test_a_device_of_exactly_the_planned_size_fits_and_one_byte_less_does_not() -> None:
    needed = sum(line.bytes for line in fixed(smollm2(), 64 * GIB).devices[0].lines)
    assert needed > 8 * GIB  # below that the reserve is a share of the device
    assert fixed(smollm2(), needed + 1).devices[0].free_bytes == 1
    assert fixed(smollm2(), needed).devices[0].free_bytes == 0
    with pytest.raises(DoesNotFitError) as refused:
        fixed(smollm2(), needed - 1)
    assert refused.value.plan.devices[0].free_bytes == -1
    assert not refused.value.plan.fits


def test_host_memory_of_exactly_the_planned_size_fits_and_one_byte_less_does_not() -> None:
    options = Options(context=4096, parallel=1, chunk=512, expert_budget="30%")

    def planned(size: int) -> Plan:
        behind = replace(host(1), total_bytes=size, available_bytes=size)
        return make_plan([laguna()], [gpu(24), behind], options)

    needed = sum(line.bytes for line in planned(64 * GIB).host.lines)
    assert planned(needed).host.free_bytes == 0
    with pytest.raises(DoesNotFitError, match="host memory has"):
        planned(needed - 1)


@pytest.mark.parametrize(("cache_tokens", "fits"), [(4097, True), (4033, True), (4032, False)])
def test_a_cache_holds_one_whole_context_in_whole_pages(cache_tokens: int, fits: bool) -> None:
    if fits:
        plan = fixed(smollm2(), 64 * GIB, context=4096, cache_tokens=cache_tokens)
        assert plan.settings.pages == pages_for(cache_tokens) >= 64
    else:
        with pytest.raises(OptionError, match="cannot hold one conversation"):
            fixed(smollm2(), 64 * GIB, context=4096, cache_tokens=cache_tokens)


def test_a_budget_of_exactly_the_fewest_hot_experts_is_taken() -> None:
    model = layered((16, 16, 0), tied=False, lookup=False)
    least = 2 * (3 * MIB + 256) + 2 * (4 * MIB + 256)  # two of each layer with experts

    def planned(budget: int) -> Plan:
        options = Options(weights="packed", context=1024, parallel=1, expert_budget=f"{budget}B")
        return make_plan([model], [gpu(4), host(64)], options)

    assert planned(least).devices[0].hot_by_layer == (2, 2, 0)
    assert planned(least + 3 * MIB + 255).devices[0].hot_by_layer == (2, 2, 0)
    assert planned(least + 3 * MIB + 256).devices[0].hot_by_layer == (3, 2, 0)
    with pytest.raises(PlanError, match="2 hot experts in each of 2 layers need"):
        planned(least - 1)


def test_as_many_devices_as_layers_are_taken_and_one_more_is_refused() -> None:
    model = layered((0, 0, 0), tied=False, lookup=False)
    devices = [gpu(4, f"cuda:{index}") for index in range(4)]
    options = Options(weights="packed", context=1024, parallel=1)
    plan = make_plan([model], [*devices[:3], host(64)], options)
    assert [device.layers for device in plan.devices] == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(PlanError, match="4 devices cannot share 3 layers"):
        make_plan([model], [*devices, host(64)], options)


def test_a_cpu_that_runs_layers_is_the_host_and_no_host_has_no_memory() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options())
    assert (plan.host.total_bytes, plan.host.lines) == (24 * GIB, ())
    beside = make_plan([smollm2()], [gpu(4), cpu(16)], Options(split="1,1"))
    assert (beside.host.total_bytes, beside.host.lines) == (16 * GIB, ())
    behind = make_plan([smollm2()], [gpu(4), host(8)], Options())
    assert behind.host.total_bytes == 8 * GIB
    assert [line.name for line in behind.host.lines] == ["runtime", "reserve"]
