"""RmsNorm: the norm before each block."""

import torch

from headroom.kernels.ops import Case
from headroom.kernels.ops import RmsNorm as RmsNormOp
from headroom.kernels.registry import pick


class RmsNorm:
    """Scales each row to unit mean square, then by a weight per column."""

    def __init__(self, weight: torch.Tensor, eps: float, case: Case) -> None:
        self._weight = weight
        self._eps = eps
        self._norm: RmsNormOp = pick("rms_norm", case).run

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed rows."""
        return self._norm(x, self._weight, self._eps)
