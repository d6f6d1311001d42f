"""Packed weights from their file's blocks into tiles for the tensor cores; see tiles.cuh."""

import torch

from headroom.formats.quants import BY_NAME, QuantType
from headroom.kernels.cuda.compile import compile_kernel

TILE_ROWS, RECORD_COLUMNS = 16, 256
WARPS = 4
PACKED = frozenset(
    BY_NAME[name]
    for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "q4_k", "q5_k", "q6_k")
)


def record_bytes(quant: QuantType) -> int:
    """Return the bytes of sixteen rows of 256 columns."""
    return quant.bytes_for(RECORD_COLUMNS) * TILE_ROWS


def tile_bytes(quant: QuantType, rows: int, columns: int) -> int:
    """Return the bytes of a weight in tiles, both sides filled up to whole tiles."""
    return -(-rows // TILE_ROWS) * -(-columns // RECORD_COLUMNS) * record_bytes(quant)


def pack(
    source: torch.Tensor,
    quant: QuantType,
    rows: int,
    columns: int,
    tiles: torch.Tensor,
    order: torch.Tensor | None = None,
) -> None:
    """Write the tiles of as many matrices of `rows` as `tiles` has room for.

    `source` has the bytes of their rows as in the file, one matrix after another, on the same
    device. `order`, int32 `[rows]`, says which row of `source` comes to each place of a single
    matrix.
    """
    records, count = -(-columns // RECORD_COLUMNS), -(-rows // TILE_ROWS)
    matrices = tiles.numel() // tile_bytes(quant, rows, columns)
    shares = max(1, min(-(-records // WARPS), 2048 // (count * matrices)))
    kernel = compile_kernel("pack.cu", "pack", {"KIND": quant.ggml_id, "WARPS": WARPS})
    kernel(
        (count, shares, matrices), (WARPS * 32,),
        (source, order, tiles, rows, columns // quant.block, records),
    )  # fmt: skip
