"""Plans that leave cold experts out: nothing is held for them, and that is told."""

import pytest

from headroom.errors import PlanError
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import Plan, make_plan
from tests.plan.shapes import cpu, gpu, host, laguna

MODEL = known_shape("qwen3.6-35b-a3b:q4_k_m")
LOSSY = "cold experts are left out, and the weights of a row's hot ones grow instead"
COLD_LINES = {"cold_experts", "expert_spare", "expert_staging"}


def planned(ram: float = 6, **asked: object) -> Plan:
    options = Options(context=4096, parallel=1, **asked)  # type: ignore[arg-type]
    return make_plan([MODEL], [gpu(12), host(ram)], options)


def names(plan: Plan) -> set[str]:
    return {line.name for line in (*plan.devices[0].lines, *plan.host.lines)}


def test_dropped_experts_take_no_host_memory_and_no_buffers() -> None:
    plan = planned(cold="drop")
    device = plan.devices[0]
    assert 0 < device.hot_experts < device.total_experts
    assert not names(plan) & COLD_LINES
    assert plan.lossy == (LOSSY,)
    assert plan.cold_speeds is not None
    with pytest.raises(PlanError, match=r"host memory has 6\.00 GiB .* cold_experts, "):
        planned(cold="auto")


def test_with_a_host_copy_dropped_experts_are_held_and_may_become_hot() -> None:
    with pytest.raises(PlanError, match=r"host memory has 6\.00 GiB .* copies of the hot ones"):
        planned(cold="drop", keep_host_copy=True)
    plan = planned(64, cold="drop", keep_host_copy=True)
    assert names(plan) >= COLD_LINES
    assert plan.lossy == (LOSSY,)


def test_dropped_experts_need_no_pinned_buffers() -> None:
    def spare(**asked: object) -> int:
        plan = planned(64, keep_host_copy=True, no_pin=True, **asked)
        return next(line.bytes for line in plan.host.lines if line.name == "expert_spare")

    assert spare(cold="auto") - spare(cold="drop") > 100 << 20


def test_no_buffers_leave_room_for_more_hot_experts() -> None:
    dropped, held = (planned(64, cold=cold, chunk=512) for cold in ("drop", "auto"))
    assert dropped.devices[0].hot_experts > held.devices[0].hot_experts


def test_all_experts_left_out_is_reported_as_all_cold() -> None:
    nothing = planned(cold="drop", expert_budget="0%")
    assert nothing.devices[0].hot_experts == 0
    assert nothing.lossy == (LOSSY,)
    options = Options(context=512, parallel=1, chunk=16, cold="drop")
    tight = make_plan([MODEL], [gpu(2.4), host(6)], options)
    assert tight.devices[0].hot_experts == 0
    assert any(note.startswith("all experts are cold: ") for note in tight.notes)


def test_layers_over_two_gpus_drop_experts_without_buffers_as_well() -> None:
    devices = [gpu(8), gpu(8, name="cuda:1"), host(6)]
    plan = make_plan([MODEL], devices, Options(context=4096, parallel=1, cold="drop"))
    lines = {line.name for device in plan.devices for line in device.lines}
    assert not lines & COLD_LINES
    assert plan.lossy == (LOSSY,)


def test_where_all_are_hot_nothing_is_left_out() -> None:
    for devices in ([gpu(48), host(6)], [cpu(64)]):
        plan = make_plan([laguna()], devices, Options(context=4096, parallel=1, cold="drop"))
        assert plan.lossy == ()
