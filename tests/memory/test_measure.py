"""What is measured is sound, kept for this machine, and used by its plans alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from headroom.errors import FormatError
from headroom.memory import targets
from headroom.memory.calibration import Speeds, load_speeds, save_speeds, speeds_path
from headroom.memory.devices import DeviceSpec
from headroom.memory.known import known_shape
from headroom.memory.measure import fastest, measure_cpu
from headroom.memory.plan import make_plan
from headroom.memory.targets import plan_devices
from headroom.options import Options
from headroom.units import MIB
from tests.memory.shapes import cpu, gpu


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
    own = {"cpu": Speeds(2e9, 0.0, 1e11, "2026-11-15"), "cuda:0": Speeds(9e11, 2e10, 1e13, "")}
    save_speeds(speeds_path(tmp_path), own)
    options = Options(home=str(tmp_path), device="rtx3090", ram="64GiB")
    assert [x.measured for x in plan_devices(options)] == [False, False]

    def find(text: str) -> DeviceSpec:
        return replace(gpu(24), name=text)

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
    with pytest.raises(FormatError, match="is not a calibration file: a speed is not positive"):
        load_speeds(path)
