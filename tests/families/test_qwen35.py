"""Qwen3.5 against transformers, from both formats; one result however steps divide a text."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headroom.errors import ModelError
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.plan.describe import _check_states, describe
from tests.families.oracles import oracle_logits, variant
from tests.running import run_steps
from tests.tiny import VOCAB

PROMPT = torch.randint(0, VOCAB, (90,), generator=torch.Generator().manual_seed(5)).tolist()
NAMES = ("qwen35", "qwen35-equal-heads")


def checkpoint(folder: Path, name: str, format: str) -> Checkpoint:
    found = variant(name)
    if format == "gguf":
        return open_checkpoint(found.save_gguf(folder / "m.gguf"))
    return open_checkpoint(found.save_safetensors(folder / "m"))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(tmp_path: Path, name: str, format: str, kernels: str) -> None:
    opened = checkpoint(tmp_path, name, format)
    expected = oracle_logits(variant(name).model(), PROMPT)
    for pieces in ([90], [33, 1, 40, 2, 14]):
        logits = run_steps(opened, [PROMPT], [pieces], kernels=kernels)[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_same_rows_give_the_same_bits_however_steps_divide_them(
    tmp_path: Path, kernels: str
) -> None:
    opened = checkpoint(tmp_path, "qwen35", "gguf")
    prompts, alone = [PROMPT, PROMPT[30:], PROMPT[:7]], [[90], [60], [7]]
    whole = [
        run_steps(opened, [prompt], [pieces], kernels=kernels)[0]
        for prompt, pieces in zip(prompts, alone, strict=True)
    ]
    together = [[30, 1, 1, 58], [1, 58, 1], [3, 1, 1, 1, 1]]
    for one, other in zip(
        whole, run_steps(opened, prompts, together, kernels=kernels), strict=True
    ):
        assert torch.equal(one, other)


def test_decoding_and_a_mixed_batch_equal_transformers(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, "qwen35", "safetensors")
    prompts = [PROMPT[:50], PROMPT[20:85], PROMPT[70:]]
    pieces = [[30, 1, 1, 18], [65], [1] * 20]
    for prompt, logits in zip(prompts, run_steps(opened, prompts, pieces), strict=True):
        expected = oracle_logits(variant("qwen35").model(), prompt)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def saved_with(folder: Path, **changes: object) -> Checkpoint:
    """A folder whose config.json says something else."""
    variant("qwen35").save_safetensors(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return open_checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("attention_bias", True), ("attn_output_gate", False),
     ("output_gate_type", "sigmoid")],
)  # fmt: skip
def test_settings_that_are_not_supported_are_refused_by_name(
    tmp_path: Path, key: str, value: object
) -> None:
    with pytest.raises(ModelError, match=rf"hf\.{key} is {value!r}, which is not supported for"):
        describe(saved_with(tmp_path / "m", **{key: value}))


def test_rotary_scaling_is_refused_by_name(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}
    with pytest.raises(ModelError, match=r"rope\.scaling\.type is 'yarn', which is not supported"):
        describe(saved_with(tmp_path / "m", rope_parameters=rope))


def test_heads_that_do_not_share_evenly_are_refused(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, "qwen35", "gguf")
    config = describe(opened).config
    state = replace(config.layers[0].mixer, key_heads=4)
    changed = replace(config, layers=(replace(config.layers[0], mixer=state),))
    with pytest.raises(ModelError, match="6 value heads do not share 4 key heads evenly"):
        _check_states(opened, changed)


def test_a_layer_that_predicts_ahead_and_lacks_tensors_is_skipped_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = tmp_path / "plain.gguf"
    variant("qwen35").save_gguf(plain)
    with caplog.at_level(logging.INFO):
        skipping = open_checkpoint(with_extra_layer(plain, tmp_path / "extra.gguf"))
        assert len(describe(skipping).config.layers) == 8
    told = "the prediction head (MTP) is not used: it has no tensor layers.8.mtp.hidden_norm"
    assert told in caplog.text
    expected = run_steps(open_checkpoint(plain), [PROMPT[:20]], [[20]])[0]
    assert torch.equal(run_steps(skipping, [PROMPT[:20]], [[20]])[0], expected)


def with_extra_layer(plain: Path, path: Path) -> Path:
    """Write a copy with a ninth layer, as files with a prediction head have it."""
    reader, writer = gguf.GGUFReader(plain), gguf.GGUFWriter(path, "qwen35")
    for field in reader.fields.values():
        if field.name.startswith(("GGUF.", "general.architecture")):
            continue
        value = 9 if field.name == "qwen35.block_count" else field.contents()
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name in ("attn_q", "nextn.eh_proj", "nextn.enorm"):
        writer.add_tensor(f"blk.8.{name}.weight", np.zeros((32, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
