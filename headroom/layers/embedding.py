"""Embedding and Head: tokens into the residual stream and out of it."""

import torch

from headroom.kernels.ops import Case, Embed
from headroom.kernels.registry import pick
from headroom.kernels.weight import Weight
from headroom.layers.linear import Linear
from headroom.layers.norm import RmsNorm


class Embedding:
    """One row of a table per token."""

    def __init__(self, table: Weight) -> None:
        self._table = table
        case = Case(device=table.data.device.type, quant=table.quant)
        self._embed: Embed = pick("embed", case).run

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `[rows, hidden]` for token ids `[rows]`."""
        return self._embed(tokens, self._table)


class Head:
    """The final norm and the product with the vocabulary."""

    def __init__(self, norm: RmsNorm, weight: Weight, dtype: str) -> None:
        self._norm = norm
        self._vocabulary = Linear(weight, dtype)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` for rows of the residual stream."""
        return self._vocabulary(self._norm(hidden))
