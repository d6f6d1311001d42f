"""check_memory without a GPU: what it runs, and what its exit says."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headroom.options import Options
from headroom.plan.plan import make_plan
from tests.gpu import check_memory
from tests.gpu.check_memory import Load, main, torch_bytes, verdict
from tests.plan.shapes import gpu, host, laguna


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The processes that are asked for; one whose card is of 1GiB fails."""
    seen: list[list[str]] = []

    def child(command: list[str], check: bool) -> Any:
        seen.append(command[3:])
        return SimpleNamespace(returncode=int("1GiB" in command))

    monkeypatch.setattr(subprocess, "run", child)
    monkeypatch.setattr(check_memory, "synth", lambda family, path, *more: path)
    return seen


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check_memory", "--folder", str(folder), *words])
    return main()


def value(command: list[str], word: str) -> str:
    return command[command.index(word) + 1]


def test_small_cards_run_the_whole_model_at_both_contexts(
    children: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(monkeypatch, tmp_path, "--card", "12GiB", "--card", "8GiB") == 0
    found = [(x[0], value(x, "--card"), value(x, "--context"), "--full" in x) for x in children]
    assert found == [
        ("35b", card, context, True) for card in ("12GiB", "8GiB") for context in ("8192", "131072")
    ]


def test_without_a_card_few_layers_of_every_model_run(
    children: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(monkeypatch, tmp_path) == 0
    assert [x[0] for x in children] == ["27b", "27b", "35b", "35b"]
    assert not any("--full" in x or "--card" in x for x in children)


def test_a_failure_is_reported_by_the_exit(
    children: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, tmp_path, "--card", "1GiB", "--card", "8GiB") == 1
    assert len(children) == 4  # the others run nevertheless
    assert "FAIL 35b 8192: exit status 1" in capsys.readouterr().out
    assert verdict("peak", True, 1.0)
    assert not verdict("peak", False, 1.1)


def test_a_load_on_a_card_is_planned_with_the_memory_of_the_card() -> None:
    assert Load(8192, card="12GiB").settings["device_memory"] == "12GiB"
    assert "device_memory" not in Load(8192).settings
    assert Load(8192, 512, 4).settings["cache_tokens"] == 8192 + 4096


def test_torch_takes_all_lines_but_the_drivers_and_what_is_kept_free() -> None:
    device = make_plan([laguna()], [gpu(24), host(64)], Options(context=8192)).devices[0]
    lines = {line.name: line.bytes for line in device.lines}
    assert lines["graphs"] > 0
    assert torch_bytes(device) == sum(lines.values()) - lines["runtime"] - lines["reserve"]
