"""What the documentation shows of `headroom plan` is what the command prints."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from headroom.cli.main import run_command

ROOT = Path(__file__).parents[2]


def printed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command of the documentation prints."""
    name, *words = shlex.split(command)
    assert name == "headroom"
    assert run_command(words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_the_readme_shows_the_plan_that_its_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = ROOT.joinpath("README.md").read_text()
    (block,) = [x for x in text.split("```\n") if x.startswith("headroom plan qwen3.6-35b-a3b")]
    line, shown = block.split("\n\n")
    command, _, limit = line.partition(" | head -")
    lines = printed(command, capsys).splitlines()
    assert len(lines) > int(limit)
    assert shown.splitlines() == lines[: int(limit)]


def test_the_documented_json_is_what_its_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, _, after = ROOT.joinpath("docs", "plan.md").read_text().partition("```json\n")
    documented = json.loads(after.split("```")[0])
    report = json.loads(printed(before.split("`")[-2], capsys))

    def cut(side: dict[str, Any], like: dict[str, Any]) -> None:
        assert len(like["lines"]) == 1
        side["lines"] = [x for x in side["lines"] if x["name"] == like["lines"][0]["name"]]

    for found, like in zip(report["devices"], documented["devices"], strict=True):
        cut(found, like)
    cut(report["host"], documented["host"])
    assert report == documented


def test_the_documented_explanation_is_what_its_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = ROOT.joinpath("docs", "plan.md").read_text()
    (block,) = [x for x in text.split("```\n") if x.startswith("headroom plan qwen3.6-35b-a3b")]
    command, shown = block.split("\n\n")
    assert printed(command, capsys) == shown


def drawn(command: str, picture: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the picture that a command draws, whose last word is the documented file."""
    words = command.split()
    printed(shlex.join([*words[:-1], str(picture)]), capsys)
    return picture.read_text()


def test_the_documented_pictures_are_what_their_commands_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = ROOT.joinpath("README.md").read_text()
    (block,) = [x for x in readme.split("```\n") if x.startswith("headroom plan qwen3.6-35b-a3b")]
    command = block.partition(" | ")[0] + " --svg docs/plan.svg"
    assert "`--svg docs/plan.svg`" in readme
    page = ROOT.joinpath("docs", "plan.md").read_text()
    (comparison,) = [x for x in page.split("`") if x.endswith("docs/comparison.svg")]
    for line in (command, comparison):
        kept = ROOT / line.split()[-1]
        assert drawn(line, tmp_path / "drawn.svg", capsys) == kept.read_text(), line
