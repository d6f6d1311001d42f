"""Mlp: the gated feed-forward block."""

import torch

from headroom.families.config import Activation
from headroom.kernels.ops import GatedActivation
from headroom.kernels.registry import pick
from headroom.layers.linear import Linear
from headroom.layers.parts import part_of_step
from headroom.layers.weights import WeightSource


class Mlp:
    """`down(act(gate x) * up x)`."""

    def __init__(self, get: WeightSource, activation: Activation, prefix: str = "ffn.") -> None:
        self._gate = Linear(get(f"{prefix}gate"), get.case)
        self._up = Linear(get(f"{prefix}up"), get.case)
        self._down = Linear(get(f"{prefix}down"), get.case)
        self._activation = activation
        self._activate: GatedActivation = pick("gated_activation", get.case).run

    @part_of_step("dense")
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for normed rows."""
        return self._down(self._activate(self._gate(x), self._up(x), self._activation))
