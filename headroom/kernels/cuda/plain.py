"""Products with plain weights on a GPU: operands in bf16, sums in float32."""

from dataclasses import replace

import torch

from headroom.formats.quants import BF16
from headroom.kernels.cuda.compile import refuses_device
from headroom.kernels.ops import Case
from headroom.kernels.weight import PLAIN_TYPES, Weight

PADDED_ROWS = 32  # the library sums in an order of the rows' number: few are filled up to this


def refuses(case: Case) -> str | None:
    """Say why a case cannot run here."""
    if reason := refuses_device(case):
        return reason
    if case.quant.name not in PLAIN_TYPES:
        return f"{case.quant} is packed"
    return None if case.dtype == "bf16" else f"computes in bf16, not {case.dtype}"


def prepare(weight: Weight) -> Weight:
    """Return a plain weight in bf16, where it lies."""
    return replace(weight, data=weight.data.to(torch.bfloat16), quant=BF16)


def matmul(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose in float32."""
    answers = product(x, weight.data)
    return answers if out is None else out.copy_(answers)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x [rows, columns]` times bf16 `weight [outputs, columns]`, transposed, in float32."""
    rows, rounded = len(x), x.to(torch.bfloat16)
    if rows < PADDED_ROWS:
        rounded = torch.nn.functional.pad(rounded, (0, 0, 0, PADDED_ROWS - rows))
    if hasattr(torch.ops.aten.mm, "dtype"):  # older versions of torch have no such sums
        return torch.mm(rounded, weight.T, out_dtype=torch.float32)[:rows]
    return (rounded @ weight.T)[:rows].float()
