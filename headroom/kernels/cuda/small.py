"""Launchers of the small CUDA operations between products."""

import torch

from headroom.errors import KernelError
from headroom.formats.quants import Q8_K
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.weight import Weight

NORM_THREADS = 512  # of small.cu
EMBED_CHUNK = 2048
GATED_THREADS = 256
ARGMAX_THREADS, ARGMAX_SLICES = 256, 64


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last axis; rows may lie apart."""
    if out is None:
        out = torch.empty(x.shape, device=x.device)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    count, width = rows.shape
    if width % 4 or rows.stride(0) % 4:
        raise KernelError(f"Rows of {width} values are not normed on CUDA: no multiple of 4.")
    compile_kernel("small.cu", "norm_rows")(
        (count,), (NORM_THREADS,), (rows, weight, out, width, rows.stride(0), float(eps))
    )
    return out


def gated_activation(
    gate: torch.Tensor, up: torch.Tensor, activation: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `act(gate) * up`; rows `[rows, width]` may lie apart, as halves of one product do."""
    rows, width = gate.shape
    if out is None:
        out = torch.empty(rows, width, device=gate.device)
    kernel = compile_kernel("small.cu", "gated", {"GELU": int(activation == "gelu")})
    grid = (-(-width // GATED_THREADS), rows)
    kernel(grid, (GATED_THREADS,), (gate, up, out, width, gate.stride(0), up.stride(0)))
    return out


def embed(ids: torch.Tensor, table: Weight, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Write the table's rows `ids` (int64) to `out` as float32, times `scale`.

    The table is in file layout, on the device or in pinned memory of the host.
    """
    if table.quant is Q8_K or table.layout != "rows":
        raise KernelError(
            f"Rows of {table.quant} in the layout {table.layout} are not read on CUDA.",
            hint="Keep the table in file layout and in a type other than q8_k.",
        )
    kernel = compile_kernel("small.cu", "embed", {"KIND": table.quant.ggml_id})
    grid = (-(-table.columns // EMBED_CHUNK), ids.shape[0])
    kernel(grid, (256,), (table.data, ids, out, table.columns, float(scale)))
    return out


def rope_tables(
    positions: torch.Tensor,
    frequency: torch.Tensor,
    scale: float,
    out: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write cos and sin `[rows, half]` of int32 positions times `frequency [half]`, scaled."""
    half = frequency.shape[0]
    kernel = compile_kernel("small.cu", "rope_tables")
    kernel((positions.shape[0],), (128,), (positions, frequency, *out, half, float(scale)))
    return out


def argmax(
    x: torch.Tensor, out: torch.Tensor | None = None, scratch: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each row's largest value's place (int64), the lowest among equals.

    `scratch` holds `rows * ARGMAX_SLICES` int64 numbers.
    """
    rows, width = x.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=x.device)
    if scratch is None:
        scratch = torch.empty(rows * ARGMAX_SLICES, dtype=torch.int64, device=x.device)
    slices = compile_kernel("small.cu", "argmax_slices")
    slices((ARGMAX_SLICES, rows), (ARGMAX_THREADS,), (x, scratch, width))
    compile_kernel("small.cu", "argmax_rows")((rows,), (64,), (scratch, out, ARGMAX_SLICES))
    return out
