"""`headroom rm`: what it deletes, what it says, and what it never deletes."""

import io
from pathlib import Path

import pytest

from headroom.cli.main import run_command
from headroom.formats.aliases import load_aliases


class Terminal(io.StringIO):
    """A standard input at which somebody sits."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / "models" / "org--repo"
    folder.mkdir(parents=True)
    (folder / "a.gguf").write_bytes(b"x" * 2048)
    (folder / "b.gguf").write_bytes(b"x" * 1024)
    return tmp_path / "home"


@pytest.fixture
def flags(home: Path, tmp_path: Path) -> list[str]:
    return ["--home", str(home), "--aliases", str(tmp_path / "aliases.json")]


def files(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").rglob("*.gguf"))


def test_a_model_is_removed_and_the_freed_bytes_are_told(
    home: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["rm", "org/repo:a.gguf", "--yes", *flags]) == 0
    assert capsys.readouterr().out == ("org/repo:a.gguf: removed 1 file, 2.0 KiB are free now\n")
    assert files(home) == ["b.gguf"]
    assert run_command(["rm", str(home / "models/org--repo/b.gguf"), "-y", *flags]) == 0
    assert list((home / "models").iterdir()) == []
    assert run_command(["rm", "org/repo:a.gguf", " ", "--yes", *flags]) == 2
    assert "An empty name is no model" in capsys.readouterr().err
    assert run_command(["rm", "org/repo:a.gguf", "--yes", *flags]) == 1
    assert "There is no model 'org/repo:a.gguf' on this disk" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "left"), [("y\n", 1), ("yes\n", 1), ("\n", 2), ("", 2)])
def test_a_terminal_is_asked_and_only_yes_deletes(
    answer: str, left: int, home: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert run_command(["rm", "org/repo:a.gguf", *flags]) == 0
    assert len(files(home)) == left


def test_nothing_is_deleted_unasked(
    home: Path,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run_command(["rm", "org/repo:a.gguf", *flags]) == 2
    assert "standard input is not a terminal. Add --yes" in capsys.readouterr().err
    assert len(files(home)) == 2


def test_files_elsewhere_are_deleted_only_if_that_is_said(
    home: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "mine.gguf"
    other.write_bytes(b"xyz")
    linked = home / "models" / "linked"
    linked.symlink_to(tmp_path)
    for name in (str(other), str(linked / "mine.gguf"), str(home / ".." / "mine.gguf")):
        assert run_command(["rm", name, "--yes", *flags]) == 2
        assert "nothing was deleted. Add --outside" in capsys.readouterr().err
        assert other.exists()
    assert run_command(["rm", str(other), "--yes", "--outside", *flags]) == 0
    assert not other.exists()


def test_files_stay_while_another_name_needs_them(
    home: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        assert run_command(["alias", name, "org/repo:a.gguf", *flags]) == 0
    capsys.readouterr()
    assert run_command(["rm", "org/repo:a.gguf", "--yes", *flags]) == 2
    assert "org/repo:a.gguf stays, since one, two are aliases of the model. Remove them instead: " \
        "headroom rm one two" in capsys.readouterr().err  # fmt: skip
    assert run_command(["rm", "one", "--yes", *flags]) == 0
    assert "the files stay, since two is an alias of the model" in capsys.readouterr().out
    assert files(home) == ["a.gguf", "b.gguf"]
    assert run_command(["rm", "two", "--yes", *flags]) == 0
    assert "2.0 KiB are free now" in capsys.readouterr().out
    assert files(home) == ["b.gguf"]
    assert load_aliases(tmp_path / "aliases.json") == {}
