"""`headroom calibrate`: measured once, then used by every plan of this machine."""

import json
from pathlib import Path

import pytest

from headroom.cli.main import run_command
from headroom.machine import measure
from headroom.machine.calibration import Speeds, load_speeds, speeds_path


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {
        "cpu": Speeds(2e10, 0.0, 1e11, "2026-11-15", experts=1.5e10, expert_flops=8e10),
        "cuda:0": Speeds(9e11, 2.5e10, 7e13, "2026-11-15"),
    }
    monkeypatch.setattr(measure, "measure_machine", lambda report: speeds)


def test_people_see_what_was_measured_and_where_it_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["calibrate", "--home", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cpu: memory 20.0 GB/s, experts 15.0 GB/s, of 8 rows each 80 GFLOP/s, "
        "arithmetic 0.10 TFLOP/s",
        "cuda:0: memory 900.0 GB/s, link 25.0 GB/s, arithmetic 70.00 TFLOP/s",
        f"kept in {speeds_path(tmp_path)}",
    ]
    assert load_speeds(speeds_path(tmp_path))["cpu"].bandwidth == 2e10


def test_a_plan_after_it_is_no_longer_an_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "smollm2-135m:q4_1", "--json", "--home", str(tmp_path)]
    assert run_command(line) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["estimate"] is True
    assert run_command(["calibrate", "--json", "--home", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"]["cuda:0"]["link"] == 2.5e10
    assert run_command(line) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["estimate"] is False
