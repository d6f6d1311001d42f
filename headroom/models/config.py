"""ModelConfig: a model as plain data, its layers as lists of parts."""

from collections.abc import Iterator
from dataclasses import dataclass

from headroom.layers.config import AttentionConfig, FfnConfig, Shapes


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The parts of one layer."""

    attention: AttentionConfig
    ffn: FfnConfig

    def shapes(self, hidden: int) -> Shapes:
        """Return the layer's weights."""
        return self.attention.shapes(hidden) | self.ffn.shapes(hidden)


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

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of every weight the model needs."""
        yield "embed", (self.vocab, self.hidden)
        yield "norm", (self.hidden,)
        if not self.tied:
            yield "head", (self.vocab, self.hidden)
        for index, layer in enumerate(self.layers):
            for name, shape in layer.shapes(self.hidden).items():
                yield f"layers.{index}.{name}", shape
