"""Products of many rows: packed weights are unpacked to bf16 part by part and multiplied there."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.sizes import RECORD_COLUMNS, TILE_ROWS, tile_bytes
from headroom.kernels.weight import Weight

TILES = "tiles"
PART_ROWS = 256  # parts of a weight are multiples of this where they can be, for cuBLAS's tiles


def part_rows(rows: int, columns: int, most_bytes: int) -> int:
    """Return how many rows of a weight are unpacked at a time: parts alike, none above the most."""
    fitting = most_bytes // (2 * columns)
    if rows <= fitting:
        return rows
    step = PART_ROWS if fitting >= PART_ROWS else TILE_ROWS
    fitting = max(step, fitting // step * step)
    each = -(-rows // -(-rows // fitting))
    return -(-each // step) * step


def multiply(
    x: torch.Tensor, weight: Weight, outs: Sequence[torch.Tensor], add: bool = False
) -> None:
    """Write bf16 `x` times the weight's transpose to float32 `outs`, or add it to them.

    The outputs are of matrices that lie one after another in the weight.
    """
    each = part_rows(weight.rows, weight.columns, scratch.unpack_bytes())
    for first in range(0, weight.rows, each):
        count = min(each, weight.rows - first)
        with scratch.frame():
            answers = scratch.empty(len(x), count, dtype=torch.bfloat16, device=x.device)
            torch.mm(x, _plain_part(weight, first, count).T, out=answers)
            _spread(answers, first, outs, add)


def dequantise(weight: Weight, out: torch.Tensor) -> torch.Tensor:
    """Write a weight's values to `out`, bf16 `[rows, columns]`."""
    records = -(-weight.columns // RECORD_COLUMNS)
    tiles = -(-weight.rows // TILE_ROWS)
    kernel = compile_kernel("dequant.cu", "dequantise", {"KIND": weight.quant.ggml_id, "WARPS": 4})
    share = max(1, min(-(-records // 4), 2048 // max(1, tiles)))
    kernel((tiles, share), (128,), (weight.data, out, weight.rows, weight.columns, records))
    return out


def _plain_part(weight: Weight, first: int, count: int) -> torch.Tensor:
    """Some rows of a weight in bf16; they begin with a tile."""
    if weight.layout != TILES:
        return weight.data[first : first + count]
    out = scratch.empty(count, weight.columns, dtype=torch.bfloat16, device=weight.data.device)
    tiles = weight.data[tile_bytes(weight.quant, first, weight.columns) :]
    return dequantise(replace(weight, data=tiles, rows=count), out)


def _spread(answers: torch.Tensor, first: int, outs: Sequence[torch.Tensor], add: bool) -> None:
    """Bring the answers of rows `first` and on of a weight to the outputs that they belong to."""
    at, end = 0, first + answers.shape[1]
    for out in outs:
        begin, stop = max(first, at), min(end, at + out.shape[1])
        if begin < stop:
            part, target = answers[:, begin - first : stop - first], out[:, begin - at : stop - at]
            target.add_(part) if add else target.copy_(part)
        at += out.shape[1]
