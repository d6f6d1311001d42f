"""Completion: what shells offer, asked as their scripts ask."""

import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.cli.completion import join_words
from headroom.cli.main import COMMANDS, run_command
from headroom.families.registry import FAMILIES, KNOWN
from headroom.formats.hub import DEFAULT_MODEL
from headroom.formats.mixes import MIXES
from headroom.options import KV_TYPES

ROOT = Path(__file__).parents[2]


class Shell:
    """Asks the program for completions as the scripts of shells do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def bash(self, *words: str) -> list[str]:
        """Return what bash would offer for the last of its words; colons are words of their own."""
        with self.monkeypatch.context() as patch:
            patch.setenv("_HEADROOM_COMPLETE", "complete_bash")
            patch.setenv("COMP_WORDS", "\n".join(("headroom", *words)))
            patch.setenv("COMP_CWORD", str(len(words)))
            assert run_command([]) == 0
        return self.capsys.readouterr().out.split()

    def line(self, shell: str, line: str) -> str:
        """Return what the program tells zsh or fish for a command line."""
        with self.monkeypatch.context() as patch:
            patch.setenv("_HEADROOM_COMPLETE", f"complete_{shell}")
            patch.setenv("_TYPER_COMPLETE_ARGS", line)
            patch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
            assert run_command([]) == 0
        return self.capsys.readouterr().out


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    """A shell in an empty folder, with no models and no aliases."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HEADROOM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HEADROOM_ALIASES", str(tmp_path / "aliases.json"))
    return Shell(monkeypatch, capsys)


def test_commands_are_completed(shell: Shell) -> None:
    assert shell.bash("") == [*COMMANDS]
    assert shell.bash("p") == ["pull", "ps", "plan", "profile"]


def test_flags_are_those_of_the_command(shell: Shell) -> None:
    assert shell.bash("serve", "--tls-") == ["--tls-cert", "--tls-key"]
    assert shell.bash("plan", "--tls-") == []
    assert "--install-completion" in shell.bash("--")


@pytest.mark.parametrize("last", ["", "="])
def test_the_choices_of_a_setting_are_completed(last: str, shell: Shell) -> None:
    assert shell.bash("run", "--kv-type", last) == [*KV_TYPES]


def test_the_beginning_of_a_choice_selects(shell: Shell) -> None:
    assert shell.bash("run", "--kv-type", "=", "q5") == ["q5_1", "q5_0"]


def test_a_model_is_a_known_name_an_alias_or_a_file(shell: Shell) -> None:
    Path("own.gguf").touch()
    Path("with blank.gguf").touch()
    assert run_command(["alias", "mine", DEFAULT_MODEL]) == 0
    shell.capsys.readouterr()
    assert shell.bash("run", "") == [DEFAULT_MODEL, "mine", "own.gguf"]
    assert shell.bash("serve", "mine", "o") == ["own.gguf"]
    assert shell.bash("alias", "--remove", "") == ["mine"]


def test_pulled_models_have_the_names_that_list_has(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "home/models/org--repo"
    folder.mkdir(parents=True)
    (folder / "m.Q4_0.gguf").touch()
    assert shell.bash("rm", "") == ["org/repo:m.Q4_0.gguf"]
    assert shell.bash("chat", "org/repo", ":", "m") == ["m.Q4_0.gguf"]
    other = str(tmp_path / "other")
    assert shell.bash("rm", "--home", other, "") == []


def test_files_in_another_folder_keep_the_folder(shell: Shell) -> None:
    Path("models").mkdir()
    Path("models/a.gguf").touch()
    assert shell.bash("show", "models/") == ["models/a.gguf"]


def test_a_prompt_is_not_completed(shell: Shell) -> None:
    assert shell.bash("run", DEFAULT_MODEL, "") == []


def test_a_plan_knows_published_models_mixes_and_devices(shell: Shell) -> None:
    assert set(shell.bash("plan", "")) == {DEFAULT_MODEL, *KNOWN}
    assert shell.bash("plan", "gemma-4-31b", ":") == [*MIXES]
    assert shell.bash("plan", "gemma-4-31b", ":", "q6") == ["q6_k"]
    assert "rtx3060-12gb" in shell.bash("plan", "--device", "rtx30")
    assert shell.bash("run", "--device", "cuda", ":") == ["0"]
    assert shell.bash("run", "--device", "rtx30") == []


def test_bench_takes_synthetic_models_and_synth_families(shell: Shell) -> None:
    assert shell.bash("bench", "synth", ":", "gemma-4-31b", ":", "q6") == ["q6_k"]
    assert shell.bash("synth-trace", "synth", ":", "gemma-4-31b", ":", "q6") == ["q6_k"]
    assert "qwen3.5-35b-a3b" in shell.bash("synth-trace", "")
    assert "cpu" in shell.bash("bench", "c")
    assert shell.bash("synth", "") == [*FAMILIES]


def test_a_word_that_bash_did_not_break_is_completed_as_a_whole(shell: Shell) -> None:
    assert shell.bash("plan", "gemma-4-31b:q6") == ["gemma-4-31b:q6_k"]


def test_broken_aliases_and_settings_cost_only_their_completions(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aliases.json").write_text("{")
    assert shell.bash("run", "s") == [DEFAULT_MODEL]
    monkeypatch.setenv("HEADROOM_PORT", "many")
    assert shell.bash("run", "s") == [DEFAULT_MODEL]


def test_zsh_and_fish_get_the_same_completions(shell: Shell) -> None:
    assert '"q8_0"' in shell.line("zsh", "headroom run --kv-type q")
    assert shell.line("zsh", "headroom run unknown").strip() == "_files"
    assert shell.line("fish", "headroom plan gemma-4-31b:q6").split() == ["gemma-4-31b:q6_k"]


@given(st.lists(st.text(st.sampled_from("ab:="), min_size=1), max_size=5))
def test_words_that_bash_broke_are_joined_as_they_were(words: list[str]) -> None:
    """A word that begins or ends with a break cannot be told from its neighbour, so none does."""
    whole = [f"x{word}x" for word in words]
    parts: list[str] = []
    for word in whole:
        parts += _bash_parts(word)
    assert join_words(parts) == whole


def _bash_parts(word: str) -> list[str]:
    """Return a word as bash breaks it: runs of breaks, and what is between them."""
    parts = [word[0]]
    for before, character in pairwise(word):
        if (before in ":=") == (character in ":="):
            parts[-1] += character
        else:
            parts.append(character)
    return parts


def test_completion_imports_no_torch() -> None:
    code = (
        "import sys\nfrom headroom.cli.main import run_command\n"
        "run_command([])\nprint('torch' in sys.modules, file=sys.stderr)"
    )
    asked = {
        "_HEADROOM_COMPLETE": "complete_bash",
        "COMP_WORDS": "headroom run s",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | asked,
        capture_output=True,
        text=True,
    )
    assert (done.stdout.split(), done.stderr.strip()) == ([DEFAULT_MODEL], "False")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_with_the_script_that_is_shown(tmp_path: Path) -> None:
    """The script itself runs in bash, and its function is called as bash calls it."""
    program = tmp_path / "headroom"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m headroom "$@"\n')
    program.chmod(0o755)
    script = """
        eval "$(_HEADROOM_COMPLETE=source_bash headroom)"
        COMP_WORDS=(headroom plan gemma-4-31b : q6) COMP_CWORD=4
        _headroom_completion headroom q6 :
        echo "${COMPREPLY[@]}"
        complete -p headroom
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    reply, registered = done.stdout.splitlines()
    assert reply == "q6_k"
    assert registered.endswith("-F _headroom_completion headroom")
