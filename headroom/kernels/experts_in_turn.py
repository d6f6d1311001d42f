"""Routed experts one after another with the C++ module's products, where it has no kernel of all.

The fused kernel has neither biases nor clamped activations.
"""

from dataclasses import replace

import torch

from headroom.kernels.native import matmul
from headroom.kernels.ops import Case, ExpertTable
from headroom.kernels.reference.experts import sum_experts
from headroom.kernels.weight import PLAIN_TYPES, Weight

_PRODUCTS = {
    "f32": matmul.matmul_f32, "int24": matmul.matmul_int24, "int8": matmul.matmul_int8,
}  # fmt: skip


def refuses(case: Case) -> str | None:
    """Return why a case cannot run here; None if it can."""
    if case.dtype not in _PRODUCTS:
        return f"computes in {', '.join(_PRODUCTS)}, not {case.dtype}"
    reasons = (matmul.refuses(replace(case, quant=kind)) for kind in case.experts)
    return next((reason for reason in reasons if reason), None)


def prepare(table: ExpertTable) -> ExpertTable:
    """Return the experts in panels."""
    gate, up, down = (tuple(map(matmul.prepare, part)) for part in table.parts)
    return ExpertTable(gate, up, down, table.biases)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: ExpertTable,
    activation: str,
    dtype: str,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, summed from the best on."""
    return sum_experts(x, ids, weights, table, activation, dtype, _multiply)


def _multiply(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    kind = "f32" if weight.quant.name in PLAIN_TYPES else dtype
    return _PRODUCTS[kind](x, weight, dtype, out)
