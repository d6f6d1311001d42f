"""Few rows on their way into routed experts: normed, rounded and scored by one kernel."""

import torch

from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.matmul import HalfRows, RowNorm
from headroom.kernels.cuda.sizes import RECORD_COLUMNS, half_rows_bytes

THREADS = 256  # of router.cu
MOST_HIDDEN = 8 * 4 * THREADS  # that its threads hold


def takes(hidden: int) -> bool:
    """Tell whether rows of a width can come this way."""
    return hidden % 8 == 0 and hidden <= MOST_HIDDEN


def scored_rows(
    x: torch.Tensor, weight: torch.Tensor, norm: RowNorm, seen: torch.Tensor
) -> tuple[HalfRows, torch.Tensor]:
    """Return rows in f16 after a norm, and their logits `[rows, outputs]` after that of a router.

    `weight [outputs, hidden]` is the router's, `seen [hidden]` its norm's.
    """
    (rows, hidden), outputs = x.shape, len(weight)
    size = half_rows_bytes(rows, hidden)
    pieces = scratch.empty(size, dtype=torch.uint8, device=x.device)
    out = HalfRows(pieces, rows, -(-hidden // RECORD_COLUMNS))
    logits = scratch.empty(rows, outputs, device=x.device)
    # A sum runs in the same order however many rows share a pass over the weight.
    each = 1 if rows == 1 else 4
    defines = {"EACH": -(-hidden // (4 * THREADS)), "ROWS": each, "LANES": out.lanes}
    compile_kernel("router.cu", "score_rows", defines)(
        (outputs + each, -(-rows // each)),
        (THREADS,),
        (
            *(x, weight, seen, norm.weight, norm.eps, logits, norm.out, pieces),
            *(rows, outputs, hidden),
        ),
        early=True,
    )
    return out, logits
