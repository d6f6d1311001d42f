"""make_plan at exact limits: the last byte that fits, the last page, the last hot expert."""

from dataclasses import replace

import pytest

from headroom.errors import OptionError, PlanError
from headroom.options import Options
from headroom.plan.plan import DoesNotFitError, Plan, make_plan
from headroom.plan.settings import pages_for
from headroom.plan.shape import ModelShape
from headroom.units import GIB, MIB
from tests.plan.shapes import cpu, gpu, host, laguna, layered, smollm2


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
    options = Options(
        context=4096,
        parallel=1,
        chunk=512,
        expert_budget="30%",
        expert_policy="static",
        cache_ram="1GiB",
    )

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
