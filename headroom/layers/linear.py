"""Linear: one weight and the kernel that multiplies with it."""

from dataclasses import replace

import torch

from headroom.kernels.ops import Case, Matmul
from headroom.kernels.registry import pick
from headroom.kernels.weight import Weight


class Linear:
    """`x` times a weight's transpose."""

    def __init__(self, weight: Weight, case: Case) -> None:
        self._weight = weight
        self._dtype = case.dtype
        self._matmul: Matmul = pick("matmul", replace(case, quant=weight.quant)).run

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return `[rows, out]` for `x [rows, in]`, written to `out` if given."""
        return self._matmul(x, self._weight, self._dtype, out)
