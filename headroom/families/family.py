"""Family: how one architecture's settings become a ModelConfig."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headroom.families.config import LayerConfig, ModelConfig
from headroom.families.tables import Dims
from headroom.formats.checkpoint import Checkpoint

ANY: tuple[object, ...] = ("any",)  # of a setting that a family reads itself
# Settings that change the arithmetic wherever they occur, with the values that change nothing. A
# family that has one says so in its own list.
USUAL: dict[str, tuple[object, ...]] = {
    "hf.attention_bias": (False,),
    "hf.mlp_bias": (False,),
    "hf.quantization_config": (),
    "hf.rope_parameters": (),  # several tables, one for each kind of layer
    "hf.rope_scaling": (),
    "hf.attn_logit_softcapping": (0,),
    "hf.final_logit_softcapping": (0,),
    "hf.moe_router_logit_softcapping": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "swiglu_limit": (0,),
    "expert_group_count": (0, 1),
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "rope.scaling.type": ("none", "default"),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.partial_rotary_factor": (1,),
    "hf.partial_rotary_factor": (1,),
    "hf.clip_qkv": (0,),
    "hf.attention_multiplier": (),
    "hf.embedding_multiplier": (1,),
    "hf.residual_multiplier": (1,),
    "hf.logits_scaling": (1,),
    "hf.no_rope_layers": (),
    "hf.n_group": (0, 1),
    "hf.scoring_func": (),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}


@dataclass(frozen=True, slots=True)
class Family:
    """A list of parts for every layer, and the settings that the family relies on.

    A family file has no torch in it: the planner reads it too. The parts say what to build,
    `load.py` builds them.
    """

    architecture: str  # GGUF's name
    read_config: Callable[[Checkpoint, Dims], ModelConfig]  # from sizes that the planner checked
    # Settings with the only values that the family's arithmetic covers; others are refused.
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


def model_config(
    checkpoint: Checkpoint, dims: Dims, layers: tuple[LayerConfig, ...], **more: Any
) -> ModelConfig:
    """Return a model of these layers with what all families read alike, and `more`."""
    metadata = checkpoint.metadata
    return ModelConfig(
        architecture=checkpoint.architecture,
        name=metadata.get_str("general.name", checkpoint.path.stem),
        hidden=dims.hidden,
        vocab=dims.vocab,
        norm_eps=metadata.get_float("attention.layer_norm_rms_epsilon"),
        context_limit=dims.context,
        tied=dims.tied,
        layers=layers,
        **more,
    )
