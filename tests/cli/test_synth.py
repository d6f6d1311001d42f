"""`headroom synth`: what it writes, says and refuses."""

import json
from pathlib import Path

import pytest

from headroom.cli.main import run_command
from headroom.errors import FormatError
from headroom.families.files import open_checkpoint
from headroom.formats.writing import check_space


def test_a_file_is_written_and_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    assert run_command(["synth", "qwen35moe", str(out), "--layers", "4", "--seed", "3"]) == 0
    assert f"{out}: qwen35moe tiny, Q4_K_M, " in capsys.readouterr().out
    assert open_checkpoint(out).metadata.get_int("block_count") == 4
    assert run_command(["plan", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_what_is_there_is_replaced_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.gguf"
    out.write_text("mine")
    assert run_command(["synth", "llama", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"error: {out} is there already. Use --force to replace it.\n"
    )
    assert out.read_text() == "mine"
    assert run_command(["synth", "llama", str(out), "--force"]) == 0
    assert open_checkpoint(out).architecture == "llama"
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_config_gives_the_dimensions(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second.gguf"
    flags = ["--format", "safetensors"]
    assert run_command(["synth", "gemma4", str(first), "--size", "tiny-e2b", *flags]) == 0
    config = str(first / "config.json")
    assert run_command(["synth", "gemma4", str(second), "--config", config]) == 0
    names = set(open_checkpoint(first).tensors) | {"rope_freqs"}
    assert set(open_checkpoint(second).tensors) == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt", "x"], "'gpt' is no model family. Families: llama, qwen3, qwen3moe, qwen35,"),
        (["qwen3", "x", "--size", "9b"], "'9b' is no size of qwen3. Sizes: tiny, qwen3-0.6b."),
        (["llama", "x", "--quant", "q3"], "'q3' is no quantisation. Choose F32, F16, BF16, Q8_0,"),
        (
            ["llama", "x", "--format", "safetensors", "--quant", "q8_0"],
            "Safetensors do not hold Q8_0. Choose F32, F16, BF16.",
        ),
        (
            ["llama", "x", "--size", "smollm2-135m", "--config", "c.json"],
            "--size and --config exclude each other.",
        ),
        (
            ["qwen35moe", "x", "--routing-skew", "0.8"],
            "--routing-skew needs a model that is 512 wide at least",
        ),
    ],
)
def test_wrong_words_are_refused_with_the_right_ones(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words[1] = str(tmp_path / words[1])
    assert run_command(["synth", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_known_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"m.gguf needs 931322574.62 GiB and .* free\."):
        check_space(tmp_path / "folder" / "m.gguf", 10**18)
