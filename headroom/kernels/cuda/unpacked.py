"""Products of many rows: packed weights are unpacked part by part, to bf16 or f16."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.narrow import NarrowRows
from headroom.kernels.cuda.sizes import MOST_OUTPUTS, RECORD_COLUMNS, TILE_ROWS, tile_bytes
from headroom.kernels.weight import Weight

TILES = "tiles"
SPREAD_THREADS = 256
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
    x: NarrowRows, weight: Weight, outs: Sequence[torch.Tensor], add: bool = False
) -> None:
    """Write `x` times the weight's transpose to float32 `outs`, or add it to them.

    The outputs are of matrices that lie one after another in the weight.
    """
    rows = x.values
    each = part_rows(weight.rows, weight.columns, scratch.unpack_bytes())
    for first in range(0, weight.rows, each):
        count = min(each, weight.rows - first)
        with scratch.frame():
            if x.powers is None:
                answers = scratch.empty(len(rows), count, dtype=rows.dtype, device=rows.device)
                torch.mm(rows, _plain_part(weight, first, count, rows.dtype).T, out=answers)
            else:
                answers = scratch.empty(len(rows), count, device=rows.device)
                plain = _plain_part(weight, first, count, rows.dtype)
                torch.mm(rows, plain.T, out_dtype=torch.float32, out=answers)
            if x.powers is None:
                _spread(answers, first, outs, add)
            else:
                _spread_powers(answers, first, outs, add, x.powers)


def dequantise(weight: Weight, out: torch.Tensor) -> torch.Tensor:
    """Write a weight's values to `out [rows, columns]`, bf16 or f16."""
    records = -(-weight.columns // RECORD_COLUMNS)
    tiles = -(-weight.rows // TILE_ROWS)
    kernel = compile_kernel("dequant.cu", "dequantise", unpack_defines(weight.quant, out.dtype))
    share = max(1, min(-(-records // 4), 2048 // max(1, tiles)))
    kernel((tiles, share), (128,), (weight.data, out, weight.rows, weight.columns, records))
    return out


def unpack_defines(quant: QuantType, dtype: torch.dtype) -> dict[str, int]:
    """Return what dequant.cu is compiled with to unpack a type of weights to another."""
    return {"KIND": quant.ggml_id, "WARPS": 4, "OUT_F16": int(dtype == torch.float16)}


def _plain_part(weight: Weight, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Some rows of a weight as products read them; they begin with a tile."""
    if weight.layout != TILES:
        return weight.data[first : first + count]
    out = scratch.empty(count, weight.columns, dtype=dtype, device=weight.data.device)
    if count == weight.rows:
        return dequantise(weight, out)
    tiles = weight.data[tile_bytes(weight.quant, first, weight.columns) :]
    return dequantise(replace(weight, data=tiles, rows=count), out)


def _spread(answers: torch.Tensor, first: int, outs: Sequence[torch.Tensor], add: bool) -> None:
    """Bring the answers of rows `first` and on of a weight to the outputs that they belong to."""
    (rows, count), rest = answers.shape, MOST_OUTPUTS - len(outs)
    ends = list(accumulate(out.shape[1] for out in outs))
    apart = [out.stride(0) for out in outs]
    fours = not any(number % 4 for number in (first, count, *ends, *apart))
    wide = 4 if fours and not any(out.data_ptr() % 16 for out in outs) else 1
    kernel = compile_kernel("spread.cu", "spread", {"ADD": int(add), "WIDE": wide})
    kernel(
        (-(-count // (SPREAD_THREADS * wide)), rows), (SPREAD_THREADS,),
        (
            *(answers, *outs, *[None] * rest, *ends, *[ends[-1]] * rest),
            *(*apart, *[0] * rest, first, count),
        ),
    )  # fmt: skip


def _spread_powers(
    answers: torch.Tensor,
    first: int,
    outs: Sequence[torch.Tensor],
    add: bool,
    powers: torch.Tensor,
) -> None:
    """The same for answers in float32, times the powers of their rows."""
    at, end, by = 0, first + answers.shape[1], powers[:, None]
    for out in outs:
        begin, stop = max(first, at), min(end, at + out.shape[1])
        if begin < stop:
            part, target = answers[:, begin - first : stop - first], out[:, begin - at : stop - at]
            target.addcmul_(part, by) if add else torch.mul(part, by, out=target)
        at += out.shape[1]
