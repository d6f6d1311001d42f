"""Rows in 16 bits, as products of many rows read them: bf16, or f16 with powers of two.

f16 ends at 65504, and there are models whose activations do not: each row is divided by a power of
two, which changes none of its bits but those below what f16 holds, and the product's sums, in
float32, are multiplied by it. Rows of few, in matmul.py, have such powers for every 256 columns.
"""

from dataclasses import dataclass

import torch

from headroom.formats.quants import BF16, F16
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.compile import compile_kernel

QUANTS = {"bf16": BF16, "f16": F16}  # that products of many rows compute in
_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
POWER_THREADS = 256  # of powers.cuh


def refuses_type(dtype: str) -> str | None:
    """Say why products on a GPU do not compute in a type."""
    return None if dtype in QUANTS else f"computes in {' or '.join(QUANTS)}, not {dtype}"


def narrow_type(dtype: str) -> torch.dtype:
    """Return torch's type of `bf16` or `f16`."""
    return _TYPES[dtype]


@dataclass(frozen=True, slots=True, eq=False)
class NarrowRows:
    """Rows in 16 bits; what they stand for is `values * powers[:, None]`."""

    values: torch.Tensor  # bf16 or f16 [rows, columns]
    powers: torch.Tensor | None = None  # float32 [rows], of f16


def empty_rows(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> NarrowRows:
    """Return memory for rows, valid until the frame around the call is left."""
    values = scratch.empty(*shape, dtype=dtype, device=device)
    powers = scratch.empty(shape[0], device=device) if dtype == torch.float16 else None
    return NarrowRows(values, powers)


def fill_rows(out: NarrowRows, x: torch.Tensor) -> NarrowRows:
    """Round float32 `x [rows, columns]` to rows; those of f16 may have more rows than it."""
    if out.powers is None:
        out.values.copy_(x)
        return out
    args = (x, out.values, out.powers, x.shape[1], x.stride(0))
    compile_kernel("narrow.cu", "narrow_rows")((len(x),), (POWER_THREADS,), args)
    return out


def narrow_rows(x: torch.Tensor, dtype: torch.dtype) -> NarrowRows:
    """Return float32 rows in a type of 16 bits."""
    return fill_rows(empty_rows(x.shape, dtype, x.device), x)


def as_narrow(x: "torch.Tensor | NarrowRows") -> NarrowRows:
    """Return rows as they are where they are narrow, in bf16 where they are wide."""
    if isinstance(x, NarrowRows):
        return x
    return NarrowRows(x if x.dtype == torch.bfloat16 else x.to(torch.bfloat16))
