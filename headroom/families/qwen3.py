"""Qwen3: Llama with queries and keys normed head by head."""

from headroom.families.config import (
    AttentionConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from headroom.families.family import Family, model_config
from headroom.families.tables import Dims
from headroom.formats.checkpoint import Checkpoint


def read_config(checkpoint: Checkpoint, dims: Dims) -> ModelConfig:
    """Read a dense Qwen3 model's settings from either format."""
    layer = LayerConfig(mixer=attention(checkpoint, dims), ffn=FfnConfig(dims.ffn))
    return model_config(checkpoint, dims, (layer,) * dims.layers)


def attention(checkpoint: Checkpoint, dims: Dims) -> AttentionConfig:
    """Return the attention that all layers of Qwen3 models have, dense or not."""
    metadata = checkpoint.metadata
    rotated = metadata.get_int("rope.dimension_count", dims.head_dim)
    return AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=RopeConfig(metadata.get_float("rope.freq_base"), rotated),
        scale=dims.head_dim**-0.5,
        head_norms=True,
    )


FIXED: dict[str, tuple[object, ...]] = {
    "hf.hidden_act": ("silu",),
    "hf.attention_bias": (False,),
    "hf.use_sliding_window": (False,),
    "rope.scaling.type": ("none", "default"),
}

QWEN3 = Family("qwen3", read_config, FIXED)
