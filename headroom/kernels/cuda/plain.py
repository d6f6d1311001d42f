"""Products with plain weights on a GPU: operands in bf16 or f16, sums in float32."""

from dataclasses import replace

import torch

from headroom.kernels.cuda.compile import refuses_device
from headroom.kernels.cuda.narrow import QUANTS, NarrowRows, fill_rows, narrow_type
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


def refuses_f16(case: Case) -> str | None:
    """Say why a case cannot run here in f16."""
    if case.dtype == "f16":
        return refuses(replace(case, dtype="bf16"))
    return f"computes in f16, not {case.dtype}"


def prepare(weight: Weight, dtype: str = "bf16") -> Weight:
    """Return a plain weight in bf16 or f16, where it lies."""
    return replace(weight, data=weight.data.to(narrow_type(dtype)), quant=QUANTS[dtype])


def prepare_f16(weight: Weight) -> Weight:
    """Return a plain weight in f16, where it lies."""
    return prepare(weight, "f16")


def matmul(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose in float32."""
    answers = product(x, weight.data)
    return answers if out is None else out.copy_(answers)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x [rows, columns]` times narrow `weight [outputs, columns]`, transposed, as float32.

    `weight` is bf16 or f16.
    """
    if weight.dtype == torch.float16:
        return _half_product(x, weight)
    rows, rounded = len(x), x.to(torch.bfloat16)
    if rows < PADDED_ROWS:
        rounded = torch.nn.functional.pad(rounded, (0, 0, 0, PADDED_ROWS - rows))
    return torch.mm(rounded, weight.T, out_dtype=torch.float32)[:rows]


def _half_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same in f16, each row divided by its power of two."""
    rows = max(len(x), PADDED_ROWS)
    padded = NarrowRows(weight.new_zeros(rows, x.shape[1]), x.new_zeros(rows))
    fill_rows(padded, x)
    assert padded.powers is not None
    answers = torch.mm(padded.values, weight.T, out_dtype=torch.float32)
    return answers.mul_(padded.powers[:, None])[: len(x)]
