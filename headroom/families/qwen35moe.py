"""Qwen3.5 and 3.6 with routed experts and a gated shared one in every layer."""

from headroom.families import qwen35
from headroom.families.config import ExpertsConfig, LayerConfig, ModelConfig
from headroom.families.family import Family, model_config
from headroom.families.tables import Dims
from headroom.formats.checkpoint import Checkpoint


def read_config(checkpoint: Checkpoint, dims: Dims) -> ModelConfig:
    """Read a Qwen3.5 mixture of experts from either format."""
    layers = tuple(
        LayerConfig(mixer=qwen35.mixer(checkpoint, dims, index), ffn=None, experts=experts(dims))
        for index in range(dims.layers)
    )
    return model_config(checkpoint, dims, layers, norm_offset=qwen35.norm_offset(checkpoint))


def experts(dims: Dims) -> ExpertsConfig:
    """Return the experts of every layer; weights of the chosen ones always sum to one."""
    return ExpertsConfig(
        experts=dims.experts,
        used=dims.experts_used,
        width=dims.expert_ffn,
        shared_width=dims.shared_ffn,
        shared_gate=True,
    )


FIXED: dict[str, tuple[object, ...]] = {
    **qwen35.FIXED,
    "hf.norm_topk_prob": (True,),
    "hf.decoder_sparse_step": (1,),
    "hf.mlp_only_layers": ([],),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
}

QWEN35MOE = Family("qwen35moe", read_config, FIXED)
