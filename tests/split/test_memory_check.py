"""What was allocated is compared with the plan, line by line."""

import logging
from types import SimpleNamespace

import pytest
import torch

from headroom.options import Options
from headroom.plan.plan import Plan, make_plan
from headroom.split.memory_check import (
    check_memory,
    held_already,
    limit_memory,
    open_device_memory,
    warn_above,
)
from headroom.units import GIB, gib
from tests.plan.shapes import cpu, gpu, host, smollm2


def plan_for_a_cpu() -> Plan:
    options = Options(context=512, parallel=1, chunk=64)
    return make_plan([smollm2()], [cpu(8)], options)


def test_what_was_planned_and_allocated_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plan = plan_for_a_cpu()
    check_memory(plan, plan.devices[0], plan.devices[0].allocated)
    total = gib(sum(plan.devices[0].allocated.values()))
    assert caplog.messages == [f"memory: planned {total}, allocated {total}"]


def test_a_line_above_its_plan_is_a_warning_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_for_a_cpu()
    allocated = plan.devices[0].allocated
    logits = allocated["logits"]
    check_memory(plan, plan.devices[0], allocated | {"logits": logits + 4, "strange": 7})
    assert caplog.messages == [
        f"memory: logits takes {logits + 4} bytes, planned were {logits}",
        "memory: strange takes 7 bytes, planned were 0",
    ]


def test_a_gpus_peak_is_held_against_its_lines_and_those_of_its_libraries(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    plan = make_plan([smollm2()], [gpu(8), host(8)], Options(context=512, parallel=1, chunk=64))
    graphs = next(line.bytes for line in plan.devices[0].lines if line.name == "graphs")
    most = sum(plan.devices[0].allocated.values()) + graphs
    for peak, level in ((most, "INFO"), (most + 1, "WARNING")):
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device, peak=peak: peak)
        check_memory(plan, plan.devices[0], plan.devices[0].allocated)
        assert caplog.records[-1].levelname == level


def test_a_peak_counts_without_what_other_models_hold(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    plan = make_plan([smollm2()], [gpu(8), host(8)], Options(context=512, parallel=1, chunk=64))
    graphs = next(line.bytes for line in plan.devices[0].lines if line.name == "graphs")
    most = sum(plan.devices[0].allocated.values()) + graphs
    reset: list[str] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * GIB + most)
    others = held_already("cuda:0")
    assert (others, reset) == (2 * GIB, ["cuda:0"])
    assert held_already("cpu") == 0
    check_memory(plan, plan.devices[0], plan.devices[0].allocated, others)
    assert caplog.records[-1].levelname == "INFO"
    check_memory(plan, plan.devices[0], plan.devices[0].allocated, others - 1)
    assert caplog.records[-1].levelname == "WARNING"


def test_a_peak_is_reported_in_readable_sizes(caplog: pytest.LogCaptureFixture) -> None:
    warn_above("cuda:0", 3 * GIB, 2 * GIB)
    assert caplog.messages == ["memory: cuda:0 has held 3.00 GiB, planned were 2.00 GiB"]


SET_NEWER, SET_OLDER = "_accelerator_setAllocatorSettings", "_set_allocator_settings"


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch._C, SET_NEWER, given.append, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    open_device_memory("cpu")
    assert given == []
    open_device_memory("cuda:0")
    assert given == ["expandable_segments:True"]
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    open_device_memory("cuda:0")
    assert len(given) == 1


def test_an_older_torch_is_reported_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.delattr(torch._C, SET_NEWER, raising=False)
    monkeypatch.setattr(torch.cuda.memory, SET_OLDER, given.append)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    open_device_memory("cuda:0")
    assert given == ["expandable_segments:True"]


def test_an_engine_that_may_take_a_part_of_a_gpu_is_stopped_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    told: list[tuple[float, str]] = []
    properties = SimpleNamespace(total_memory=32 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: told.append(given)
    )
    plan = make_plan([smollm2()], [gpu(8), host(8)], Options(context=512, parallel=1, chunk=64))
    limit_memory(plan, None)
    limit_memory(plan_for_a_cpu(), "8GiB")
    assert told == []
    limit_memory(plan, "8GiB")
    name = plan.devices[0].name
    runtime = next(line.bytes for line in plan.devices[0].lines if line.name == "runtime")
    assert told == [((8 * GIB - runtime) / (32 * GIB), name)]
    assert caplog.messages == [f"memory: torch may take {gib(8 * GIB - runtime)} of {name}"]
    limit_memory(plan, "64GiB")
    assert told[-1] == (1.0, name)
