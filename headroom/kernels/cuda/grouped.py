"""Products of rows with their experts' matrices in one launch: bf16 from sm_80 on, f16 everywhere.

How many rows an expert has only the device knows: nothing here waits to hear it.
"""

from typing import Literal

import torch

from headroom.kernels.cuda.compile import CudaKernel, capability_of, compile_kernel

OUTPUTS = 128  # of a tile
STAGES = {64: 4, 128: 3}  # of parts in shared memory, by the most rows of a tile: 48 KiB of them
PART_BYTES = 64  # of a row
GROUPED_THREADS = 128
BESIDE = 16  # most tiles of the same rows that run together


def product(
    x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, tile_rows: int
) -> torch.Tensor:
    """Return rows sorted by expert times their expert's matrix, transposed.

    That is bf16 of rows in bf16, and float32 of rows in f16. `x [picks, columns]`, `weights
    [experts, outputs, columns]` and `ends int32 [experts]` are as `grouped_product` has them,
    `tile_rows` is one of STAGES. Every row has the same bits whatever rows it comes with, and
    whatever the tiles' size.
    """
    picks, (experts, outputs, columns) = len(x), weights.shape
    assert x.is_contiguous()
    assert weights.is_contiguous()
    assert outputs % 8 == 0
    assert columns % 8 == 0
    assert weights.dtype == x.dtype
    out = x.new_empty(picks, outputs, dtype=torch.float32 if x.dtype == torch.float16 else None)
    beside, turns = _spread(-(-outputs // OUTPUTS))
    kernels(x.dtype)[tile_rows](
        (beside, most_tiles(picks, experts, tile_rows), turns),
        (GROUPED_THREADS,),
        (x, weights, ends, out, experts, outputs, columns),
        STAGES[tile_rows] * (tile_rows + OUTPUTS) * PART_BYTES,
    )
    return out


def kernels(dtype: torch.dtype) -> dict[int, CudaKernel]:
    """Return the kernel of each of STAGES, for rows in bf16 or f16.

    All are compiled when one is asked for: long steps come when a request waits.
    """
    halves = int(dtype == torch.float16)
    return {
        rows: compile_kernel(
            "grouped.cu", "grouped", {"ROWS": rows, "STAGES": stages, "HALVES": halves}
        )
        for rows, stages in STAGES.items()
    }


def fitting_rows(picks: int, experts: int) -> int:
    """Return the most rows of a tile: few where that is what an expert has on average."""
    small, large = STAGES
    return small if picks <= small * experts else large


def most_tiles(picks: int, experts: int, rows: int) -> int:
    """Return how many tiles of `rows` there can be, however picks spread over the experts.

    Each expert with picks may have one tile that is not full.
    """
    return (picks + min(picks, experts) * (rows - 1)) // rows


def _spread(tiles: int) -> tuple[int, int]:
    """Cut the tiles of some rows into turns of one size; the last may be smaller."""
    turns = -(-tiles // BESIDE)
    return -(-tiles // turns), turns


LIBRARYS_SM_100 = "2.13"  # the version of torch from which its grouped product runs on sm_100 too


def grouped_product(
    x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, among: int
) -> torch.Tensor:
    """Return rows sorted by expert times their expert's matrix, transposed.

    `x [picks, columns]` and `weights [experts, rows, columns]` are bf16, and so is what comes, or
    f16, which gives float32; columns and rows are divisible by 8 for 16-byte strides. Rows after
    the last expert's end have no meaning. The picks spread over `among` experts, of which `weights`
    may be some. All but the loop leave the host free.
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
    """Return who multiplies bf16: torch in one go, our kernel, or torch expert by expert.

    Torch has a grouped product of its own for two generations only, and none that gives f16's sums
    in float32; on others it would wait for the device to hear where experts end, as the loop does.
    """
    if device.type != "cuda":
        return "loop"
    major, _ = capability_of(device)
    if major == 9 or (major == 10 and torch.__version__ >= LIBRARYS_SM_100):
        return "library"
    return "own" if major >= 8 else "loop"
