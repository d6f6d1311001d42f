"""Family: the type of a family file's content, which is all that is particular to one family.

A family file imports no torch, and numpy only to synthesise: the planner must start fast.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from headroom.families.config import DraftConfig, LayerConfig, ModelConfig
from headroom.families.dims import Dims, Facts, LayerDims, Tensors
from headroom.families.tensors import outer_tensors
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata
from headroom.formats.names import Naming

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float32]]

Json = dict[str, Any]
FixedSettings = Mapping[str, tuple[object, ...]]  # values that a family covers, by key

ANY: tuple[object, ...] = ("any",)  # for a setting whose value is checked by the family's own code
# Settings that change the arithmetic of any family, with the values that change nothing. A family
# that implements one of them lists it in its own `fixed`.
USUAL: FixedSettings = {
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
class Yarn:
    """How YaRN stretches the rotary angles to a longer context."""

    factor: float
    original: int  # positions before stretching
    beta_fast: float
    attention_factor: float | None  # of cos and sin; None: by YaRN's formula


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A synthesised model: its dimensions and the numbers of its arithmetic."""

    name: str
    dims: Dims
    eps: float = 1e-6
    theta: float = 1e6  # of full layers
    window_theta: float = 1e4  # of layers with a window, where it differs
    rope_dims: int  # rotated values of a full layer's head
    yarn: Yarn | None = None
    linear_factor: float = 1.0  # by which positions of full layers are divided
    routed_scale: float = 1.0  # of the experts' sum
    softcap: float = 0.0  # of logits
    taps: tuple[int, ...] = ()  # target layers that a draft reads, from 0

    @property
    def family(self) -> str:
        """GGUF's name of the architecture."""
        return self.dims.architecture

    @property
    def sections(self) -> tuple[int, int, int]:
        """How many frequencies time, height and width have, where positions have three parts."""
        half = self.rope_dims // 2
        third = -(-half // 3)
        return third, third, half - 2 * third


def plain_recipe(name: str, dims: Dims) -> Recipe:
    """Return a recipe with the usual numbers, and whole heads rotated."""
    return Recipe(name=name, dims=dims, rope_dims=dims.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerKind:
    """How a family's tokenizer is synthesised."""

    model: str  # tokenizer.ggml.model
    pre: str  # tokenizer.ggml.pre
    template: str  # the chat template
    special: tuple[str, ...] = ()  # special tokens in the order of their ids, from `start`
    start: int = 0  # id of the first special token in the real model
    places: Mapping[int, str] = field(default_factory=dict)  # special tokens by id, not in a row
    shown: frozenset[str] = frozenset()  # special tokens that are text and not control
    roles: Mapping[str, str]  # "bos", "eos" ... to tokens
    add_bos: bool = False


def _same_shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


def _same_values(part: str, dims: Dims) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsLayout:
    """How tensors of a family's GGUF table lie in its safetensors.

    A tensor's `part` is its GGUF name without layer and ending, such as "attn_q".
    """

    prefix: str = "model."  # of all names but the head's
    bare: tuple[str, ...] = ()  # ends of names that have no ".weight"
    stacked_experts: bool = False  # whether all experts of a layer are one tensor
    shape: Callable[[str, tuple[int, ...]], tuple[int, ...]] = _same_shape
    # Undoes what the conversion to GGUF does to the values of a part; None: nothing is undone.
    undo: Callable[[str, Dims], "Callable[[Floats], Floats] | None"] = _same_values


def _no_config(recipe: Recipe, tokens: Json) -> Json:
    return {}


def _no_keys(recipe: Recipe) -> Json:
    return {}


def _same_recipe(recipe: Recipe, metadata: Metadata) -> Recipe:
    return recipe


def _usual_vector(name: str, normal: "Floats", source: "np.random.Generator") -> "Floats | None":
    return None


def _usual_spread(name: str, dims: Dims) -> float | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """How a checkpoint of the family is synthesised, where families differ."""

    model_class: str  # transformers' class of the text model
    model_type: str  # in config.json
    # Small models for tests by name: every kind of layer, rows of whole 256-value blocks, short
    # windows. The first is called "tiny".
    tiny: Mapping[str, Dims]
    tokenizer: Callable[[int], TokenizerKind]  # for a vocabulary of so many tokens
    recipe: Callable[[str, Dims], Recipe] = plain_recipe  # numbers that the real files have
    # Completes a recipe with a config.json's keys that only this family has.
    from_config: Callable[[Recipe, Metadata], Recipe] = _same_recipe
    # The family's additional entries of config.json, from the recipe and the special tokens' ids.
    config: Callable[[Recipe, Json], Json] = _no_config
    keys: Callable[[Recipe], Json] = _no_keys  # the family's additional GGUF keys, without prefix
    layout: SafetensorsLayout = SafetensorsLayout()
    last_layer_is_full: bool = False  # also if a model is cut to its first layers
    # How a synthesised router is made to prefer some experts: "beacon" by a constant in the
    # hidden state, "bias" by the router's own bias; "": not at all.
    skew: Literal["", "beacon", "bias"] = ""
    router_bias: str = ""  # GGUF's name of that bias in a layer
    # Values of a tensor that stays in f32, made from normal noise; None: the usual ones.
    vector: Callable[[str, "Floats", "np.random.Generator"], "Floats | None"] = _usual_vector
    # Standard deviation of a matrix's values; None: the usual one.
    spread: Callable[[str, Dims], float | None] = _usual_spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture: its names, sizes, parts, limits, and how it is synthesised."""

    naming: Naming  # of the model and its tensors, in both formats
    read_dims: Callable[[Facts], Dims]  # from a header's settings
    layer: Callable[[Dims, int], LayerDims]  # the tensors of a layer
    outer: Callable[[Dims], Tensors] = outer_tensors  # the tensors outside the layers
    # Tensors outside the layers of which only rows are read; the token table is not listed.
    lookup_tables: tuple[str, ...] = ()
    # How names of tensors begin that files have and that are not loaded ("model." may stand before
    # them), such as parts for pictures and sound.
    unused_parts: tuple[str, ...] = ()
    # The parts of every layer, from settings and checked sizes; None: a draft, which does not run
    # alone.
    read_config: Callable[[ModelHeader, Dims], ModelConfig] | None
    # Of a draft: its parts, for a target of so many layers.
    read_draft: Callable[[ModelHeader, Dims, int], DraftConfig] | None = None
    # Settings with the only values that the family's arithmetic covers; others are refused.
    fixed: FixedSettings = field(default_factory=dict)
    # Why no GPU runs the family, as the end of a sentence; "" if GPUs run it.
    cpu_only: str = ""
    keeps_embedding: bool = False  # layers beyond the first read the embedded tokens
    known: Mapping[str, Dims] = field(default_factory=dict)  # published models by name
    synthesis: Synthesis

    @property
    def architecture(self) -> str:
        """GGUF's name of the architecture."""
        return self.naming.architecture

    @property
    def has_mtp(self) -> bool:
        """Whether models of the family may have a layer that predicts further ahead."""
        return bool(self.naming.mtp_names)

    def leaves_out(self, tensor: str) -> bool:
        """Return whether a tensor of the family's files is not loaded."""
        return tensor.removeprefix("model.").startswith(self.unused_parts)


def model_config(
    header: ModelHeader, dims: Dims, layers: tuple[LayerConfig, ...], **more: Any
) -> ModelConfig:
    """Return the configuration of a model of these layers; `more` are a family's own fields."""
    return ModelConfig(
        architecture=header.architecture,
        name=header.name,
        hidden=dims.hidden,
        vocab=dims.vocab,
        norm_eps=header.metadata.get_float("attention.layer_norm_rms_epsilon"),
        context_limit=dims.context,
        tied=dims.tied,
        layers=layers,
        **more,
    )
