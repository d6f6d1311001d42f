"""Gemma 4: norms on both sides of every part; windows, shared caches, inputs of single layers."""

import numpy as np

from headroom.errors import ModelError
from headroom.families.config import (
    AttentionConfig,
    ExpertsConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from headroom.families.family import ANY, Family, model_config
from headroom.families.rope import check_scaling, plain_rope, proportional_rope, rope_settings
from headroom.families.tables import Dims, LayerKind
from headroom.formats.checkpoint import Checkpoint


def read_config(checkpoint: Checkpoint, dims: Dims) -> ModelConfig:
    """Read a Gemma 4 model's settings from either format."""
    metadata = checkpoint.metadata
    ropes = {
        kind: _rope(checkpoint, dims, kind) for kind in {dims.kind(i) for i in range(dims.layers)}
    }
    layers = tuple(
        LayerConfig(
            mixer=_attention(checkpoint, dims, index, ropes[dims.kind(index)]),
            ffn=FfnConfig(dims.ffn_width(index), "gelu"),
            experts=_experts(dims) if dims.experts else None,
            post_norms=True,
            side_width=dims.side_width,
            scaled=True,
        )
        for index in range(dims.layers)
    )
    key = "final_logit_softcapping"
    key = key if key in metadata else f"hf.{key}"
    return model_config(
        checkpoint,
        dims,
        layers,
        embed_scale=dims.hidden**0.5,
        keeps_embedding=True,
        softcap=metadata.get_float(key, 0.0),
    )


def _attention(checkpoint: Checkpoint, dims: Dims, index: int, rope: RopeConfig) -> AttentionConfig:
    full = dims.kind(index) == "full"
    return AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.full_kv_heads if full else dims.kv_heads,
        head_dim=dims.full_head_dim if full else dims.head_dim,
        rope=rope,
        scale=1.0,
        window=0 if full else dims.window,
        head_norms=True,
        value_norm=True,
        keys_are_values=full and dims.keys_are_values,
        shares=_owner(checkpoint, dims, index),
    )


def _owner(checkpoint: Checkpoint, dims: Dims, index: int) -> int | None:
    """Return the last layer of the same kind that has a cache, for a layer that has none."""
    owners = dims.layers - dims.shared_kv_layers
    if index < owners:
        return None
    for owner in reversed(range(owners)):
        if dims.kind(owner) == dims.kind(index):
            return owner
    raise ModelError(
        f"{checkpoint.path}: layer {index} has no cache of its own, and no earlier "
        f"{dims.kind(index)} layer has one."
    )


def _rope(checkpoint: Checkpoint, dims: Dims, kind: LayerKind) -> RopeConfig:
    settings = rope_settings(checkpoint, kind)
    if kind == "window":
        return plain_rope(settings, dims.head_dim)
    if checkpoint.format == "safetensors":
        return proportional_rope(settings, dims.full_head_dim)
    check_scaling(settings, "none")
    stored = checkpoint.tensors.get("rope_freqs")
    if stored is None:
        raise ModelError(f"{checkpoint.path} has no rope_freqs.weight, which full layers need.")
    divisors = tuple(np.frombuffer(stored.data(), dtype=np.float32).tolist())
    return RopeConfig(settings.get_float("rope.freq_base"), dims.full_head_dim, divisors)


def _experts(dims: Dims) -> ExpertsConfig:
    return ExpertsConfig(
        experts=dims.experts,
        used=dims.experts_used,
        width=dims.expert_ffn,
        expert_scales=True,
        activation="gelu",
    )


FIXED: dict[str, tuple[object, ...]] = {
    "hf.hidden_activation": ("gelu_pytorch_tanh",),
    "hf.attention_bias": (False,),
    "hf.use_bidirectional_attention": ("vision",),  # of pictures; text is causal
    "attention.sliding_window": ANY,
    "expert_gating_func": (1,),  # softmax
    "hf.rope_parameters": ANY,  # one table for each kind of layer
    "hf.final_logit_softcapping": ANY,
    "final_logit_softcapping": ANY,
}

GEMMA4 = Family("gemma4", read_config, FIXED)
