"""The program around the commands: errors as one line, exit codes, pipes."""

import io
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from headroom import __version__
from headroom.cli.main import run_command
from headroom.errors import FormatError, HeadroomError, OptionError, PlanError

ROOT = Path(__file__).parents[2]
COMMANDS = ("pull", "run", "chat", "serve", "plan", "tokenize", "doctor", "calibrate")


def raise_in_plan(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("headroom.cli.plan.find_plan_source", fail)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [command for command in COMMANDS if command not in shown] == []


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("synth", "the .gguf file, or the folder"),
        ("bench", "the default model if left out"),
        ("plan", "a file, a folder or a known name"),
    ],
)
def test_help_explains_the_arguments(
    command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([command, "--help"]) == 0
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("command", [*COMMANDS, "bench", "experts", "synth-trace", "worker"])
def test_help_is_wrapped_at_the_width_of_the_terminal_alone(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command([command, "--help"]) == 0
    about = capsys.readouterr().out.partition("╭")[0].splitlines()
    lines = [line.strip() for line in about]
    for line, after in pairwise(lines):
        if line and after:
            assert len(line) + 1 + len(after.split()[0]) > 78, line
    assert max(map(len, about)) <= 80


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"headroom {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HeadroomError("It broke.", hint="Mend it."), 1),
        (FormatError("It broke.", hint="Mend\nit."), 1),
        (PlanError("It broke.", hint="Mend it."), 3),
        (OptionError("It broke.", hint="Mend it."), 2),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raise_in_plan(error, monkeypatch)
    assert run_command(["plan"]) == code
    assert capsys.readouterr() == ("", "error: It broke. Mend it.\n")


def test_a_full_gpu_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_in_plan(RuntimeError("CUDA error: out of memory\nand more"), monkeypatch)
    assert run_command(["plan"]) == 1
    told = "(too little memory of a GPU is free; headroom doctor shows how much)"
    assert capsys.readouterr().err == f"error: CUDA error: out of memory {told}\n"


@pytest.mark.parametrize("line", [["--debug", "plan"], ["plan", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(
    line: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_in_plan(HeadroomError("It broke."), monkeypatch)
    assert run_command(line) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback ")
    assert shown.endswith("\nerror: It broke.\n")


def test_a_bug_is_told_apart_from_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_in_plan(KeyError("lost"), monkeypatch)
    assert run_command(["plan"]) == 1
    told = "error: KeyError: 'lost' (a bug in headroom; --debug shows where)\n"
    assert capsys.readouterr().err == told


def test_ctrl_c_ends_a_command_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    raise_in_plan(KeyboardInterrupt(), monkeypatch)
    assert run_command(["plan"]) == 130


@pytest.mark.parametrize("line", [["nonsense"], ["run"], ["plan", "a", "b"], ["--nonsense"]])
def test_a_line_that_makes_no_sense_is_a_usage_error(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(line) == 2
    assert "Usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        # Flags of this command alone are proposed, and only if they are much like the wrong one.
        (["plan", "--thread", "2"], "no option --thread. Did you mean --threads or --pin-threads?"),
        (["serve", "--zebra"], "headroom serve has no option --zebra."),
        # A flag of other commands is not proposed, but those commands are named.
        (
            ["serve", "--temperature", "1"],
            "no option --temperature. --temperature is an option of headroom run, chat and bench.",
        ),
        (["chat", "--por=1"], "no option --por. --port is an option of headroom serve."),
        (
            ["bench", "--max-tokens", "1"],
            "no option --max-tokens. --max-tokens is an option of headroom run and chat. "
            "Did you mean --tokens or --draft-tokens or --cache-tokens?",
        ),
    ],
)
def test_an_unknown_option_is_answered_with_those_that_the_command_has(
    line: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(line) == 2
    assert " ".join(capsys.readouterr().err.replace("│", " ").split("Error ")[1].split()[1:-1]) == (
        told if told.startswith("headroom") else f"headroom {line[0]} has {told}"
    )


def test_input_that_is_not_text_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert run_command(["tokenize", "-"]) == 1
    told = "error: The input is not utf-8 text: invalid start byte at byte 1.\n"
    assert capsys.readouterr() == ("", told)


def test_an_answer_goes_to_a_narrow_terminal_as_far_as_it_can(smollm2_path: Path) -> None:
    line = [sys.executable, "-m", "headroom", "tokenize", str(smollm2_path), "né"]
    narrow = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, cwd=ROOT, env=narrow, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "'n'" in done.stdout


def test_a_missing_model_file_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "headroom", "tokenize", str(tmp_path / "none.gguf"), "hello"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "headroom", "--help"]
    with os.fdopen(writer) as closed:
        done = subprocess.run(line, cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, timeout=60)
    assert done.stderr == b""
    assert done.returncode in (1, 128 + signal.SIGPIPE)
