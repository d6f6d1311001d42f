"""What is measured is sound, kept for this machine, and used by its plans alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headroom.errors import FormatError, KernelError
from headroom.kernels.native import measure as native_measure
from headroom.machine import measure, targets
from headroom.machine.calibration import (
    Speeds,
    load_speeds,
    save_speeds,
    speeds_path,
    with_speeds,
)
from headroom.machine.devices import DeviceSpec
from headroom.machine.measure import fastest, measure_cpu, measure_cuda
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import make_plan
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


def test_a_measured_machine_no_longer_estimates(tmp_path: Path) -> None:
    options = Options(home=str(tmp_path), ram="8GiB")
    model = known_shape("smollm2-135m:q4_1")
    assert make_plan([model], plan_devices(options), options).predicted.estimate
    save_speeds(speeds_path(tmp_path), {"cpu": Speeds(2e9, 0.0, 1e11, "2026-11-15")})
    plan = make_plan([model], plan_devices(options), options)
    assert not plan.predicted.estimate
    slower = plan.predicted.decode_tokens_per_s
    save_speeds(speeds_path(tmp_path), {"cpu": Speeds(4e9, 0.0, 1e11, "2026-11-15")})
    faster = make_plan([model], plan_devices(options), options).predicted.decode_tokens_per_s
    assert faster == pytest.approx(2 * slower)


def test_another_machine_is_not_given_this_ones_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Speeds(9e11, 2e10, 1e13, "", product="Card", total_bytes=24 * GIB)
    own = {"cpu": Speeds(2e9, 0.0, 1e11, "2026-11-15"), "cuda:0": card}
    save_speeds(speeds_path(tmp_path), own)
    options = Options(home=str(tmp_path), device="rtx3090", ram="64GiB")
    assert [x.measured for x in plan_devices(options)] == [False, False]

    def find(text: str) -> DeviceSpec:
        return replace(gpu(24), name=text, product="Card")

    monkeypatch.setattr(targets, "parse_device", find)
    here = plan_devices(replace(options, device="cuda:0"))
    assert [(x.measured, x.bandwidth, x.link) for x in here] == [
        (True, 9e11, 2e10), (True, 2e9, 0.0),
    ]  # fmt: skip
    half = plan_devices(replace(options, device="cuda:1"))
    assert [x.measured for x in half] == [False, True]
    laguna = known_shape("laguna-xs.2")
    assert not make_plan([laguna], here, options).predicted.estimate
    assert make_plan([laguna], half, options).predicted.estimate


def test_speeds_of_cold_experts_need_a_measured_host() -> None:
    fast = replace(gpu(12), measured=True)
    behind = replace(cpu(64), name="host", runs_layers=False)
    laguna = known_shape("laguna-xs.2")
    assert make_plan([laguna], [fast, behind], Options()).predicted.estimate
    measured = replace(behind, measured=True)
    assert not make_plan([laguna], [fast, measured], Options()).predicted.estimate


def test_speeds_that_are_not_positive_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    save_speeds(path, {"cpu": Speeds(0.0, 0.0, 1e11, "2026-11-15")})
    with pytest.raises(FormatError, match=r"bandwidth of cpu is 0\.0; it must be positive"):
        load_speeds(path)


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


def test_speeds_for_cold_experts_are_saved(tmp_path: Path) -> None:
    path = speeds_path(tmp_path)
    kept = {
        "cpu": Speeds(1e11, 0.0, 1e12, "2026-11-15", experts=7e10, expert_flops=5e11),
        "cuda:0": Speeds(
            4e12,
            5e10,
            7e14,
            "2026-11-15",
            link_read=4e10,
            handover_s=8e-6,
            product="NVIDIA H200",
            total_bytes=140 * GIB,
        ),
    }
    save_speeds(path, kept)
    assert load_speeds(path) == kept


OLD = Speeds(9e11, 2e10, 1e13, "", product="Old Card", total_bytes=12 * GIB)


@pytest.mark.parametrize(
    ("row", "device", "told"),
    [
        (OLD, replace(gpu(24), product="New Card"),
         "they are of Old Card with 12.00 GiB, and it is New Card with 24.00 GiB"),
        (OLD, replace(gpu(24), product="Old Card"),
         "they are of Old Card with 12.00 GiB, and it is Old Card with 24.00 GiB"),
        (Speeds(9e11, 2e10, 1e13, ""), replace(gpu(12), product="Old Card"),
         "they are of a GPU without a name, and it is Old Card with 12.00 GiB"),
    ],
)  # fmt: skip
def test_speeds_of_another_card_are_not_used_and_that_is_reported(
    row: Speeds, device: DeviceSpec, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    (found,) = with_speeds([device], {"cuda:0": row})
    assert found == device
    assert caplog.messages == [
        f"calibration: speeds of cuda:0 are not used, since {told}: run headroom calibrate"
    ]


def test_a_card_of_which_a_part_may_be_taken_keeps_its_speeds() -> None:
    part = replace(gpu(6), product="Old Card", card_bytes=12 * GIB)
    (found,) = with_speeds([part], {"cuda:0": OLD})
    assert (found.measured, found.bandwidth) == (True, 9e11)


def test_a_link_that_was_not_measured_is_the_listed_one() -> None:
    card = replace(gpu(12), product="Old Card")
    (found,) = with_speeds([card], {"cuda:0": replace(OLD, link=0.0)})
    assert found.measured
    assert found.link == card.link > 0


def test_speeds_of_another_version_are_not_used_and_that_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "speeds.json"
    path.write_text('{"version": 2, "devices": [1]}')
    assert load_speeds(path) == {}
    assert caplog.messages == [
        f"calibration: speeds are not used, since {path} has version 2 and not 1: run headroom "
        "calibrate"
    ]


def test_a_measured_gpu_is_kept_with_what_its_driver_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "detect_gpus", lambda: [replace(gpu(24), product="Card")])
    monkeypatch.setattr(measure, "measure_cpu", lambda cpu: Speeds(1.0, 0.0, 1.0, ""))
    monkeypatch.setattr(measure, "measure_cuda", lambda device: Speeds(2.0, 1.0, 1.0, ""))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = measure.measure_machine()
    assert found["cuda:0"] == Speeds(2.0, 1.0, 1.0, "", product="Card", total_bytes=24 * GIB)
    assert found["cuda:1"] == Speeds(2.0, 1.0, 1.0, "")  # the driver lists none of that number
