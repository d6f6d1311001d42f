"""Measured speeds are kept for this machine and used by its plans alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from headroom.errors import FormatError
from headroom.machine import targets
from headroom.machine.calibration import (
    Speeds,
    load_speeds,
    read_speeds,
    save_speeds,
    speeds_path,
    with_speeds,
)
from headroom.machine.devices import DeviceSpec
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import make_plan
from headroom.units import GIB
from tests.plan.shapes import cpu, gpu, smollm2


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
        read_speeds(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 2}', "[" * 10_000])
def test_a_broken_file_is_ignored_with_a_warning_and_written_anew(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = speeds_path(tmp_path)
    path.parent.mkdir()
    path.write_text(text)
    assert load_speeds(path) == {}
    assert len(caplog.messages) == 1
    assert str(path) in caplog.messages[0]
    assert "Run headroom calibrate, which writes it anew." in caplog.messages[0]
    speeds = {"cpu": Speeds(1e10, 0.0, 1e11, "2026-11-15")}
    save_speeds(path, speeds)
    assert load_speeds(path) == speeds
    assert len(caplog.messages) == 1


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
        f"calibration: speeds are not used: {path} has version 2 and not 1. Run headroom "
        "calibrate, which writes it anew."
    ]


def test_measured_speeds_replace_listed_ones_and_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "speeds.json"
    assert load_speeds(path) == {}
    save_speeds(path, {"cpu": Speeds(1e9, 0.0, 1e12, "2026-11-15")})
    devices = with_speeds([cpu(24), gpu(24)], load_speeds(path))
    assert [device.measured for device in devices] == [True, False]
    plan = make_plan([smollm2()], devices[:1], Options(context=256, parallel=1))
    assert not plan.predicted.estimate
    assert plan.predicted.decode_tokens_per_s == pytest.approx(1e9 / 543_959_040, rel=1e-2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("3", "it has no version"),
        ("[]", "it has no version"),
        ('{"version": "1", "devices": {}}', "it has no version"),
        ('{"version": 1}', "it lists no devices"),
        ('{"version": 1, "devices": 3}', "it lists no devices"),
        ('{"version": 1, "devices": {"cpu": 3}}', "cpu has no speeds"),
        ('{"version": 1, "devices": {"cpu": {"speed": 1}}}', "cpu has 'speed', which is not known"),
        (
            '{"version": 1, "devices": {"cpu": {"bandwidth": "1"}}}',
            "bandwidth of cpu is not a number",
        ),
        (
            '{"version": 1, "devices": {"cpu": {"bandwidth": NaN}}}',
            "bandwidth of cpu is nan; it must be positive",
        ),
        (
            '{"version": 1, "devices": {"cpu": {"bandwidth": 1}}}',
            "flops of cpu is 0.0; it must be positive",
        ),
        ('{"version": 1, "devices": {"cpu": {"bandwidth": 1, "flops": 1}}}', "cpu has no date"),
    ],
)
def test_a_broken_calibration_file_is_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(text)
    with pytest.raises(FormatError) as refused:
        read_speeds(path)
    assert str(refused.value) == (
        f"{path} is not a calibration file: {told}. Run headroom calibrate, which writes it anew."
    )
