"""Embedding and Head: tokens into the residual stream and out of it."""

from dataclasses import replace

import torch

from headroom.kernels.ops import Case, Embed
from headroom.kernels.registry import pick
from headroom.kernels.weight import Weight
from headroom.layers.linear import Linear
from headroom.layers.norm import RmsNorm
from headroom.layers.parts import part_of_step


class Embedding:
    """One row of a table per token."""

    def __init__(self, table: Weight, case: Case, scale: float = 1.0) -> None:
        self._table = table
        self._scale = scale
        # Of a table in host memory the host copies the rows: Triton's kernels do not read there.
        hosted = case.triton and table.data.device.type == "cpu" != case.place
        plain = case.reference or hosted
        case = replace(case, quant=table.quant, layout=table.layout, reference=plain)
        self._embed: Embed = pick("embed", case).run

    @part_of_step("other")
    def __call__(self, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write `[rows, hidden]` for token ids `[rows]` to `out`."""
        rows = self._embed(tokens, self._table, out)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)


class Head:
    """The final norm and the product with the vocabulary."""

    def __init__(self, norm: RmsNorm, weight: Weight, case: Case, softcap: float = 0.0) -> None:
        self._norm = norm
        self._softcap = softcap
        self._vocabulary = Linear(weight, case)

    @part_of_step("head")
    def __call__(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write logits `[rows, vocabulary]` for rows of the residual stream to `out`."""
        logits = self._vocabulary(self._norm(hidden), out)
        if not self._softcap:
            return logits
        return logits.div_(self._softcap).tanh_().mul_(self._softcap)
