"""Mlp: the gated feed-forward block."""

import torch

from headroom.kernels.ops import GatedActivation
from headroom.kernels.registry import pick
from headroom.layers.linear import Linear
from headroom.layers.weights import WeightSource


class Mlp:
    """`down(silu(gate x) * up x)`."""

    def __init__(self, get: WeightSource) -> None:
        self._gate = Linear(get("ffn.gate"), get.case)
        self._up = Linear(get("ffn.up"), get.case)
        self._down = Linear(get("ffn.down"), get.case)
        self._activate: GatedActivation = pick("gated_activation", get.case).run

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for normed rows."""
        return self._down(self._activate(self._gate(x), self._up(x)))
