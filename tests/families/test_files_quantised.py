"""Models of quantised safetensors give the logits of transformers with the same values."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from headroom.families.files import open_checkpoint
from headroom.formats.quants import BF16, F32, QuantType
from headroom.formats.tensor import ComposedTensor
from headroom.plan.describe import describe
from tests.families.oracles import PROMPT, oracle_logits, variant
from tests.formats.quantised_weights import METHODS
from tests.running import run_steps

# Groups of 64 columns do not divide the experts' 32.
FOR_EXPERTS = ("fp8-blocks", "w4a16", "w8a8", "awq", "gptq-zeros", "gptq-ordered", "nvfp4", "mxfp4")
CASES = [
    *(("llama", method) for method in METHODS if method not in ("gptq-2", "w8a16")),
    *(("qwen3-untied", method) for method in ("fp8-rows", "w4a16-zeros")),
    *(("qwen3moe", method) for method in FOR_EXPERTS),
]


def quantised(name: str, method: str, folder: Path) -> PreTrainedModel:
    """Save a model with quantised projections; return transformers' with what they stand for."""
    variant(name).save_safetensors(folder)
    torch.manual_seed(5)
    stored, values = {}, {}
    for key, weight in load_file(folder / "model.safetensors").items():
        values[key] = weight
        if not key.endswith("_proj.weight"):
            stored[key] = weight
            continue
        found = METHODS[method].quantise(weight)
        values[key] = found.values
        stored |= {key.removesuffix(".weight") + end: x for end, x in found.parts.items()}
    plain = folder / "plain"
    plain.mkdir()
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = METHODS[method].settings
    (folder / "config.json").write_text(json.dumps(config))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.mark.parametrize(("name", "method"), CASES)
def test_logits_are_those_of_the_values(name: str, method: str, tmp_path: Path) -> None:
    model = quantised(name, method, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    held = {info.quant for info in checkpoint.tensors.values() if isinstance(info, ComposedTensor)}
    assert held == {METHODS[method].held}
    logits = run_steps(checkpoint, [PROMPT], [[20, 1, 3]])[0]
    torch.testing.assert_close(logits, oracle_logits(model, PROMPT), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "method"), [("qwen3moe", "awq"), ("qwen3moe", "fp8-blocks")])
def test_the_plan_counts_the_bytes_that_are_held(name: str, method: str, tmp_path: Path) -> None:
    quantised(name, method, tmp_path)
    plain, joined = (describe(open_checkpoint(path)) for path in (tmp_path / "plain", tmp_path))
    held: QuantType = METHODS[method].held

    def counted(values: int) -> int:
        return held.bytes_for(values)

    (before, *_), (after, *_) = plain.shape.layers, joined.shape.layers
    assert after.expert_bytes == counted(before.expert_values)
    projections = 4 * 64 * 32 + 2 * 2 * 64 * 32 + 4 * 32 * 64
    attention = [info for key, info in joined.checkpoint.tensors.items() if ".0.attn." in key]
    values = sum(i.shape[0] * i.shape[1] for i in attention if isinstance(i, ComposedTensor))
    assert values <= projections
    assert before.core_bytes - after.core_bytes == F32.bytes_for(values) - counted(values)


def test_a_gpu_holds_floats_in_16_bits_as_those_of_a_plain_file(tmp_path: Path) -> None:
    quantised("llama", "fp8-blocks", tmp_path)
    shapes = [describe(open_checkpoint(path)).shape for path in (tmp_path, tmp_path / "plain")]
    joined, plain = (shape.in_tiles().layers[0] for shape in shapes)
    assert not shapes[0].unread_types
    assert joined == plain
    matrices = plain.core_values - plain.float_values
    assert joined.core_bytes == BF16.bytes_for(matrices) + F32.bytes_for(plain.float_values)
