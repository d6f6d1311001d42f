"""What is measured is sound."""

from dataclasses import replace

import pytest
import torch

from headroom.errors import KernelError
from headroom.kernels.native import measure as native_measure
from headroom.machine import measure
from headroom.machine.calibration import (
    Speeds,
)
from headroom.machine.measure import fastest, measure_cpu, measure_cuda
from headroom.units import GIB, MIB
from tests.plan.shapes import cpu, gpu
from tests.stand_in.gpu import stand_in_gpu


def test_a_cpu_reads_and_multiplies_at_a_speed_that_machines_have() -> None:
    speeds = measure_cpu(cpu(8), 16 * MIB)
    assert 1e8 < speeds.bandwidth < 1e13
    assert 1e8 < speeds.flops < 1e15
    assert speeds.link == 0
    assert len(speeds.date) == 10


def test_the_fastest_run_counts() -> None:
    calls: list[int] = []
    assert 0 < fastest(lambda: calls.append(1)) < 0.1
    assert len(calls) > 3


def test_a_gpu_does_no_more_work_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, queue = [0.0], [0.0]  # seconds, and seconds of work that was asked for
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += 1e-6  # to ask for it
        queue[0] += 0.01

    def wait() -> None:
        clock[0] += queue[0]
        queue[0] = 0.0

    assert fastest(work, wait) == pytest.approx(0.01, rel=1e-2)
    assert clock[0] < 0.3


def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small things on a GPU that is not there."""
    for name in ("SAMPLE_BYTES", "LINK_BYTES"):
        monkeypatch.setattr(measure, name, MIB)
    monkeypatch.setattr(measure, "MATRIX", 32)
    # Not every CPU has products in bf16 that torch takes it for.
    monkeypatch.setattr(measure, "_TYPES", {"bf16": torch.float32})
    monkeypatch.setattr(measure, "LEAST_S", 0.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * MIB, 9 * MIB))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(measure, "read_all", lambda data, out: None)
    monkeypatch.setattr(measure, "MODULE", object())
    monkeypatch.setattr(measure, "handover_seconds", lambda device: 7e-6)


@pytest.mark.skipif(measure.MODULE is None, reason="the C++ module was not built")
def test_several_rows_an_expert_are_measured_as_often_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.Tensor] = []
    run = native_measure.experts.experts

    def note(x: torch.Tensor, ids: torch.Tensor, *given: object) -> torch.Tensor:
        asked.append(ids)
        return run(x, ids, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(native_measure.experts, "experts", note)
    assert native_measure.expert_flops() > 1e6
    counts = torch.bincount(asked[0].flatten().long())
    assert counts.tolist() == [8] * native_measure.PROMPT_ROWS
    assert all(len(set(row)) == len(row) for row in asked[0].tolist())


def test_a_gpu_has_its_links_and_its_hand_over_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended(monkeypatch)
    with stand_in_gpu(monkeypatch):
        speeds = measure_cuda(torch.device("cuda", 0))
    assert min(speeds.bandwidth, speeds.link, speeds.flops, speeds.link_read) > 0
    assert speeds.handover_s == 7e-6


def test_what_kernels_cannot_measure_is_reported_and_loses_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: object) -> float:
        raise KernelError("handover.cu does not compile for sm_90.")

    pretended(monkeypatch)
    monkeypatch.setattr(measure, "read_all", refuse)
    with stand_in_gpu(monkeypatch):
        speeds = measure_cuda(torch.device("cuda", 0))
    assert (speeds.link_read, speeds.handover_s) == (0.0, 7e-6)
    assert speeds.link > 0
    assert caplog.messages == [
        "calibrate: reads of host memory are not measured: "
        "handover.cu does not compile for sm_90."
    ]  # fmt: skip


def test_each_measurement_is_told_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(measure, "SAMPLE_BYTES", MIB)
    monkeypatch.setattr(measure, "fastest", lambda *work: 1.0)
    monkeypatch.setattr(measure, "_experts", lambda *sizes: (0.0, 0.0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    measure.measure_machine(lambda *step: told.append(step))
    assert told == [("cpu: memory", 0, 3), ("cpu: arithmetic", 1, 3), ("cpu: experts", 2, 3)]


def test_a_measured_gpu_is_kept_with_what_its_driver_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "detect_gpus", lambda: [replace(gpu(24), product="Card")])
    monkeypatch.setattr(measure, "measure_cpu", lambda cpu, steps: Speeds(1.0, 0.0, 1.0, ""))
    monkeypatch.setattr(measure, "measure_cuda", lambda device, steps: Speeds(2.0, 1.0, 1.0, ""))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = measure.measure_machine()
    assert found["cuda:0"] == Speeds(2.0, 1.0, 1.0, "", product="Card", total_bytes=24 * GIB)
    assert found["cuda:1"] == Speeds(2.0, 1.0, 1.0, "")  # the driver lists none of that number
