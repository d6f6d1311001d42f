"""Block: norm, mixer, norm, feed-forward, each added to the residual stream."""

from typing import Protocol

import torch

from headroom.layers.batch import Batch
from headroom.layers.norm import RmsNorm


class Layer(Protocol):
    """One layer of a model: the residual stream in, the residual stream out."""

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor: ...


class Mixer(Protocol):
    """Mixes the rows of each sequence: attention or a recurrent layer."""

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor: ...


class Ffn(Protocol):
    """Changes each row on its own: a plain network or a choice of experts."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Block:
    """One layer of a model."""

    def __init__(self, mixer_norm: RmsNorm, mixer: Mixer, ffn_norm: RmsNorm, ffn: Ffn) -> None:
        self._mixer_norm = mixer_norm
        self._mixer = mixer
        self._ffn_norm = ffn_norm
        self._ffn = ffn

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the residual stream after this layer."""
        x = x + self._mixer(self._mixer_norm(x), batch)
        return x + self._ffn(self._ffn_norm(x))
