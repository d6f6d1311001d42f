"""What each block needs to know, as plain data: the planner reads it without torch."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu"]  # gelu in its tanh form
# How attention's output is gated: not at all; by the sigmoid of values that come with the queries,
# head by head; by the softplus of a projection, one value a head or one a value.
OutputGate = Literal["none", "query", "head", "element"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `dims` values of a head."""

    theta: float
    dims: int
    divisors: tuple[float, ...] = ()  # of the dims / 2 frequencies; empty: all one
    scale: float = 1.0  # of cos and sin


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float  # of scores, before softmax
    window: int = 0  # last tokens that a token sees; 0: all
    interleaved: bool = False  # q and k rows come in rotary pairs (2i, 2i + 1), not in halves
    head_norms: bool = False  # queries and keys are normed head by head before they are rotated
    value_norm: bool = False  # values are normed head by head, without a weight
    gate: OutputGate = "none"
    keys_are_values: bool = False  # values are the keys before norm and rotation
    shares: int | None = None  # the layer whose cache is read; this one has none


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Gated linear attention with a state of fixed size instead of a cache."""

    key_heads: int
    value_heads: int
    head_dim: int  # of keys and of values
    conv: int  # tokens that the convolution sees, the current one included
    tiled: bool  # value head h reads key head h % key_heads, not h // (value_heads / key_heads)
    decay_is_log: bool  # delta.a holds the logarithm of minus the decay, not the decay

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return (2 * self.key_heads + self.value_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class FfnConfig:
    """A gated feed-forward network: `down(act(gate x) * up x)`."""

    width: int
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Routed experts, and what stands beside them in their layer."""

    experts: int
    used: int  # experts that one token visits
    width: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # weights of the chosen ones are divided by their sum
    scale: float = 1.0  # of the weights, after that
    softcap: float = 0.0  # router logits become softcap * tanh(logits / softcap); 0: they stay
    bias: bool = False  # added to scores for the choice, not for the weights
    expert_scales: bool = False  # weights are multiplied by a number of each expert, at the end
    activation: Activation = "silu"
    shared_width: int = 0  # of the expert that every token visits; 0: there is none
    shared_gate: bool = False  # it is weighted by a sigmoid of its own


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The parts of one layer."""

    mixer: AttentionConfig | DeltaNetConfig
    ffn: FfnConfig | None  # the dense part
    experts: ExpertsConfig | None = None  # instead of the dense part, or beside it
    post_norms: bool = False  # what a part gives is normed before it is added
    side_width: int = 0  # values of this layer's own input from each token; 0: it has none
    scaled: bool = False  # the residual stream is multiplied by a number at the end

    @property
    def plain(self) -> bool:
        """Whether the layer is a mixer and a dense part with silu, each after its norm."""
        more = self.experts is not None or self.post_norms or self.side_width or self.scaled
        return not more and self.ffn is not None and self.ffn.activation == "silu"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything about a model but its weights."""

    architecture: str
    name: str
    hidden: int
    vocab: int
    norm_eps: float
    context_limit: int  # positions the model was made for
    tied: bool  # the head uses the embedding table
    layers: tuple[LayerConfig, ...]
    norm_offset: float = 0.0  # added to the weights of norms, where a file holds less than them
    embed_scale: float = 1.0  # of embedded tokens
    keeps_embedding: bool = False  # layers beyond the first read the embedded tokens
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap); 0: they stay

    @property
    def refuses_trees(self) -> str:
        """Why steps cannot check a draft tree, a chain alone; "" where they can.

        Known before anything is loaded.
        """
        recurrent = sum(isinstance(layer.mixer, DeltaNetConfig) for layer in self.layers)
        total = len(self.layers)
        why = f"{recurrent} of {total} layers are linear attention, with one state a sequence"
        return why if recurrent else ""
