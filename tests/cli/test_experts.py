"""`headroom experts`: what is chosen and what would be hot, as a table, as JSON and drawn."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from headroom.cli.main import run_command
from headroom.experts.stats import RoutingHistory, save_history
from headroom.families.files import open_checkpoint
from tests.synth_models import MODELS, write_model

DIMS = MODELS["laguna"].dims
SPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("laguna", "q8_0", tmp_path_factory.mktemp("m"))


@pytest.fixture
def stats(path: Path, tmp_path: Path) -> Path:
    """Statistics in which the last experts of every layer are chosen most."""
    row = tuple(float(expert * expert) for expert in range(DIMS.experts))
    rows = ((), *(row for _ in range(DIMS.layers - 1)))
    kept = tmp_path / "stats.json"
    save_history(kept, RoutingHistory(rows, 4e9), open_checkpoint(path).identity)
    return kept


def shown(capsys: pytest.CaptureFixture[str], *line: object) -> dict[str, Any]:
    assert run_command(["experts", *map(str, line), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_on_a_cpu_all_experts_are_hot(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, path, "--device", "cpu", "--routing-stats", "off")
    assert [len(layer["hot"]) for layer in found["layers"]] == [DIMS.experts] * (DIMS.layers - 1)
    assert (found["source"], found["hit_rate"]) == ("all", None)


def test_a_budget_holds_the_most_chosen_ones(
    path: Path, stats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (path, "--device", "2GiB", "--expert-budget", "50%", "--routing-stats", stats)
    found = shown(capsys, *line)
    assert found["source"] == "statistics"
    half = DIMS.experts // 2
    for layer in found["layers"]:
        assert layer["hot"] == list(range(half, DIMS.experts))
        expected = sum(layer["counts"][half:]) / sum(layer["counts"])
        assert layer["hit_rate"] == pytest.approx(expected)
    assert 0.8 < found["hit_rate"] < 1


def test_the_picture_has_a_box_for_each_expert(
    path: Path, stats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "experts.svg"
    line = ["experts", str(path), "--device", "2GiB", "--expert-budget", "50%"]
    line += ["--routing-stats", str(stats), "--svg", str(picture)]
    assert run_command(line) == 0
    assert f"drawn into {picture}" in capsys.readouterr().out
    drawn = ElementTree.parse(picture).getroot().iter(f"{SPACE}rect")
    boxes = [box for box in drawn if box.get("data-expert")]
    assert len(boxes) == DIMS.experts * (DIMS.layers - 1)
    words = [box.get("data-expert") for box in boxes[: DIMS.experts]]
    assert words == ["cold"] * (DIMS.experts // 2) + ["hot"] * (DIMS.experts // 2)


def test_the_table_has_a_line_for_each_layer_with_experts(
    path: Path, stats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_command(["experts", str(path), "--device", "cpu", "--routing-stats", str(stats)]) == 0
    )
    text = capsys.readouterr().out
    assert "100.0 % of choices" in text
    assert sum(line.startswith("│ ") for line in text.splitlines()) == DIMS.layers - 1


def test_what_cannot_be_shown_is_refused(
    path: Path, tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["experts", str(tiny_path), "--device", "cpu"]) == 1
    assert capsys.readouterr().err == (
        f"error: {tiny_path} has no routed experts. "
        "Of a dense model, headroom plan shows what goes where.\n"
    )
    line = ["experts", str(path), "--device", "cpu"]
    assert run_command([*line, "--svg", str(tmp_path / "none" / "x.svg")]) == 2
    assert "is in a folder that does not exist" in capsys.readouterr().err
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert run_command([*line, "--routing-stats", str(bad)]) == 1
    assert "is not a routing statistics file" in capsys.readouterr().err


def test_without_statistics_the_plans_numbers_are_shown(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [str(path), "--device", "2GiB", "--expert-budget", "40%"]
    found = shown(capsys, *line, "--routing-stats", "off")
    assert found["source"] == "even"
    assert run_command(["plan", *line, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["devices"][0]["hot_experts"]
    assert sum(len(layer["hot"]) for layer in found["layers"]) == planned > 0


def test_a_placement_file_is_shown_and_drawn_or_refused_as_in_a_run(
    path: Path, stats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = tmp_path / "placed.json"
    hot = [[], *([[0, 3]] * (DIMS.layers - 1))]
    table = {"version": 1, "model": open_checkpoint(path).identity, "hot": hot}
    placed.write_text(json.dumps(table))
    line = [path, "--device", "2GiB", "--expert-budget", "50%", "--routing-stats", stats]
    found = shown(capsys, *line, "--placement", placed)
    assert found["source"] == str(placed)
    assert [layer["hot"] for layer in found["layers"]] == hot[1:]
    placed.write_text(json.dumps(table | {"model": "other"}))
    assert run_command(["experts", *map(str, line), "--placement", str(placed)]) == 1
    assert "is of another model" in capsys.readouterr().err


def test_what_a_run_refuses_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["experts", str(path), "--device", "2GiB", "--routing-stats", "off"]
    assert run_command([*line, "--expert-budget", "1%"]) == 3
    assert "hot experts in each of" in capsys.readouterr().err


def test_without_a_name_it_is_the_device_of_a_run(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headroom.split.choice.detect_gpus", list)
    found = shown(capsys, path, "--routing-stats", "off")
    assert (found["device"], found["source"]) == ("cpu", "all")


def test_a_picture_replaces_pictures_alone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes, picture = tmp_path / "notes.svg", tmp_path / "x.svg"
    notes.write_text("not a picture")
    line = ["experts", str(path), "--device", "cpu", "--routing-stats", "off", "--svg"]
    for _ in range(2):
        assert run_command([*line, str(picture)]) == 0
    assert picture.read_text().startswith("<svg")
    monkeypatch.setattr("headroom.cli.experts.plan_experts", None)  # before all other work
    for target in (path, notes):
        before = target.read_bytes()
        capsys.readouterr()
        assert run_command([*line, str(target)]) == 2
        assert capsys.readouterr().err == (
            f"error: {target} is there and is not a picture file; it is not written over. "
            "Name another file with --svg.\n"
        )
        assert target.read_bytes() == before


def test_a_name_that_plans_take_has_the_plans_numbers(
    stats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["qwen3.6-35b-a3b:q4_k_m", "--device", "12GiB", "--ram", "64GiB"]
    found = shown(capsys, *line)
    assert run_command(["plan", *line, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["devices"][0]["hot_experts"]
    assert sum(len(layer["hot"]) for layer in found["layers"]) == planned > 0
    assert (found["source"], found["hit_rate"], len(found["layers"])) == ("even", None, 40)
    assert run_command(["experts", *line, "--routing-stats", str(stats)]) == 0
    assert f"not read, since there are no weights to compare with: {stats}" in (
        capsys.readouterr().err
    )


def test_an_unknown_name_is_refused_with_the_known_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["experts", "no-such-model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: There is no file, folder or known model 'no-such-model'. Known")
    assert "qwen3.6-35b-a3b" in error
    assert run_command(["experts", "qwen3.6-27b:q4_k_m"]) == 1
    assert capsys.readouterr().err == (
        "error: qwen3.6-27b:q4_k_m has no routed experts. "
        "Of a dense model, headroom plan shows what goes where.\n"
    )
