"""Llama: grouped attention and a gated feed-forward network in every layer."""

import math

import numpy as np

from headroom.errors import ModelError
from headroom.families.config import (
    AttentionConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from headroom.families.family import ANY, Family, model_config
from headroom.families.tables import Dims
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.metadata import Metadata


def read_config(checkpoint: Checkpoint, dims: Dims) -> ModelConfig:
    """Read a Llama model's settings from either format."""
    metadata = checkpoint.metadata
    layer = LayerConfig(
        mixer=AttentionConfig(
            heads=dims.heads,
            kv_heads=dims.kv_heads,
            head_dim=dims.head_dim,
            rope=_rope(checkpoint, metadata.get_int("rope.dimension_count", dims.head_dim)),
            scale=dims.head_dim**-0.5,
            # GGUF conversion stores rotary pairs side by side, for this family only.
            interleaved=checkpoint.format == "gguf",
        ),
        ffn=FfnConfig(dims.ffn),
    )
    return model_config(checkpoint, dims, (layer,) * dims.layers)


def _rope(checkpoint: Checkpoint, dims: int) -> RopeConfig:
    metadata = checkpoint.metadata
    theta = metadata.get_float("rope.freq_base", 10000.0)
    return RopeConfig(theta, dims, _divisors(checkpoint, metadata, theta, dims))


def _divisors(
    checkpoint: Checkpoint, metadata: Metadata, theta: float, dims: int
) -> tuple[float, ...]:
    """What each rotary frequency is divided by; GGUF files carry it ready-made for Llama 3."""
    if stored := checkpoint.tensors.get("rope_freqs"):
        return tuple(np.frombuffer(stored.data(), dtype=np.float32).tolist())
    kind = metadata.get_str("rope.scaling.type", "none")
    if kind == "none":
        return ()
    factor = metadata.get_float("rope.scaling.factor")
    if kind == "linear":
        return (factor,) * (dims // 2)
    if kind == "llama3":
        return tuple(
            _llama3_divisor(theta ** (-2 * i / dims), metadata, factor) for i in range(dims // 2)
        )
    raise ModelError(
        f"{checkpoint.path}: rotary scaling {kind!r} is not supported for llama.",
        hint="Supported: none, linear, llama3.",
    )


def _llama3_divisor(frequency: float, metadata: Metadata, factor: float) -> float:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
    low = metadata.get_float("rope.scaling.low_freq_factor")
    high = metadata.get_float("rope.scaling.high_freq_factor")
    original = metadata.get_float("rope.scaling.original_context_length")
    turns = original * frequency / (2 * math.pi)  # full rotations within the original context
    blend = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1 / ((1 - blend) / factor + blend)


LLAMA = Family(
    architecture="llama",
    read_config=read_config,
    fixed={
        "hf.hidden_act": ("silu",),
        "hf.attention_bias": (False,),
        "hf.mlp_bias": (False,),
        "expert_count": (0,),
        "rope.scaling.type": ANY,  # its own refusal lists what it has
        "rope.scaling.factor": ANY,
    },
)
