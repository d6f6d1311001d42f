"""`headroom plan` reads the files about experts that it is given, as a run does."""

import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headroom.cli.main import run_command
from headroom.experts.placement import ExpertPlacement, save_placement
from headroom.families.files import open_checkpoint
from headroom.formats import checkpoint, hub
from headroom.plan import sources
from tests.synth_models import MODELS, write_model

CARD = ("--device", "2GiB", "--expert-budget", "50%")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3moe", "q8_0", tmp_path_factory.mktemp("m"))


def placed(path: Path, folder: Path, hot: int, identity: str = "") -> Path:
    kept, layers = folder / "placement.json", MODELS["qwen3moe"].dims.layers
    placement = ExpertPlacement((tuple(range(hot)),) * layers, "even")
    save_placement(kept, placement, identity or open_checkpoint(path).identity)
    return kept


def refused(capsys: pytest.CaptureFixture[str], *line: object) -> str:
    assert run_command(["plan", *map(str, line)]) != 0
    return capsys.readouterr().err


@pytest.mark.parametrize("devices", [CARD, ("--device", "2GiB,2GiB"), ("--device", "cpu")])
def test_a_placement_of_another_model_is_refused(
    path: Path, tmp_path: Path, devices: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = placed(path, tmp_path, 2, "other")
    assert "is of another model (other, not " in refused(
        capsys, path, *devices, "--placement", kept
    )


def test_a_placement_that_the_plan_does_not_hold_is_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = MODELS["qwen3moe"].dims.experts
    line = ["plan", str(path), *CARD, "--placement"]
    assert run_command([*line, str(placed(path, tmp_path, experts // 2))]) == 0
    capsys.readouterr()
    assert run_command([*line, str(placed(path, tmp_path, experts))]) == 3
    assert " and the plan has " in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--placement", "--routing-stats"])
def test_corrupt_files_are_refused(
    path: Path, tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": 1, "mod')
    what = "placement" if flag == "--placement" else "statistics"
    told = refused(capsys, path, *CARD, flag, broken)
    assert f"{broken} is not a " in told
    assert what in told


def test_files_are_not_read_where_there_is_only_a_name_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "qwen3.6-35b-a3b:q4_k_m", "--device", "12GiB", "--ram", "64GiB", "--json"]
    assert run_command([*line, "--placement", "missing.json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["fits"]
    told = "plan: not read, since there are no weights to compare with: missing.json"
    assert told in captured.err


def test_a_plan_for_a_cpu_names_the_options_that_do_nothing_there(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", str(path), "--device", "cpu", "--cold", "drop"]) == 0
    assert "since the model runs on the CPU, which has no cold experts: --cold\n" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--swap-every", "often", "--swap-every is 'often'. Write a number of tokens"),
        ("--swap-bytes", "much", "--swap-bytes is 'much', which is not a size"),
        ("--save-placement", "nowhere/x.json", "is in a folder that does not exist"),
    ],
)
def test_what_a_run_refuses_about_exchanges_a_plan_refuses_too(
    flag: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, "qwen3.6-35b-a3b:q4_k_m", *CARD, flag, value)


def test_compared_plans_say_that_they_read_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "qwen3.6-35b-a3b:q4_k_m", "--ram", "64GiB", "--compare", "12GiB,24GiB"]
    assert run_command([*line, "--placement", "p.json", "--routing-stats", "s.json"]) == 0
    assert "plan: not read, since plans are compared: p.json and s.json" in capsys.readouterr().err


def test_compared_plans_name_the_options_that_do_nothing_in_a_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["plan", "qwen3.6-35b-a3b:q4_k_m", "--ram", "64GiB", "--compare", "cpu,12GiB"]
    assert run_command([*line, "--cold", "drop"]) == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert told.endswith(
        "experts: without effect in column cpu, since the model runs on the CPU, which has no cold "
        "experts: --cold"
    )


@pytest.mark.parametrize("more", ["nothing", "--emit", "--placement", "--routing-stats"])
@pytest.mark.parametrize("by_folder", [False, True])
def test_a_model_is_looked_up_opened_and_described_once(
    path: Path, tmp_path: Path, more: str, by_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = placed(path, tmp_path, 2)
    flags = {
        "nothing": [],
        "--emit": ["--emit", "llama.cpp"],
        "--placement": ["--placement", str(kept)],
        "--routing-stats": ["--routing-stats", str(tmp_path / "counts.json")],
    }
    calls: Counter[str] = Counter()

    def count(module: ModuleType, name: str) -> None:
        real = getattr(module, name)

        def counted(*given: Any, **named: Any) -> Any:
            calls[name] += 1
            return real(*given, **named)

        monkeypatch.setattr(module, name, counted)

    count(hub, "_find")
    count(checkpoint, "read_split_gguf")
    count(sources, "file_types")
    line = ["plan", str(path.parent if by_folder else path), *CARD, *flags[more]]
    assert run_command(line) == 0
    assert calls == {"_find": 1, "read_split_gguf": 1, "file_types": 1}
