"""`headroom pull`, and the default model that comes by itself."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headroom.cli.loading import ready_model
from headroom.cli.main import run_command
from headroom.errors import FormatError
from headroom.options import Options

Calls = list[tuple[str, Path]]


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace the download; the list collects what was asked for."""
    calls: Calls = []

    def pull(name: str, home: Path, progress: Callable[[int, int | None], None]) -> Path:
        calls.append((name, home))
        progress(1, None)
        progress(50, 100)
        return home / "model.gguf"

    monkeypatch.setattr("headroom.cli.loading.pull", pull)
    return calls


def test_the_last_line_is_the_path(
    pulls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["pull", "org/repo", "--home", str(tmp_path)]) == 0
    assert pulls == [("org/repo", tmp_path)]
    assert capsys.readouterr() == (f"{tmp_path / 'model.gguf'}\n", "")


def test_the_home_variable_says_where_models_go(
    pulls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADROOM_HOME", str(tmp_path))
    assert run_command(["pull"]) == 0
    assert pulls == [("", tmp_path)]


@pytest.mark.parametrize("name", ["", "smollm2", "SmolLM2-135M-Instruct"])
def test_the_default_model_is_fetched_where_it_is_missing(
    name: str, pulls: Calls, tmp_path: Path
) -> None:
    found = ready_model(Options(model=name, home=str(tmp_path)))
    assert found == tmp_path / "model.gguf"
    assert pulls == [("smollm2-135m-instruct", tmp_path)]


def test_another_model_that_is_missing_is_an_error_with_the_command_that_gets_it(
    pulls: Calls, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match="headroom pull org/repo"):
        ready_model(Options(model="org/repo", home=str(tmp_path)))
    assert pulls == []


def test_a_model_that_is_there_is_not_fetched(pulls: Calls, tmp_path: Path) -> None:
    model = tmp_path / "mine.gguf"
    model.touch()
    assert ready_model(Options(model=str(model))) == model
    assert pulls == []
