"""What a run took of a device's memory, against the plan's lines; torch stands for a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headroom.bench import resources
from headroom.bench.resources import lift_limit, memory_use, start_counting
from headroom.plan.lines import Line
from headroom.split.pipeline import DeviceMemory

LINES = (
    Line("core_weights", 600, ""),
    Line("kv", 300, ""),
    Line("runtime", 50, ""),
    Line("reserve", 70, ""),
)


def opened(device: str, *others: str, in_workers: bool = False) -> Any:
    stages = [SimpleNamespace(name=name, lines=LINES) for name in (device, *others)]
    memory = [DeviceMemory(stage.name, planned_bytes=900, used_bytes=800) for stage in stages]
    return SimpleNamespace(
        plan=SimpleNamespace(devices=stages),
        pipeline=SimpleNamespace(allocated={"core_weights": 600}, memory=lambda: memory),
        device=device,
        on_gpu=not device.startswith("cpu"),
        in_workers=in_workers,
        torch_device=device.replace("hip", "cuda"),
    )


def plan_on(device: str) -> Any:
    kind = device.partition(":")[0]
    return SimpleNamespace(devices=[SimpleNamespace(name=device, kind=kind)])


@pytest.mark.parametrize("device", ["cuda:1", "hip:1"])
def test_a_gpus_peak_is_held_to_what_torch_allocates(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", {"cuda:1": (1000, 2100)}.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {"cuda:1": 855}.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", {"cuda:1": 880}.__getitem__)
    found = memory_use(opened(device))
    assert found["planned_bytes"] == 900  # neither the driver's own nor what is kept free
    assert found["planned_with_runtime_bytes"] == 950
    assert (found["peak_bytes"], found["peak_reserved_bytes"]) == (855, 880)
    assert found["share"] == pytest.approx(0.95)
    assert found["device_used_bytes"] == 1100
    assert found["lines"] == {"core_weights": 600, "kv": 300, "runtime": 50}


def test_a_cpus_peak_is_the_memory_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"RssAnon": 475, "VmHWM": 2000}
    monkeypatch.setattr(resources, "_status", sizes.__getitem__)
    found = memory_use(opened("cpu"))
    assert (found["planned_bytes"], found["peak_bytes"]) == (950, 475)
    assert found["share"] == pytest.approx(0.5)
    assert found["peak_resident_bytes"] == 2000


def test_stages_on_one_device_are_held_to_its_peak_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resources, "_status", {"RssAnon": 950, "VmHWM": 2000}.__getitem__)
    assert memory_use(opened("cpu", "cpu#2"))["planned_bytes"] == 2 * 950
    assert memory_use(opened("cpu", "cuda:0"))["planned_bytes"] == 950


def test_workers_are_held_to_what_they_have_allocated() -> None:
    found = memory_use(opened("cpu#1", "cpu#2", in_workers=True))
    assert (found["planned_bytes"], found["peak_bytes"]) == (1800, 1600)
    assert found["peak_is"] == "what the workers have allocated"
    assert found["lines"]["kv"] == 600


def test_counting_starts_anew_on_the_device_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append(("init",)))
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda place: calls.append(("reset", place))
    )
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: calls.append(given)
    )
    start_counting(plan_on("cpu"))
    assert calls == []
    start_counting(plan_on("hip:1"))
    lift_limit("cuda:1")
    assert calls == [("init",), ("reset", "cuda:1"), (1.0, "cuda:1")]
