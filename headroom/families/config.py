"""The configuration of a model and of its blocks, as plain data without torch."""

from dataclasses import dataclass
from typing import Literal

# gelu in its tanh form; "clamped": gates and ups within limits, see `GatedActivationOp`
Activation = Literal["silu", "gelu", "clamped"]
# How the output of attention is gated: "none"; "query": by the sigmoid of values that the query
# projection has in addition to each head's query; "head" and "element": by the softplus of a
# separate projection, with one gate for each head or for each value.
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
    window: int = 0  # tokens that a token sees, itself included; 0: all before it
    interleaved: bool = False  # rotary pairs are rows 2i and 2i + 1 of a head, not i and i + D/2
    head_norms: bool = False  # queries and keys are normed head by head before they are rotated
    value_norm: bool = False  # values are normed head by head, without a weight
    gate: OutputGate = "none"
    keys_are_values: bool = False  # values are the keys before norm and rotation
    shares: int | None = None  # the layer whose cache this one reads; None: it has its own
    biases: bool = False  # of the projections to queries, keys and values
    out_bias: bool = False
    sinks: bool = False  # each head has a score that takes a share of softmax and has no value


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Gated linear attention with a state of fixed size instead of a cache."""

    key_heads: int
    value_heads: int
    head_dim: int  # of keys and of values
    conv: int  # tokens that the convolution sees, the current one included
    tiled: bool  # value head h reads key head h % key_heads, not h // (value_heads / key_heads)
    decay_is_log: bool  # delta.a holds log(-decay) and not the decay

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
    """Routed experts, and the shared expert of their layer if there is one."""

    experts: int
    used: int  # experts that one token visits
    width: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # the weights of the picked experts are divided by their sum
    scale: float = 1.0  # of the weights, after normalising
    softcap: float = 0.0  # router logits become softcap * tanh(logits / softcap); 0: they stay
    # The router and all matrices of routed experts have biases.
    biases: bool = False
    bias: bool = False  # a bias is added to scores for the top-k choice, not for the weights
    expert_scales: bool = False  # each weight is multiplied by a learned number of its expert, last
    activation: Activation = "silu"
    shared_width: int = 0  # width of the shared expert, which every token visits; 0: none
    shared_gate: bool = False  # the shared expert's output is multiplied by the sigmoid of its gate


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The parts of one layer."""

    mixer: AttentionConfig | DeltaNetConfig
    ffn: FfnConfig | None  # the dense part
    experts: ExpertsConfig | None = None  # instead of the dense part, or in addition to it
    post_norms: bool = False  # the output of each part is normed before it is added
    per_layer_width: int = 0  # values of the layer's own input per token, from a table; 0: none
    scaled: bool = False  # the residual stream is multiplied by a learned number at the end

    @property
    def plain(self) -> bool:
        """Whether the layer is a mixer and a dense part with silu, each after its norm."""
        more = self.experts is not None or self.post_norms or self.per_layer_width or self.scaled
        return not more and self.ffn is not None and self.ffn.activation == "silu"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything about a model but its weights."""

    architecture: str
    name: str
    hidden: int
    vocab: int
    norm_eps: float
    context_limit: int  # most positions that an engine can run
    tied: bool  # the head uses the embedding table
    layers: tuple[LayerConfig, ...]
    norm_offset: float = 0.0  # added to the weights of norms as the file holds them
    embed_scale: float = 1.0  # of embedded tokens
    keeps_embedding: bool = False  # layers beyond the first read the embedded tokens
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap); 0: they stay
    mtp: LayerConfig | None = None  # the layer behind the others that predicts further ahead

    @property
    def refuses_trees(self) -> str:
        """Why steps can verify only a chain of draft tokens and no tree; "" if they can verify
        trees.

        The answer does not need loaded weights.
        """
        recurrent = sum(isinstance(layer.mixer, DeltaNetConfig) for layer in self.layers)
        total = len(self.layers)
        why = f"{recurrent} of {total} layers are linear attention, with one state a sequence"
        return why if recurrent else ""


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft model, which reads features of a target model and guesses a block of tokens.

    It has neither embedding nor head: both are the target's.
    """

    name: str
    hidden: int  # also of the target
    vocab: int  # of the target; 0: the file does not say
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    causal: tuple[bool, ...]  # by layer: a token of the block does not see those after it
    block: int  # tokens of a block: the last known one, and masks in place of those to guess
    mask_token: int
    taps: tuple[int, ...]  # target layers whose outputs are the features, from 0
    target_layers: int  # layers of the target; 0: the file does not say
