"""Products of rows with their experts' matrices in one launch: bf16 from sm_80 on, f16 everywhere.

Only the device knows how many rows an expert has; the host does not wait for these numbers.
"""

from typing import Literal

import torch

from headroom.kernels.cuda.compile import CudaKernel, capability_of, compile_kernel

OUTPUTS = 128  # outputs of a tile
STAGES = {64: 4, 128: 3}  # by the most rows of a tile: parts in shared memory, 48 KiB in all
PART_BYTES = 64  # of a row in one part
GROUPED_THREADS = 128
TILES_TOGETHER = 16  # most output tiles of one row tile that run together


def product(
    x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, tile_rows: int
) -> torch.Tensor:
    """Return rows sorted by expert times their expert's matrix, transposed.

    The result is bf16 for rows in bf16, and float32 for rows in f16. `x [picks, columns]`, `weights
    [experts, outputs, columns]` and `ends int32 [experts]` are those of `grouped_product`;
    `tile_rows` is a key of STAGES. A row's bits depend neither on the other rows nor on
    `tile_rows`.
    """
    picks, (experts, outputs, columns) = len(x), weights.shape
    assert x.is_contiguous()
    assert weights.is_contiguous()
    assert outputs % 8 == 0
    assert columns % 8 == 0
    assert weights.dtype == x.dtype
    out = x.new_empty(picks, outputs, dtype=torch.float32 if x.dtype == torch.float16 else None)
    turn_tiles, turns = _spread(-(-outputs // OUTPUTS))
    kernels(x.dtype)[tile_rows](
        (turn_tiles, most_tiles(picks, experts, tile_rows), turns),
        (GROUPED_THREADS,),
        (x, weights, ends, out, experts, outputs, columns),
        STAGES[tile_rows] * (tile_rows + OUTPUTS) * PART_BYTES,
    )
    return out


def kernels(dtype: torch.dtype) -> dict[int, CudaKernel]:
    """Return the kernels by the keys of STAGES, for rows in bf16 or f16.

    All are compiled together, so that a later, longer step does not wait for the compiler.
    """
    halves = int(dtype == torch.float16)
    return {
        rows: compile_kernel(
            "grouped.cu", "grouped", {"ROWS": rows, "STAGES": stages, "HALVES": halves}
        )
        for rows, stages in STAGES.items()
    }


def fitting_rows(picks: int, experts: int) -> int:
    """Return the most rows of a tile: the smaller size if experts have few rows on average."""
    small, large = STAGES
    return small if picks <= small * experts else large


def most_tiles(picks: int, experts: int, rows: int) -> int:
    """Return the most tiles of `rows` rows that there can be, however picks spread over experts.

    Each expert with picks may have one tile that is not full.
    """
    return (picks + min(picks, experts) * (rows - 1)) // rows


def _spread(tiles: int) -> tuple[int, int]:
    """Return the output tiles of a turn, and the number of turns; the last turn may be smaller."""
    turns = -(-tiles // TILES_TOGETHER)
    return -(-tiles // turns), turns


LIBRARYS_SM_100 = "2.13"  # from this version on, torch's grouped product runs on sm_100, too


def grouped_product(
    x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, among: int
) -> torch.Tensor:
    """Return rows sorted by expert times their expert's matrix, transposed.

    `x [picks, columns]` and `weights [experts, rows, columns]` are bf16 with a bf16 result, or f16
    with a float32 result; columns and rows are divisible by 8 for 16-byte strides. Rows of the
    result after the last expert's end are undefined. The picks spread over `among` experts, of
    which `weights` may hold some. The host waits for the device only if `product_way` is "loop".
    """
    way = "own" if x.dtype == torch.float16 else product_way(x.device)
    if way == "library":
        return torch._grouped_mm(x, weights.mT, offs=ends)
    if way == "own":
        return product(x, weights, ends, fitting_rows(len(x), among))
    out = x.new_zeros(len(x), weights.shape[1])
    first = 0
    for matrix, end in zip(weights, ends.tolist(), strict=True):
        if end > first:
            torch.mm(x[first:end], matrix.T, out=out[first:end])
        first = end
    return out


def product_way(device: torch.device) -> Literal["library", "own", "loop"]:
    """Return what multiplies bf16: torch's grouped product, our kernel, or torch expert by expert.

    Torch has a fused grouped product for two GPU generations only, and none for f16 with float32
    results. On other GPUs its call would wait for the device to learn where experts end, as the
    loop does.
    """
    if device.type != "cuda":
        return "loop"
    major, _ = capability_of(device)
    if major == 9 or (major == 10 and torch.__version__ >= LIBRARYS_SM_100):
        return "library"
    return "own" if major >= 8 else "loop"
