"""Linear: one weight and the kernel that multiplies with it."""

import torch

from headroom.kernels.ops import Case, Matmul
from headroom.kernels.registry import pick
from headroom.kernels.weight import Weight, plain_type


class Linear:
    """`x` times a weight's transpose."""

    def __init__(self, weight: Weight, dtype: str) -> None:
        self._weight = weight
        self._dtype = plain_type(dtype)
        case = Case(device=weight.data.device.type, quant=weight.quant, dtype=dtype)
        self._matmul: Matmul = pick("matmul", case).run

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[rows, out]` for `x [rows, in]`."""
        return self._matmul(x, self._weight, self._dtype)
