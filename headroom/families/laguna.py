"""Laguna: gated attention, mostly in windows; routed experts after the first layers."""

from headroom.families.config import (
    AttentionConfig,
    ExpertsConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from headroom.families.family import ANY, Family, model_config
from headroom.families.rope import plain_rope, rope_kind, rope_settings, yarn_rope
from headroom.families.tables import Dims, LayerKind
from headroom.formats.checkpoint import Checkpoint


def read_config(checkpoint: Checkpoint, dims: Dims) -> ModelConfig:
    """Read a Laguna model's settings from either format."""
    used = {dims.kind(index) for index in range(dims.layers)}
    mixers = {kind: _attention(checkpoint, dims, kind) for kind in used}
    experts = _experts(checkpoint, dims) if dims.dense_layers < dims.layers else None
    layers = tuple(
        LayerConfig(
            mixer=mixers[dims.kind(index)],
            ffn=FfnConfig(dims.ffn) if index < dims.dense_layers else None,
            experts=None if index < dims.dense_layers else experts,
        )
        for index in range(dims.layers)
    )
    return model_config(checkpoint, dims, layers)


def _attention(checkpoint: Checkpoint, dims: Dims, kind: LayerKind) -> AttentionConfig:
    full = kind == "full"
    return AttentionConfig(
        heads=dims.heads if full else dims.window_heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=_rope(checkpoint, dims.head_dim, kind),
        scale=dims.head_dim**-0.5,
        window=0 if full else dims.window,
        head_norms=True,
        gate="element" if dims.gate_each_value else "head",
    )


def _rope(checkpoint: Checkpoint, head_dim: int, kind: LayerKind) -> RopeConfig:
    settings = rope_settings(checkpoint, kind)
    scaled = kind == "full" and rope_kind(settings) != "none"
    return yarn_rope(settings, head_dim) if scaled else plain_rope(settings, head_dim)


def _experts(checkpoint: Checkpoint, dims: Dims) -> ExpertsConfig:
    metadata = checkpoint.metadata
    key = "expert_weights_scale"
    key = key if key in metadata else "hf.moe_routed_scaling_factor"
    cap = "router_logit_softcapping"
    cap = cap if cap in metadata else f"hf.moe_{cap}"
    return ExpertsConfig(
        experts=dims.experts,
        used=dims.experts_used,
        width=dims.expert_ffn,
        scores="sigmoid",
        scale=metadata.get_float(key, 1.0),
        softcap=metadata.get_float(cap, 0.0),
        bias=True,
        shared_width=dims.shared_ffn,
    )


FIXED: dict[str, tuple[object, ...]] = {
    "hf.hidden_act": ("silu",),
    "hf.attention_bias": (False,),
    "hf.gating": (True, "per-head", "per-element"),
    "hf.moe_apply_router_weight_on_input": (False,),
    "expert_gating_func": (2,),  # sigmoid
    "expert_weights_norm": (True,),
    "expert_shared_count": (1,),
    "attention.sliding_window": ANY,
    "rope.scaling.type": ANY,
    "rope.scaling.factor": ANY,
    "hf.norm_topk_prob": (True,),
    "hf.rope_parameters": ANY,  # one table for each kind of layer
    "hf.moe_router_logit_softcapping": ANY,
    "router_logit_softcapping": ANY,
}

LAGUNA = Family("laguna", read_config, FIXED)
