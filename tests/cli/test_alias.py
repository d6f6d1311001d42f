"""`headroom alias`: names of one's own, for every command; clashes are refused."""

import json
from pathlib import Path

import pytest

from headroom.cli.main import run_command
from headroom.cli.run import AskedWords, read_words
from headroom.llm import LLM


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return ["--aliases", str(tmp_path / "aliases.json"), "--home", str(tmp_path / "home")]


def test_aliases_are_added_listed_and_removed(
    tiny_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["alias", *flags]) == 0
    assert capsys.readouterr().out == ""
    assert run_command(["alias", "mine", str(tiny_path), *flags]) == 0
    assert run_command(["alias", "again", "MINE", *flags]) == 0  # of an alias: of its model
    assert run_command(["alias", "first", "smollm2", *flags]) == 0
    capsys.readouterr()
    assert run_command(["alias", *flags]) == 0
    assert capsys.readouterr().out == (
        f"again  {tiny_path}\nfirst  smollm2-135m-instruct\nmine   {tiny_path}\n"
    )
    assert run_command(["alias", "--remove", "again", *flags]) == 0
    assert capsys.readouterr().out == f"again stood for {tiny_path}\n"
    assert run_command(["alias", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "version": 1,
        "aliases": {"first": "smollm2-135m-instruct", "mine": str(tiny_path)},
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mine"], "mine stands for no model."),
        (["smollm2", "FILE"], "smollm2 is a model that headroom knows"),
        (["qwen3-0.6b", "FILE"], "qwen3-0.6b is a model that headroom knows"),
        (["cpu", "FILE"], "cpu is a model that headroom knows"),
        (["here", "FILE"], "here is a file or a folder here"),
        (["mine", "no-such-model"], "There is no file, folder or known model 'no-such-model'."),
        (["a/b", "FILE"], "'a/b' cannot be an alias."),
        (["--remove", "x"], "There is no alias 'x'. There are none."),
        (["x", "--remove", "x"], "--remove takes the one name to forget."),
    ],
)
def test_clashes_and_wrong_words_are_refused(
    words: list[str], told: str, tiny_path: Path, flags: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "work" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    line = [str(tiny_path) if word == "FILE" else word for word in words]
    assert run_command(["alias", *line, *flags]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "aliases.json").exists()


def test_every_command_takes_an_alias(
    tiny_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["alias", "mine", str(tiny_path), *flags]) == 0
    for line in (
        ["plan", "Mine", "--device", "24GiB", "--json"],
        ["show", "mine", "--json"],
        ["tokenize", "mine", "a b", "--json"],
        ["run", "mine", "a b", "--raw", "--max-tokens", "2", "--json", "--device", "cpu"],
        ["pull", "mine"],
    ):
        capsys.readouterr()
        assert run_command([*line, *flags]) == 0, line
    assert capsys.readouterr().out == f"{tiny_path}\n"


def test_a_single_word_beside_piped_text_may_be_an_alias() -> None:
    aliases = {"Mine": "/data/m.gguf"}
    assert read_words(["mine"], "text\n", aliases=aliases) == AskedWords("mine", "text\n")
    assert read_words(["yours"], "text\n", aliases=aliases) == AskedWords("", "text\n\nyours")
    assert read_words(["mine"], "", aliases=aliases) == AskedWords("", "mine")


def test_the_python_api_takes_an_alias_and_calls_the_model_by_it(
    tiny_path: Path, flags: list[str], tmp_path: Path
) -> None:
    assert run_command(["alias", "Mine", str(tiny_path), *flags]) == 0
    with LLM("mine", aliases=str(tmp_path / "aliases.json"), device="cpu", context=64) as llm:
        assert (llm.name, llm.path) == ("mine", tiny_path)
