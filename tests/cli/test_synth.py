"""`headroom synth`: what it writes, says and refuses."""

import json
from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize("family", ["qwen35", "qwen35moe"])
def test_a_prediction_head_is_the_same_in_both_formats(family: str, tmp_path: Path) -> None:
    flags = ["--layers", "4", "--mtp", "--quant", "F32"]
    folder, file = tmp_path / "folder", tmp_path / "m.gguf"
    assert run_command(["synth", family, str(file), *flags]) == 0
    assert run_command(["synth", family, str(folder), *flags, "--format", "safetensors"]) == 0
    one, other = open_checkpoint(file), open_checkpoint(folder)
    assert one.metadata.get_int("block_count") == 5
    assert one.metadata.get_int("nextn_predict_layers") == 1
    assert other.metadata.get_int("hf.mtp_num_hidden_layers") == 1
    assert other.tensors["layers.4.mtp.proj"].name == "mtp.fc.weight"
    for name in ("mtp.proj", "attn.q", "attn.k_norm", "mtp.hidden_norm"):
        first, second = (x.tensors[f"layers.4.{name}"] for x in (one, other))
        values = [np.frombuffer(x.data(), np.float32) for x in (first, second)]
        # Safetensors hold the weights of norms less one.
        added = 1 if name.endswith("norm") else 0
        np.testing.assert_allclose(values[0], values[1] + added, atol=1e-6)


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
            ["qwen3", "x", "--mtp"],
            "qwen3 models have no prediction heads. Families: qwen35, qwen35moe.",
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
