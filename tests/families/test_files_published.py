"""Files as they are published: with parts for pictures, further predictions, fused experts."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from headroom.errors import ModelError
from headroom.families.files import open_checkpoint
from headroom.plan.describe import describe
from tests.families import family_configs as configs
from tests.families.oracles import PROMPT, oracle_logits, variant
from tests.running import run_steps

TOWER = {"hidden_size": 32, "intermediate_size": 32}
QWEN_TOWER = TOWER | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
GEMMA_TOWER = TOWER | {"num_hidden_layers": 1, "num_attention_heads": 2,
                       "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
# The text model, the class around it, its settings, and the part for pictures.
WRAPPED: dict[str, tuple[Callable[[], Any], Any, Any, dict[str, int]]] = {
    "qwen35": (configs.qwen35, Qwen3_5ForConditionalGeneration, Qwen3_5Config, QWEN_TOWER),
    "qwen35moe": (
        configs.qwen35_moe, Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig, QWEN_TOWER,
    ),
    "gemma4": (configs.gemma4_small, Gemma4ForConditionalGeneration, Gemma4Config, GEMMA_TOWER),
    "gemma4-moe": (configs.gemma4_moe, Gemma4ForConditionalGeneration, Gemma4Config, GEMMA_TOWER),
}  # fmt: skip


def save_wrapped(name: str, folder: Path) -> PreTrainedModel:
    """Save a model that sees pictures too; return its text model."""
    build, wrapper, config, tower = WRAPPED[name]
    text: PreTrainedModel = build()
    whole = wrapper._from_config(
        config(text_config=text.config.to_dict(), vision_config=tower), dtype=torch.float32
    )
    whole.model.language_model.load_state_dict(text.model.state_dict())
    if not text.config.tie_word_embeddings:
        whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(folder)
    return text


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_model_of_one_that_sees_pictures_equals_transformers(
    name: str, tmp_path: Path
) -> None:
    text = save_wrapped(name, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(key.startswith("model.language_model.") for key in names)
    assert any("vis" in key for key in names)
    logits = run_steps(open_checkpoint(tmp_path), [PROMPT], [[20, 1, 3]])[0]
    torch.testing.assert_close(logits, oracle_logits(text, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_a_head_in_safetensors_that_lacks_tensors_is_skipped_with_a_log_line(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = variant(name)
    path = found.save_safetensors(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    for key in ("fc.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"):
        tensors[f"mtp.{key}"] = torch.zeros(32, 64)
    save_file(tensors, path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    with caplog.at_level(logging.INFO):
        logits = run_steps(open_checkpoint(tmp_path), [PROMPT], [[24]])[0]
    told = "the prediction head (MTP) is not used: it has no tensor layers.8.mtp.embed_norm"
    assert told in caplog.text
    torch.testing.assert_close(logits, oracle_logits(found.model(), PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen3moe", "qwen35moe"])
def test_fused_experts_in_safetensors_equal_transformers(name: str, tmp_path: Path) -> None:
    found = variant(name)
    path = found.save_safetensors(tmp_path) / "model.safetensors"
    separate, fused = load_file(path), found.model().state_dict()
    tensors = {key: value for key, value in separate.items() if ".experts." not in key}
    tensors |= {key: value.contiguous() for key, value in fused.items() if ".experts." in key}
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors
    save_file(tensors, path)
    logits = run_steps(open_checkpoint(tmp_path), [PROMPT], [[24]])[0]
    torch.testing.assert_close(logits, oracle_logits(found.model(), PROMPT), atol=1e-4, rtol=0)


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
NESTED = {"full_attention": YARN, "sliding_attention": YARN}


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "qwen3moe", "qwen35", "qwen35moe"])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rope_parameters": YARN}, r"(rope\.scaling\.type is 'yarn', which|scaling 'yarn') is"),
        ({"rope_parameters": NESTED}, r"hf\.rope_parameters is \{'full_attention.* not supported"),
        ({"rope_scaling": "yarn"}, r"hf\.rope_scaling is 'yarn', which is not supported"),
        ({"attn_logit_softcapping": 50.0}, r"hf\.attn_logit_softcapping is 50\.0, which is not"),
        ({"final_logit_softcapping": 30.0}, r"hf\.final_logit_softcapping is 30\.0, which is not"),
        ({"clip_qkv": 8.0}, r"hf\.clip_qkv is 8\.0, which is not supported"),
        ({"logits_scaling": 8.0}, r"hf\.logits_scaling is 8\.0, which is not supported"),
        ({"mlp_bias": True}, r"hf\.mlp_bias is True, which is not supported"),
        ({"attention_bias": True}, r"hf\.attention_bias is True, which is not supported"),
    ],
)
def test_settings_that_change_the_arithmetic_are_refused_by_name(
    name: str, settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = variant(name).save_safetensors(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ModelError, match=told):
        describe(open_checkpoint(tmp_path))


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen35", "laguna", "gemma4-31b"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "longrope"),
        ("attn_logit_softcapping", 50.0),
        ("attention.scale", 0.25),
        ("logit_scale", 0.25),
        ("residual_scale", 0.5),
        ("embedding_scale", 2.0),
        ("rope.scale_linear", 4.0),
        ("swiglu_limit", 7.0),
        ("hidden_act", "gelu"),
    ],
)
def test_keys_of_gguf_that_change_the_arithmetic_are_refused_by_name(
    name: str, key: str, value: float | str, tmp_path: Path
) -> None:
    found = variant(name)
    plain, path = found.save_gguf(tmp_path / "plain.gguf"), tmp_path / "m.gguf"
    rewrite(plain, path, f"{found.architecture}.{key}", value)
    with pytest.raises(ModelError, match=rf"({key}|rotary scaling).*{value}.* is not supported"):
        describe(open_checkpoint(path))


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "qwen35", "laguna", "gemma4-31b"])
def test_values_of_another_length_than_keys_are_refused(name: str, tmp_path: Path) -> None:
    found = variant(name)
    plain, path = found.save_gguf(tmp_path / "plain.gguf"), tmp_path / "m.gguf"
    rewrite(plain, path, f"{found.architecture}.attention.value_length", 48)
    with pytest.raises(ModelError, match=r"attention\.value_length is 48 and .* values as long as"):
        describe(open_checkpoint(path))


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3moe", "qwen35"])
def test_windows_are_refused_where_a_family_has_none(name: str, tmp_path: Path) -> None:
    found = variant(name)
    plain, path = found.save_gguf(tmp_path / "plain.gguf"), tmp_path / "m.gguf"
    rewrite(plain, path, f"{found.architecture}.attention.sliding_window", 512)
    with pytest.raises(ModelError, match=r"attention\.sliding_window is 512, which is not"):
        describe(open_checkpoint(path))


def rewrite(plain: Path, path: Path, key: str, value: float | str) -> None:
    """Write a copy of a GGUF file in which a key has another value."""
    reader = gguf.GGUFReader(plain)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")) and field.name != key:
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    kinds[type(value)](key, value)  # type: ignore[operator]
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
