"""Bars and spinners: on a terminal alone, and never in the midst of a log line."""

import io
import logging
import sys
from typing import Any

import pytest
from rich.console import Console

from headroom.cli.progress import progress_bar, step_bar, waiting
from headroom.log import start_logging


class Terminal(io.StringIO):
    """Standard error as a person sees it."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return what is seen of standard error from now on."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(sys.stderr, Terminal)
    return sys.stderr


def test_a_bar_shows_bytes_or_the_runs_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = terminal(monkeypatch)
    with progress_bar("loading") as show:
        show(0, 3_000_000)
        show(3_000_000, 3_000_000)
    assert "loading" in drawn.getvalue()
    assert "3.0/3.0 MB" in drawn.getvalue()
    with progress_bar("loading") as show:
        show(3_000_000, 3_000_000)
        show(0, 14, "capturing")
        show(7, 14, "capturing")
    assert "capturing steps" in drawn.getvalue()
    assert " 7/14" in drawn.getvalue()


def test_steps_are_shown_with_what_runs_now(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = terminal(monkeypatch)
    with step_bar("planning") as report:
        report("prompt of 512 tokens", 1, 6)
    assert "prompt of 512 tokens" in drawn.getvalue()
    assert "1/6" in drawn.getvalue()


@pytest.mark.parametrize("bar", [progress_bar, step_bar])
def test_nothing_is_drawn_outside_a_terminal(bar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with bar("loading") as show:
        show(*(("x", 1, 2) if bar is step_bar else (1, 2)))
    with waiting(Console(), Console(stderr=True)):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_log_line_stands_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = terminal(monkeypatch)
    start_logging("info")
    with progress_bar("loading") as show:
        show(1, 2)
        logging.getLogger("headroom.test").warning("load: something was odd")
        show(2, 2)
    lines = drawn.getvalue().split("\n")
    (line,) = (line for line in lines if "something was odd" in line)
    assert line.rstrip().endswith("W load: something was odd")
    assert "loading" not in line.rpartition("\r")[2]


def test_a_spinner_turns_only_if_the_answer_is_seen_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = terminal(monkeypatch)
    piped = Console(file=io.StringIO())
    with waiting(piped, Console(stderr=True)):
        pass
    assert drawn.getvalue() == ""
    with waiting(Console(stderr=True), Console(stderr=True)):
        pass
    assert drawn.getvalue() != ""
