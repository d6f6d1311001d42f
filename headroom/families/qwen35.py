"""Qwen3.5 and 3.6: gated linear attention, with gated full attention in every fourth layer."""

from headroom.families.config import (
    AttentionConfig,
    DeltaNetConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from headroom.families.family import ANY, Family, model_config
from headroom.families.tables import Dims
from headroom.formats.checkpoint import Checkpoint


def read_config(checkpoint: Checkpoint, dims: Dims) -> ModelConfig:
    """Read a dense Qwen3.5 model's settings from either format."""
    layers = tuple(
        LayerConfig(mixer=mixer(checkpoint, dims, index), ffn=FfnConfig(dims.ffn))
        for index in range(dims.layers)
    )
    return model_config(checkpoint, dims, layers, norm_offset=norm_offset(checkpoint))


def mixer(checkpoint: Checkpoint, dims: Dims, index: int) -> AttentionConfig | DeltaNetConfig:
    """Return the mixer of a layer, in dense models and in those with experts."""
    from_gguf = checkpoint.format == "gguf"
    if dims.kind(index) == "recurrent":
        return DeltaNetConfig(
            key_heads=dims.state_key_heads,
            value_heads=dims.state_heads,
            head_dim=dims.state_dim,
            conv=dims.conv,
            # GGUF conversion deals value heads out to key heads in turn, and stores the decay.
            tiled=from_gguf,
            decay_is_log=not from_gguf,
        )
    theta = checkpoint.metadata.get_float("rope.freq_base")
    return AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=RopeConfig(theta, _rotary_dims(checkpoint, dims)),
        scale=dims.head_dim**-0.5,
        head_norms=True,
        gate="query",
    )


def norm_offset(checkpoint: Checkpoint) -> float:
    """Return what is added to norms' weights: GGUF conversion has done it already."""
    return 0.0 if checkpoint.format == "gguf" else 1.0


def _rotary_dims(checkpoint: Checkpoint, dims: Dims) -> int:
    """The values of a head that are rotated, a quarter where the file does not say."""
    metadata = checkpoint.metadata
    key = "rope.scaling.partial_rotary_factor"
    key = key if key in metadata else "hf.partial_rotary_factor"
    share = metadata.get_float(key, 0.25)
    return metadata.get_int("rope.dimension_count", int(dims.head_dim * share))


FIXED: dict[str, tuple[object, ...]] = {
    "hf.hidden_act": ("silu",),
    "hf.attention_bias": (False,),
    "hf.attn_output_gate": (True,),
    "hf.output_gate_type": ("swish", "silu"),
    "rope.scaling.type": ("none", "default"),
    "rope.scaling.partial_rotary_factor": ANY,
    "hf.partial_rotary_factor": ANY,  # the older place of it
}

QWEN35 = Family("qwen35", read_config, FIXED)
