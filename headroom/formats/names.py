"""Tensor names: what GGUF and safetensors call a tensor, and the one name used here."""

import re
from functools import cache
from typing import Literal

Format = Literal["gguf", "safetensors"]
Row = tuple[str, str, str]  # our name, GGUF's, safetensors'; "" where a format has no such tensor

# Names are without ".weight"; a name that ends in ".bias" becomes ours with "_bias" added.
MODEL_NAMES: tuple[Row, ...] = (
    ("embed", "token_embd", "embed_tokens"),
    ("norm", "output_norm", "norm"),
    ("head", "output", "lm_head"),
    ("rope_freqs", "rope_freqs", ""),
    # Gemma 4: inputs of every layer, from a table of their own.
    ("side.embed", "per_layer_token_embd", "embed_tokens_per_layer"),
    ("side.proj", "per_layer_model_proj", "per_layer_model_projection"),
    ("side.norm", "per_layer_proj_norm", "per_layer_projection_norm"),
    # DFlash drafts: features of the target on their way into the draft.
    ("features.proj", "fc", "fc"),
    ("features.norm", "enc.output_norm", "hidden_norm"),
)

# After "layers.N." in ours, "blk.N." in GGUF, "layers.N." in safetensors; {e} is an expert.
LAYER_NAMES: tuple[Row, ...] = (
    ("attn.norm", "attn_norm", "input_layernorm"),
    ("attn.q", "attn_q", "self_attn.q_proj"),
    ("attn.k", "attn_k", "self_attn.k_proj"),
    ("attn.v", "attn_v", "self_attn.v_proj"),
    ("attn.out", "attn_output", "self_attn.o_proj"),
    ("attn.q_norm", "attn_q_norm", "self_attn.q_norm"),
    ("attn.k_norm", "attn_k_norm", "self_attn.k_norm"),
    ("ffn.norm", "ffn_norm", "post_attention_layernorm"),
    ("ffn.gate", "ffn_gate", "mlp.gate_proj"),
    ("ffn.up", "ffn_up", "mlp.up_proj"),
    ("ffn.down", "ffn_down", "mlp.down_proj"),
    ("ffn.router", "ffn_gate_inp", "mlp.gate"),
    ("ffn.experts.gate", "ffn_gate_exps", ""),
    ("ffn.experts.up", "ffn_up_exps", ""),
    ("ffn.experts.gate_up", "ffn_gate_up_exps", "mlp.experts.gate_up_proj"),
    ("ffn.experts.down", "ffn_down_exps", "mlp.experts.down_proj"),
    ("ffn.experts.{e}.gate", "", "mlp.experts.{e}.gate_proj"),
    ("ffn.experts.{e}.up", "", "mlp.experts.{e}.up_proj"),
    ("ffn.experts.{e}.down", "", "mlp.experts.{e}.down_proj"),
    ("ffn.shared.gate", "ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn.shared.up", "ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn.shared.down", "ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn.shared.router", "ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
)

# Gated linear attention.
_DELTA_NAMES: tuple[Row, ...] = (
    ("ffn.norm", "post_attention_norm", "post_attention_layernorm"),
    ("delta.qkv", "attn_qkv", "linear_attn.in_proj_qkv"),
    ("delta.z", "attn_gate", "linear_attn.in_proj_z"),
    ("delta.beta", "ssm_beta", "linear_attn.in_proj_b"),
    ("delta.alpha", "ssm_alpha", "linear_attn.in_proj_a"),
    ("delta.conv", "ssm_conv1d", "linear_attn.conv1d"),
    ("delta.a", "ssm_a", "linear_attn.A_log"),  # GGUF holds -exp of it
    ("delta.dt", "ssm_dt", ""),
    ("delta.dt_bias", "", "linear_attn.dt_bias"),
    ("delta.norm", "ssm_norm", "linear_attn.norm"),
    ("delta.out", "ssm_out", "linear_attn.out_proj"),
)

# Rows of one architecture take the place of shared ones with the same name in the file.
LAYER_OVERRIDES: dict[str, tuple[Row, ...]] = {
    "qwen35": _DELTA_NAMES,
    "qwen35moe": _DELTA_NAMES,
    "laguna": (
        ("attn.gate", "attn_gate", "self_attn.g_proj"),
        ("ffn.score", "exp_probs_b", ""),
        ("ffn.score_bias", "", "mlp.experts.e_score_correction_bias"),
    ),
    "gemma4": (
        ("attn.post_norm", "post_attention_norm", "post_attention_layernorm"),
        ("ffn.norm", "ffn_norm", "pre_feedforward_layernorm"),
        ("ffn.post_norm", "post_ffw_norm", "post_feedforward_layernorm"),
        ("ffn.dense_post_norm", "post_ffw_norm_1", "post_feedforward_layernorm_1"),
        ("ffn.experts_post_norm", "post_ffw_norm_2", "post_feedforward_layernorm_2"),
        ("ffn.experts_norm", "pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
        ("ffn.router", "ffn_gate_inp", "router.proj"),
        ("ffn.router_scale", "ffn_gate_inp.scale", "router.scale"),
        ("ffn.experts_scale", "ffn_down_exps.scale", "router.per_expert_scale"),
        ("ffn.experts.gate_up", "ffn_gate_up_exps", "experts.gate_up_proj"),
        ("ffn.experts.down", "ffn_down_exps", "experts.down_proj"),
        ("side.gate", "inp_gate", "per_layer_input_gate"),
        ("side.proj", "proj", "per_layer_projection"),
        ("side.norm", "post_norm", "post_per_layer_input_norm"),
        ("scale", "layer_output_scale", "layer_scalar"),
    ),
}

_LAYER = {
    "gguf": re.compile(r"blk\.([0-9]+)\.(.+)"),
    "safetensors": re.compile(r"layers\.([0-9]+)\.(.+)"),
}
_OUR_LAYER = re.compile(r"layers\.[0-9]+\.")
_EXPERT = re.compile(r"(?<=\.experts\.)[0-9]+(?=\.)")
_MODEL_PREFIX = re.compile(r"\Amodel\.(language_model\.)?")


def canonical_name(name: str, architecture: str, format: Format) -> str:
    """Return our name of a tensor, or the file's own where the tables have none."""
    rest = _MODEL_PREFIX.sub("", name, count=1) if format == "safetensors" else name
    layer = _LAYER[format].fullmatch(rest)
    if layer is None:
        return _look_up(rest, _table("", format)) or name
    found = _look_up(layer[2], _table(architecture, format))
    return f"layers.{layer[1]}.{found}" if found else name


def file_name(name: str, architecture: str, expert: int | None = None) -> str:
    """Return what safetensors call a GGUF tensor, without the model's prefix and ".weight".

    `expert` asks for one of those that GGUF keeps in one stack.
    """
    ours = canonical_name(name, architecture, "gguf")
    layer = _OUR_LAYER.match(ours)
    before, rest = (layer[0], ours[layer.end() :]) if layer else ("", ours)
    if expert is not None:
        rest = rest.replace(".experts.", ".experts.{e}.")
    theirs = _inverse(architecture if layer else "")
    stem = theirs.get(rest) or f"{theirs[rest.removesuffix('_bias')]}.bias"
    return before + stem.replace("{e}", str(expert))


@cache
def _inverse(architecture: str) -> dict[str, str]:
    """Return safetensors' names by ours, of an architecture's layers or outside them."""
    return {ours: theirs for theirs, ours in _table(architecture, "safetensors").items()}


@cache
def _table(architecture: str, format: Format) -> dict[str, str]:
    """Return our names by the file's, of an architecture's layers or, for "", outside them."""
    rows = LAYER_NAMES + LAYER_OVERRIDES.get(architecture, ()) if architecture else MODEL_NAMES
    column = 1 if format == "gguf" else 2
    return {row[column]: row[0] for row in rows if row[column]}


def _look_up(name: str, table: dict[str, str]) -> str | None:
    stem, suffix = name.removesuffix(".weight"), ""
    if name.endswith(".bias"):
        stem, suffix = name.removesuffix(".bias"), "_bias"
    expert = _EXPERT.search(stem)
    found = table.get(_EXPERT.sub("{e}", stem, count=1))
    return found and found.replace("{e}", expert[0] if expert else "") + suffix
