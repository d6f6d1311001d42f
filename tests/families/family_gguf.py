"""Conversion of small models to GGUF, and back: names, row orders and settings of every family."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.families.family_keys import full_layers, plain_config, write_settings
from tests.optional import optional
from tests.tiny import add_vocabulary

gguf = optional("gguf")

ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "laguna": "laguna",
    "gemma3_text": "gemma3", "gemma4_text": "gemma4", "mistral": "mistral3",
    "ministral": "mistral3", "ministral3": "mistral3", "smollm3": "smollm3",
    "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe",
}  # fmt: skip
PRE_TOKENIZERS = {"qwen3": "qwen2", "qwen3moe": "qwen2", "laguna": "laguna"}
PRE_TOKENIZERS |= {"qwen35": "qwen35", "qwen35moe": "qwen35", "mistral3": "tekken"}
PRE_TOKENIZERS |= {"smollm3": "llama-bpe", "gpt-oss": "gpt-4o", "glm4moe": "glm4"}
# Families whose conversion puts the rows of rotary pairs side by side.
PAIRED = ("llama", "mistral3", "smollm3")

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
DELTA_NAMES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
LAGUNA_NAMES = {
    "self_attn.g_proj.weight": "attn_gate.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
GEMMA_NAMES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
}
GPT_OSS_NAMES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "mlp.experts.gate_up_proj_bias": "ffn_gate_up_exps.bias",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}
GLM4_NAMES = {
    **{name: ours for name, ours in LAGUNA_NAMES.items() if "g_proj" not in name},
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
}
OVERRIDES = {
    "glm4moe": GLM4_NAMES,
    "gpt-oss": GPT_OSS_NAMES,
    "qwen35": DELTA_NAMES, "qwen35moe": DELTA_NAMES, "laguna": LAGUNA_NAMES, "gemma3": GEMMA_NAMES,
    "gemma4": GEMMA_NAMES,
}  # fmt: skip
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
# Tensors that quantisers leave in F32, whatever they are asked for.
KEPT_IN_F32 = ("ffn_gate_inp", "ssm_conv1d", "_norm.", ".scale", ".bias", "output_scale")
# What "MIXED" gives by a whole name or by its end; others get Q8_0.
MIXED = {
    "ffn_gate.weight": "Q4_0", "ffn_up.weight": "Q4_0", "ffn_down.weight": "Q5_1",
    "ffn_gate_exps.weight": "Q4_0", "ffn_up_exps.weight": "Q4_0", "ffn_down_exps.weight": "Q5_0",
    "ffn_gate_up_exps.weight": "Q4_0", "attn_v.weight": "Q4_1", "attn_gate.weight": "Q4_0",
    "ssm_out.weight": "Q4_0", "per_layer_model_proj.weight": "F16",
}  # fmt: skip

Values = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Change:
    """What conversion does to a tensor, and how it is undone."""

    forward: Callable[[Values], Values]
    backward: Callable[[Values], Values]


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of transformers and the one or two of GGUF that hold its values."""

    theirs: str
    ours: tuple[str, ...]
    change: Change | None = None


def pieces(model: PreTrainedModel, fused: bool) -> Iterator[Piece]:
    """Yield how each tensor is converted; `fused` keeps experts' gate and up rows together."""
    config = plain_config(model)
    architecture = ARCHITECTURES[config.model_type]
    names = NAMES | OVERRIDES.get(architecture, {})
    for theirs in model.state_dict():
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if theirs in OUTER_NAMES:
            yield Piece(theirs, (OUTER_NAMES[theirs],), _change(theirs, config))
            continue
        _, _, layer, inner = theirs.split(".", 3)
        ours = names[inner]
        halves = [ours.replace("gate_up", part) for part in ("gate", "up")]
        split = halves if "gate_up" in ours and not fused else [ours]
        full_names = tuple(f"blk.{layer}.{name}" for name in split)
        yield Piece(theirs, full_names, _change(theirs, config))


def to_gguf(model: PreTrainedModel, fused: bool) -> dict[str, Values]:
    """Return a model's tensors by GGUF's names, in GGUF's orders."""
    state, tensors = model.state_dict(), {}
    for piece in pieces(model, fused):
        values = state[piece.theirs].float().numpy()
        if piece.change:
            values = np.ascontiguousarray(piece.change.forward(values))
        parts = np.split(values, len(piece.ours), axis=1) if len(piece.ours) > 1 else [values]
        tensors.update(zip(piece.ours, parts, strict=True))
    if model.config.model_type == "gemma4_text":
        tensors["rope_freqs.weight"] = _gemma_factors(plain_config(model))
    return tensors


def from_gguf(model: PreTrainedModel, tensors: dict[str, Values]) -> dict[str, torch.Tensor]:
    """Return the state that a GGUF file's tensors stand for."""
    fused, state = any("gate_up_exps" in name for name in tensors), {}
    for piece in pieces(model, fused):
        parts = [tensors[name] for name in piece.ours]
        values = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        if piece.change:
            values = piece.change.backward(values)
        state[piece.theirs] = torch.from_numpy(np.array(values, dtype=np.float32))
    return state


