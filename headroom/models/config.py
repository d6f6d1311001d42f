"""ModelConfig: a model as plain data, its layers as lists of parts."""

from dataclasses import dataclass

from headroom.layers.config import AttentionConfig, DeltaNetConfig, ExpertsConfig, FfnConfig


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
