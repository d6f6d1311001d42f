"""`headroom plan`: tables, JSON, and what happens when it does not fit."""

import json
from pathlib import Path

import pytest

from headroom.cli.main import run_command
from headroom.memory.devices import DeviceSpec
from headroom.options import Options
from headroom.units import MIB


def small_machine(options: Options) -> list[DeviceSpec]:
    size = 64 * MIB
    return [DeviceSpec(name="cpu", kind="cpu", total_bytes=size, available_bytes=size, cores=2)]


def test_people_see_every_line_of_the_plan(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", str(smollm2_path), "--context", "2048", "--parallel", "2"]) == 0
    shown = capsys.readouterr().out
    assert "context 2048, parallel 2" in shown
    assert [
        word for word in ("core_weights", "embeddings", "kv", "free") if word not in shown
    ] == []


def test_json_is_one_object_that_adds_up(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", str(smollm2_path), "--kv-type", "q8_0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["version"], report["fits"]) == (1, True)
    assert report["settings"]["k_type"] == report["settings"]["v_type"] == "q8_0"
    for device in report["devices"]:
        taken = sum(line["bytes"] for line in device["lines"])
        assert taken + device["free_bytes"] == device["total_bytes"]


def test_a_model_that_does_not_fit_gives_the_table_the_reason_and_3(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headroom.cli.plan.plan_devices", small_machine)
    assert run_command(["plan", str(smollm2_path), "--json"]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["fits"] is False
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1


def test_a_terminal_gets_colours_and_a_pipe_does_not(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR")
    assert run_command(["plan", str(smollm2_path)]) == 0
    assert "\x1b[" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run_command(["plan", str(smollm2_path)]) == 0
    assert "\x1b[" in capsys.readouterr().out


def test_a_plan_may_be_for_a_machine_that_is_not_at_hand(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(smollm2_path), "--device", "24GiB", "--ram", "64GiB", "--json"]
    assert run_command(line) == 0
    report = json.loads(capsys.readouterr().out)
    assert [device["total_bytes"] for device in report["devices"]] == [24 * 1024 * MIB]
    assert report["host"]["total_bytes"] == 64 * 1024 * MIB