def write_gguf(
    model: PreTrainedModel, path: Path, quant: str, fused: bool, unused_keys: bool
) -> None:
    """Write a model; `quant` is a type of matrices, or MIXED for one by the kind of matrix.

    `unused_keys` gives layers that read another's cache keys and values of their own, as
    published files have them; nobody reads them.
    """
    config = plain_config(model)
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture}")
    write_settings(writer, config)
    add_vocabulary(writer, PRE_TOKENIZERS.get(architecture, "smollm"))
    tensors = to_gguf(model, fused) | (_unused_keys(config) if unused_keys else {})
    for name, values in tensors.items():
        kind = tensor_type(name, values, quant)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_type(name: str, values: Values, quant: str) -> Any:
    """Return the type that a tensor gets."""
    if values.ndim == 1 or any(part in name for part in KEPT_IN_F32):
        return gguf.GGMLQuantizationType.F32
    if quant == "MIXED":
        short = name.split(".", 2)[-1] if name.startswith("blk") else name
        quant = MIXED.get(name) or MIXED.get(short, "Q8_0")
    kind = gguf.GGMLQuantizationType[quant]
    fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return kind if fits else gguf.GGMLQuantizationType.F16


def read_gguf(path: Path) -> dict[str, Values]:
    """Return a file's tensors, dequantised, in PyTorch's shapes."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(
            [int(size) for size in reversed(tensor.shape)]
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


def _change(theirs: str, config: Any) -> Change | None:
    """Return what conversion does to a tensor's values; None where it does nothing."""
    if ARCHITECTURES[config.model_type] in PAIRED and theirs.endswith(
        ("q_proj.weight", "k_proj.weight")
    ):
        half = config.head_dim // 2
        return Change(partial(_pairs, before=(2, half)), partial(_pairs, before=(half, 2)))
    if config.model_type == "gpt_oss" and "mlp.experts" in theirs:
        return Change(*map(partial, (_usual_stack, _their_stack), (theirs, theirs)))
    less_one = "qwen3_5" in config.model_type or "gemma3" in config.model_type
    if less_one and "norm" in theirs and "linear_attn" not in theirs:
        return Change(lambda w: w + 1, lambda w: w - 1)
    if "qwen3_5" not in config.model_type:
        return None
    if theirs.endswith("shared_expert_gate.weight"):
        return Change(lambda w: w[0], lambda w: w.reshape(1, -1))
    part = theirs.rpartition("linear_attn.")[2]
    if part == theirs or part == "norm.weight":
        return None
    order, back = _value_orders(part, config)
    axis = 1 if part == "out_proj.weight" else 0
    if part == "A_log":
        return Change(lambda w: -np.exp(w[order]), lambda w: np.log(-w[back]))
    if part == "conv1d.weight":
        return Change(lambda w: w[order, 0], lambda w: w[back][:, None])
    return Change(lambda w: w.take(order, axis), lambda w: w.take(back, axis))


def _usual_stack(theirs: str, values: Values) -> Values:
    """Put rows of each expert's matrix first, and all gates before all ups."""
    values = values.swapaxes(1, 2) if values.ndim == 3 else values
    if "gate_up" not in theirs:
        return values
    return np.concatenate([values[:, ::2], values[:, 1::2]], axis=1)


def _their_stack(theirs: str, values: Values) -> Values:
    if "gate_up" in theirs:
        gates, ups = np.split(values, 2, axis=1)
        values = np.stack([gates, ups], axis=2).reshape(values.shape)
    return values.swapaxes(1, 2) if values.ndim == 3 else values


def _pairs(rows: Values, before: tuple[int, int]) -> Values:
    """Exchange the two counts that a head's rows are made of: rotary halves or rotary pairs."""
    return rows.reshape(-1, *before, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _value_orders(part: str, config: Any) -> tuple[Any, Any]:
    """Return where each value row comes from, grouped by key head or dealt out to them in turn."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size = config.linear_value_head_dim
    if part in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
        size = 1
    # GGUF's value head j * keys + key is transformers' head key * (values / keys) + j.
    rows = np.arange(values * size).reshape(keys, values // keys, size).swapaxes(0, 1).reshape(-1)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * keys * config.linear_key_head_dim
        rows = np.concatenate([np.arange(before), before + rows])
    return rows, np.argsort(rows)


def _unused_keys(config: Any) -> dict[str, Values]:
    tensors: dict[str, Values] = {}
    layers = config.num_hidden_layers
    for layer in range(layers - config.num_kv_shared_layers, layers):
        own = full_layers(config) if config.layer_types[layer] == "full_attention" else {}
        size = own.get("head_dim", config.head_dim)
        rows = size * own.get("num_key_value_heads", config.num_key_value_heads)
        for part in ("attn_k", "attn_v"):
            tensors[f"blk.{layer}.{part}.weight"] = np.ones((rows, config.hidden_size), np.float32)
        tensors[f"blk.{layer}.attn_k_norm.weight"] = np.ones(size, np.float32)
    return tensors


def _gemma_factors(config: Any) -> Values:
    """Return the divisors of full layers' frequencies; huge ones stop all but the first."""
    pairs = full_layers(config)["head_dim"] // 2
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    turning = int(share * pairs)
    return np.array([1.0] * turning + [1e30] * (pairs - turning), dtype=np.float32)
