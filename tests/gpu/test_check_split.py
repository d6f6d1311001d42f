"""check_split without a GPU: what its rows say, and a rehearsal with models of a few layers."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import check_split
from tests.gpu.check_split import CASES, main

Told = dict[str, Any]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Told]], list[str]]:
    """Let cases find these figures; returns the names of the cases that are run."""

    def tell(figures: dict[str, Told]) -> list[str]:
        ran: list[str] = []

        def child(arguments: Sequence[str], seconds: float) -> str:
            if "--case" not in arguments:
                return ""
            name = arguments[list(arguments).index("--case") + 1]
            ran.append(name)
            if name not in figures:
                raise subprocess.CalledProcessError(1, ["python"], stderr="out of memory")
            usual = {"together": 1.0, "prompt": 1.0, "predicted": 1.0, "estimate": False}
            return "a log line\n" + json.dumps(usual | figures[name])

        monkeypatch.setattr(check_split, "child", child)
        monkeypatch.setattr(check_split, "synth", lambda family, path, *more: path)
        return ran

    return tell


def decodes(**changed: float) -> dict[str, Told]:
    found: dict[str, Told] = {case.name: {"decode": 100.0, "predicted": 110.0} for case in CASES}
    for name, speed in changed.items():
        found[name]["decode"] = speed
    return found


def test_fast_stages_pass(
    told: Callable[[dict[str, Told]], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = told(decodes(**{"27b, two stages": 95.5}))
    assert main(["--folder", str(tmp_path)]) == 0
    assert ran == [case.name for case in CASES]
    table = capsys.readouterr().out.rsplit("\n\n", 1)[1]
    assert "PASS 95.5 % of 27b, wanted 95 %" in table
    assert "PASS predicted 110.00, 110.0 % of it, wanted 85 to 115 %" in table
    assert "PASS 100.0 % of 35b, 60 % hot, wanted 93 %" in table


@pytest.mark.parametrize(
    ("name", "speed", "note"),
    [
        ("27b, two stages", 94.9, "94.9 % of 27b"),
        ("35b, 60 % hot, two stages", 92.0, "92.0 % of 35b, 60 % hot"),
        ("27b, 8 layers on the CPU", 95.0, "115.8 % of it"),
        ("27b, 8 layers on the CPU", 130.0, "84.6 % of it"),
    ],
)
def test_slow_stages_fail(
    name: str,
    speed: float,
    note: str,
    told: Callable[[dict[str, Told]], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told(decodes(**{name: speed}))
    assert main(["--folder", str(tmp_path)]) == 1
    (line,) = (x for x in capsys.readouterr().out.rsplit("\n\n", 1)[1].splitlines() if "FAIL" in x)
    assert line.startswith(name)
    assert note in line


def test_a_case_that_fails_is_told_and_the_others_go_on(
    told: Callable[[dict[str, Told]], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = decodes()
    del figures["27b"]
    ran = told(figures)
    assert main(["--folder", str(tmp_path), "--only", "27b"]) == 1
    assert len(ran) == sum(case.model == "27b" for case in CASES)
    table = capsys.readouterr().out
    assert "FAIL out of memory" in table
    assert "FAIL nothing to compare with: no 27b" in table


def test_cases_that_the_time_does_not_suffice_for_are_told(
    told: Callable[[dict[str, Told]], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = told(decodes())
    assert main(["--folder", str(tmp_path), "--seconds", "0"]) == 0
    assert ran == []
    assert capsys.readouterr().out.count("LEFT OUT") == len(CASES)


@pytest.mark.slow
def test_a_rehearsal_on_a_cpu_fills_the_whole_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--folder", str(tmp_path), "--tiny", "--device", "cpu"]) == 0
    rows = capsys.readouterr().out.rsplit("\n\n", 1)[1].splitlines()[1:]
    assert len(rows) == len(CASES)
    for row, case in zip(rows, CASES, strict=True):
        assert row.startswith(case.name)
        assert all(float(speed) > 0 for speed in row.removeprefix(case.name).split()[:3])
