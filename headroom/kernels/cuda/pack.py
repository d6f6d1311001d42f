"""Packs weights from the layout of files into tiles for the tensor cores; see tiles.cuh."""

import torch

from headroom.errors import KernelError
from headroom.formats.quants import QuantType
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.sizes import PLAIN_STEP, RECORD_COLUMNS, TILE_ROWS, tile_bytes
from headroom.kernels.types import PACKED

WARPS = 4


def pack(
    source: torch.Tensor,
    quant: QuantType,
    rows: int,
    columns: int,
    tiles: torch.Tensor,
    order: torch.Tensor | None = None,
) -> None:
    """Pack matrices of `rows` rows into `tiles`; its size says how many matrices.

    `source` has their rows as in the file, one matrix after another, on the same device. For a
    single matrix, `order`, int32 `[rows]`, says which row of `source` becomes each row.
    """
    if quant not in PACKED and columns % PLAIN_STEP:
        raise KernelError(
            f"Rows of {columns} values in {quant} cannot be packed on CUDA: no multiple of "
            f"{PLAIN_STEP}.",
            hint="Choose --weights unpacked.",
        )
    matrices = tiles.numel() // tile_bytes(quant, rows, columns)
    grid, records = _grid(rows, columns, matrices)
    kernel = compile_kernel("pack.cu", "pack", {"KIND": quant.ggml_id, "WARPS": WARPS})
    kernel(
        grid, (WARPS * 32,), (source, order, tiles, rows, columns // quant.block, records),
    )  # fmt: skip


def pack_at(
    source: torch.Tensor,
    quant: QuantType,
    rows: int,
    columns: int,
    addresses: torch.Tensor,
    first_tile: int = 0,
) -> None:
    """Pack matrices of `rows` rows, each into tiles at its own address.

    `addresses`, int64 `[matrices]` on the device, may be a column of a table; a matrix with address
    0 is skipped. The rows fill the tiles of their matrix from `first_tile` on.
    """
    grid, records = _grid(rows, columns, len(addresses))
    kernel = compile_kernel("pack.cu", "pack_at", {"KIND": quant.ggml_id, "WARPS": WARPS})
    kernel(
        grid, (WARPS * 32,),
        (source, addresses, addresses.stride(0), first_tile, rows, columns // quant.block, records),
    )  # fmt: skip


def _grid(rows: int, columns: int, matrices: int) -> tuple[tuple[int, int, int], int]:
    """Return the blocks of a launch, and the records of a tile."""
    records, count = -(-columns // RECORD_COLUMNS), -(-rows // TILE_ROWS)
    shares = max(1, min(-(-records // WARPS), 2048 // (count * matrices)))
    return (count, shares, matrices), records
