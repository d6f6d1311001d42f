"""The modules that blocks are built from: linear, norm, feed-forward network, embedding, head.

Each module holds its weights and the kernel that it picked for them when it was built.
"""

from dataclasses import replace

import torch

from headroom.families.config import Activation
from headroom.kernels.ops import Case, EmbedOp, GatedActivationOp, MatmulOp, RmsNormOp
from headroom.kernels.registry import pick
from headroom.kernels.weight import Weight
from headroom.layers.step_timing import part_of_step
from headroom.layers.weights import WeightSource


class Linear:
    """Multiplies rows by the transpose of a weight, and adds a bias if there is one."""

    def __init__(self, weight: Weight, case: Case, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias  # [out]
        self._dtype = case.dtype
        self._matmul: MatmulOp = pick("matmul", replace(case, quant=weight.quant)).run

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return `[rows, out]` for `x [rows, in]`, written to `out` if given."""
        product = self._matmul(x, self._weight, self._dtype, out)
        return product if self._bias is None else product.add_(self._bias)


class RmsNorm:
    """Scales each row to unit mean square, then by a weight per column."""

    def __init__(self, weight: torch.Tensor, eps: float, case: Case) -> None:
        self._weight = weight
        self._eps = eps
        self._norm: RmsNormOp = pick("rms_norm", case).run

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed rows."""
        return self._norm(x, self._weight, self._eps)


class Mlp:
    """The gated feed-forward network: `down(act(gate x) * up x)`."""

    def __init__(self, get: WeightSource, activation: Activation, prefix: str = "ffn.") -> None:
        self._gate = Linear(get(f"{prefix}gate"), get.case)
        self._up = Linear(get(f"{prefix}up"), get.case)
        self._down = Linear(get(f"{prefix}down"), get.case)
        self._activation = activation
        self._activate: GatedActivationOp = pick("gated_activation", get.case).run

    @part_of_step("dense")
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output for normed rows."""
        return self._down(self._activate(self._gate(x), self._up(x), self._activation))


class Embedding:
    """Looks up one row of a table per token."""

    def __init__(self, table: Weight, case: Case, scale: float = 1.0) -> None:
        self._table = table
        self._scale = scale
        # Triton kernels cannot read a table in host memory; the host copies its rows instead.
        hosted = case.triton and table.data.device.type == "cpu" != case.torch_device
        plain = case.reference or hosted
        case = replace(case, quant=table.quant, layout=table.layout, reference=plain)
        self._embed: EmbedOp = pick("embed", case).run

    @part_of_step("other")
    def __call__(self, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write `[rows, hidden]` for token ids `[rows]` to `out` and return it."""
        rows = self._embed(tokens, self._table, out)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)


class Head:
    """The final norm, and the product with the vocabulary matrix."""

    def __init__(self, norm: RmsNorm, weight: Weight, case: Case, softcap: float = 0.0) -> None:
        self.norm = norm
        self._softcap = softcap  # logits lie between -softcap and softcap; 0: no limit
        self._vocabulary = Linear(weight, case)

    @part_of_step("head")
    def __call__(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write logits `[rows, vocabulary]` for rows of the residual stream to `out`."""
        return self.product(self.norm(hidden), out)

    def product(self, normed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write logits for rows after the final norm to `out`."""
        logits = self._vocabulary(normed, out)
        if not self._softcap:
            return logits
        return logits.div_(self._softcap).tanh_().mul_(self._softcap)
