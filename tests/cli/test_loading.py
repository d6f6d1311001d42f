"""What is seen while a model is loaded."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from headroom.cli import loading, progress
from headroom.cli.loading import open_llm
from headroom.cli.progress import Show
from headroom.options import Options


class SlowLLM:
    """Loads 3 MB, half of it first."""

    def __init__(self, options: Options, path: Path, progress: Show, tap: None = None) -> None:
        assert path == Path("found")
        self.steps = [progress(done, 3_000_000) for done in (0, 1_500_000, 3_000_000)]

    def __enter__(self) -> "SlowLLM":
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture(autouse=True)
def slow_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command open a model that is not there."""
    monkeypatch.setattr("headroom.llm.LLM", SlowLLM)
    monkeypatch.setattr(loading, "ready_model", lambda options: Path("found"))


def test_a_terminal_shows_how_much_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    terminal = Console(file=drawn, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    with open_llm(Options()):
        shown = drawn.getvalue()
    assert "loading" in shown
    assert "3.0/3.0 MB" in shown


def test_no_progress_bar_is_drawn_outside_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with open_llm(Options()):
        assert capsys.readouterr() == ("", "")
