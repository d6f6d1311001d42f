"""`headroom doctor`: what it finds on a machine."""

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from headroom.cli.doctor import calibration, cpu, installed, kernels, models, readable, versions
from headroom.cli.main import run_command
from headroom.machine.calibration import Speeds, save_speeds, speeds_path
from headroom.options import Options
from headroom.units import GIB
from tests.plan.shapes import gpu

UNMEASURED = {"path": "", "measured": {}, "problem": ""}
CODE = {"folder": "/home/me/kernels", "bytes": 3 << 20}


def test_json_has_every_section(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command(["doctor", "--json", "--home", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    sections = {"versions", "cpu", "devices", "gpus", "calibration", "kernels", "models"}
    assert set(report) == sections | {"no_gpus_because"}
    assert report["versions"]["python"] == platform.python_version()
    assert report["devices"][0]["name"] == "cpu"
    assert 0 < report["devices"][0]["available_bytes"] <= report["devices"][0]["total_bytes"]
    assert report["models"] == {"home": str(tmp_path), "default_model": None}
    assert report["kernels"]["code"] == {"folder": str(tmp_path / "kernels"), "bytes": 0}


def test_a_named_model_is_described_by_its_files(
    tiny_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["doctor", str(tiny_path), "--home", str(tmp_path)]
    assert run_command([*command, "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["architecture"] == "llama"
    assert model["sampling"] == {
        "temperature": 0.2,
        "top_k": 40,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    }
    assert (model["chat_template"], model["reasoning"]) == (True, {"supported": False})
    assert "<|end|>" in model["stop_tokens"]
    assert run_command(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "top_p 0.9, repetition_penalty 1.1 (headroom's own for models below 1B" in shown


def test_people_read_what_is_missing_and_how_to_get_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command(["doctor", "--home", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "missing; headroom pull gets it" in shown
    assert "computes in f32 (CPUs compute in f32, and multiply packed weights in int24)" in shown


def test_a_missing_package_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headroom.cli.doctor.installed", lambda name: None if name == "uvicorn" else "1.0"
    )
    found = versions()
    assert found["packages"]["uvicorn"] is None
    assert found["missing_extras"] == ["server"]
    report = {"versions": found, "cpu": cpu(), "devices": [], "gpus": [], "calibration": UNMEASURED}
    report["models"] = models(Options())
    unbuilt = {
        "operations": {"native": []},
        "native": {"missing": "It was not built"},
        "code": CODE,
    }
    told = readable({**report, "kernels": unbuilt})
    assert told["versions"]["uvicorn"] == "not installed"
    assert told["versions"]["extra server"] == "incomplete; pip install 'headroom[server]'"
    slow = "It was not built; products run on the slow reference kernels"
    assert told["kernels"]["C++ module"] == slow


def test_people_read_what_the_cpp_kernels_run_on() -> None:
    report = {"versions": versions(), "cpu": cpu(), "devices": [], "gpus": []}
    report["calibration"] = UNMEASURED
    report["models"] = models(Options())
    for pinned, told in ((False, ""), (True, ", each pinned to a core")):
        native = {"isa": "amx", "threads": 2, "pinned": pinned}
        kernels = {"operations": {}, "native": native, "code": CODE}
        shown = readable({**report, "kernels": kernels})
        text = f"built; runs amx instructions here on 2 threads{told}"
        assert shown["kernels"]["C++ module"] == text
        kept = "3.0 MiB of GPU kernels kept in /home/me/kernels"
        assert shown["kernels"]["compiled code"] == kept


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert installed("a-package-that-is-not-there") is None
    assert installed("torch") is not None


def test_the_processor_is_read_from_what_linux_says(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name : Fast One\nflags : fpu avx2 avx512_vnni sse\n")
    found = cpu(info)
    assert found["model"] == "Fast One"
    assert found["instruction_sets"] == ["avx2", "avx512_vnni"]
    assert cpu(tmp_path / "none")["instruction_sets"] == []


def test_every_operation_has_a_reference_kernel() -> None:
    found = kernels(Options())["operations"]
    assert set(found) == {"cuda", "triton", "native", "reference"}
    assert {"matmul", "attention", "rms_norm", "rope"} <= set(found["reference"])
    assert all(set(ops) <= set(found["reference"]) for ops in found.values())


def test_people_read_when_each_device_was_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command(["doctor", "--home", str(tmp_path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "not measured: speeds are estimates; headroom calibrate measures them once" in told
    save_speeds(speeds_path(tmp_path), {"cpu": Speeds(2e9, 0.0, 1e11, "2026-11-15")})
    found = calibration(tmp_path, ["cpu", "cuda:0"])
    assert found["measured"] == {"cpu": "2026-11-15", "cuda:0": None}
    assert run_command(["doctor", "--home", str(tmp_path)]) == 0
    assert "measured 2026-11-15, kept in" in " ".join(capsys.readouterr().out.split())


def test_a_corrupt_calibration_is_reported_and_stops_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = speeds_path(tmp_path)
    path.parent.mkdir()
    path.write_text('{"version": 1, "devices": 3}')
    assert run_command(["doctor", "--json", "--home", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["calibration"]["problem"] == (
        f"{path} is not a calibration file: it lists no devices. "
        "Run headroom calibrate, which writes it anew."
    )
    assert report["calibration"]["measured"]["cpu"] is None
    shown = readable(report)["calibration"]
    assert shown == {"file": report["calibration"]["problem"]}


def test_a_card_that_was_not_measured_has_no_date(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = Speeds(2e9, 0.0, 1e11, "2026-11-15", product="Old Card", total_bytes=24 * GIB)
    save_speeds(speeds_path(tmp_path), {"cuda:0": kept})
    for product, date in (("Old Card", "2026-11-15"), ("New Card", None)):
        card = replace(gpu(24), product=product)
        monkeypatch.setattr("headroom.cli.doctor.detect_gpus", lambda card=card: [card])
        assert calibration(tmp_path, ["cuda:0"])["measured"] == {"cuda:0": date}
