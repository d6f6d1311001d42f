"""`synth:SIZE`, where a model is named that is a file: what it is, and how to get the file."""

from pathlib import Path

import pytest

from headroom.cli.main import run_command

COMMANDS = [["run", "MODEL", "Hello"], ["plan", "MODEL"], ["pull", "MODEL"], ["serve", "MODEL"]]
Captured = pytest.CaptureFixture[str]


def said(command: list[str], model: str, home: Path, capsys: Captured) -> str:
    words = [model if word == "MODEL" else word for word in command]
    assert run_command([*words, "--home", str(home)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_model_to_synthesise_is_reported_with_how_to_write_it(
    command: list[str], tmp_path: Path, capsys: Captured
) -> None:
    assert said(command, "synth:llama", tmp_path, capsys) == (
        "error: synth:llama is a synthetic model, which only headroom bench makes itself. "
        "Write it with: headroom synth llama FILE --size tiny --quant q4_k_m; then name the file.\n"
    )
    assert said(command, "Synth:qwen3.5-27b:q8_0", tmp_path, capsys).endswith(
        "headroom synth qwen35 FILE --size qwen3.5-27b --quant q8_0; then name the file. "
        "A plan needs no file: headroom plan qwen3.5-27b:q8_0\n"
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_unknown_name_is_reported_with_the_known_names(
    command: list[str], tmp_path: Path, capsys: Captured
) -> None:
    told = said(command, "synth:gpt", tmp_path, capsys)
    assert told.startswith("error: 'gpt' is no model to synthesise and run.")
    assert "(llama, qwen3, " in told
    assert ", qwen3.5-27b, " in told


def test_a_model_that_bench_has_written_is_named(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "synth" / "llama-tiny-q4_k_m.gguf"
    path.parent.mkdir()
    path.touch()
    told = said(COMMANDS[0], "synth:llama", tmp_path, capsys)
    assert told.endswith(f"makes itself. It has made {path}: name that file.\n")
