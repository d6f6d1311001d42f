"""Norms and gated activations on a GPU, the small operations between products."""

import torch

from headroom.errors import KernelError
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.buffers import floats
from headroom.kernels.cuda.compile import CudaKernel, compile_kernel

NORM_THREADS = 512  # of a block of small.cu
GATED_THREADS = 256


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last axis; rows may have a stride."""
    if out is None:
        out = scratch.take(floats(*x.shape), x.device)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    _norm(0)(*_norm_call(rows, (weight, eps), (None, out, None)))
    return out


def norm_narrow(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    narrow: torch.Tensor,
    out: torch.Tensor | None = None,
) -> None:
    """Write the norm of `x [rows, width]` in bf16, and in float32 to `out` if given."""
    _norm(0)(*_norm_call(x, (weight, eps), (None, out, narrow)))


def norm_add(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add the norm of `x` to the residual, in place."""
    _norm(1)(*_norm_call(x, (weight, eps), (residual, None, None)))
    return residual


def gated_activation(
    gate: torch.Tensor, up: torch.Tensor, activation: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `act(gate) * up`; both may be halves `[rows, width]` of one wider product."""
    if out is None:
        out = scratch.take(floats(*gate.shape), gate.device)
    _gate(gate, up, activation, out, None)
    return out


def gated_narrow(
    gate: torch.Tensor, up: torch.Tensor, activation: str, narrow: torch.Tensor
) -> None:
    """Write `act(gate) * up` in bf16."""
    _gate(gate, up, activation, None, narrow)


def _gate(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    out: torch.Tensor | None,
    narrow: torch.Tensor | None,
) -> None:
    rows, width = gate.shape
    kernel = compile_kernel("small.cu", "gated", {"GELU": int(activation == "gelu")})
    grid = (-(-width // GATED_THREADS), rows)
    kernel(grid, (GATED_THREADS,), (gate, up, out, narrow, width, gate.stride(0), up.stride(0)))


def _norm(residual: int) -> CudaKernel:
    return compile_kernel("small.cu", "norm_rows", {"RESIDUAL": residual})


def _norm_call(
    x: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    outs: tuple[torch.Tensor | None, ...],  # the residual, float32, bf16
) -> tuple[tuple[int], tuple[int], tuple[torch.Tensor | int | float | None, ...]]:
    rows, width = x.shape
    if width % 4 or x.stride(0) % 4:
        raise KernelError(f"Rows of {width} values are not normed on CUDA: no multiple of 4.")
    weight, eps = norm
    args = (x, weight, *outs, width, x.stride(0), float(eps))
    return (rows,), (NORM_THREADS,), args
