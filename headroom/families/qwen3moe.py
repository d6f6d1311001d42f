"""Qwen3 with experts in every layer."""

from headroom.families import qwen3
from headroom.families.config import ExpertsConfig, LayerConfig, ModelConfig
from headroom.families.family import Family, model_config
from headroom.families.tables import Dims
from headroom.formats.checkpoint import Checkpoint


def read_config(checkpoint: Checkpoint, dims: Dims) -> ModelConfig:
    """Read a Qwen3 mixture of experts from either format."""
    layer = LayerConfig(
        mixer=qwen3.attention(checkpoint, dims), ffn=None, experts=experts(checkpoint, dims)
    )
    return model_config(checkpoint, dims, (layer,) * dims.layers)


def experts(checkpoint: Checkpoint, dims: Dims) -> ExpertsConfig:
    """Return the experts of every layer."""
    # GGUF has no key for it: those who write it do so for models that normalise.
    normalise = checkpoint.format == "gguf" or checkpoint.metadata.get_bool(
        "hf.norm_topk_prob", False
    )
    return ExpertsConfig(
        experts=dims.experts,
        used=dims.experts_used,
        width=dims.expert_ffn,
        normalise=normalise,
    )


FIXED: dict[str, tuple[object, ...]] = {
    **qwen3.FIXED,
    "hf.decoder_sparse_step": (1,),
    "hf.mlp_only_layers": ([],),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
}

QWEN3MOE = Family("qwen3moe", read_config, FIXED)
