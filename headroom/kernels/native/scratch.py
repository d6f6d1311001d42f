"""Scratch of the C++ kernels: the bytes that launchers lend them and plans count; without torch.

The C++ module takes its buffers from the lent memory one after another, and raises an error if the
memory is too small. Its own functions of these names say what it takes (a worker of cold experts
allocates by them); `tests/kernels/native/test_scratch.py` holds both to equal bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

SCRATCH_ALIGNMENT = 64  # bytes; each buffer begins at a multiple of it (class Scratch, ops.h)
PARTIAL_KEYS = 256  # keys of one partial result of attention (kernels.h)
CELL = 32  # columns of a row in 8 or 24 bits that share a scale (panels.h)
DIGIT_CELL_BYTES = 128  # of a cell in 24 bits: digits, scale and sums (DigitCell, kernels.h)
HEAD_STEP = 16  # partial results have heads of a multiple of so many values (padded_dim, kernels.h)
# A record of 256 columns of a row in 16 bits, for products with a GPU's tiles (WideRecord,
# kernels.h): two digits of each value, 32 sums, a scale, and padding.
WIDE_COLUMNS, WIDE_RECORD_BYTES = 256, 1216
F32_BYTES, I32_BYTES, POINTER_BYTES = 4, 4, 8


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The widths of a layer that runs in one call, in values of one row."""

    hidden: int
    queries: int  # of all heads
    keys: int
    values: int
    ffn_width: int
    heads: int  # query heads
    head_dim: int  # values of a head


@lru_cache(maxsize=256)  # every product of a step asks
def matmul_scratch(rows: int, columns: int) -> int:
    """Return the scratch of a product: its input in 24 bits, with scales and sums of its blocks.

    Inputs in 8 bits take less, but in three pieces; those in floats only have sums.
    """
    return DIGIT_CELL_BYTES * rows * (columns // CELL) + 2 * SCRATCH_ALIGNMENT


def layer_scratch(sizes: LayerSizes, rows: int, contexts: Sequence[int]) -> int:
    """Return the scratch of a layer in a step of `rows` rows.

    `contexts` are the tokens of each sequence that decodes, for the partial results of attention.
    """
    # Normed rows, queries, attention's output, keys, values, and what is between up and down.
    queries, ffn = sizes.queries, sizes.ffn_width
    widths = (sizes.hidden, queries, queries, sizes.keys, sizes.values, ffn)
    inputs = (sizes.hidden, sizes.hidden, queries, ffn)  # of the products
    return (
        sum(_floats(rows * width) for width in widths)
        + sum(matmul_scratch(rows, width) for width in inputs)
        + sum(partial_scratch(sizes, context) for context in contexts)
    )


def partial_scratch(sizes: LayerSizes, context: int) -> int:
    """Return the bytes of a sequence's partial results: sums, a maximum and a total per block."""
    blocks = _steps(context, PARTIAL_KEYS)
    return _floats(blocks * sizes.heads * (_steps(sizes.head_dim, HEAD_STEP) * HEAD_STEP + 2))


def experts_scratch(
    rows: int, used: int, hidden: int, width: int, experts: int, *, tiles: bool = False
) -> int:
    """Return the scratch of a layer's routed experts, of which each row visits `used`.

    It holds a copy of each row for every expert that the row visits, as f32 and in 24 bits. Of
    experts in a GPU's `tiles` the rows may be in records instead.
    """
    picks = rows * used
    inputs = _floats(picks * hidden) + matmul_scratch(picks, hidden)
    inner = matmul_scratch(picks, width)
    if tiles:
        inputs = max(inputs, _wide_rows(rows, hidden) + _aligned(POINTER_BYTES * picks))
        inner = max(inner, _wide_rows(picks, width) + _floats(picks * width))
    orders = _aligned(I32_BYTES * (experts + 1)) + 2 * _aligned(I32_BYTES * picks)
    return orders + _floats(picks * width) + inputs + inner


def _wide_rows(rows: int, columns: int) -> int:
    records = _aligned(rows * _steps(columns, WIDE_COLUMNS) * WIDE_RECORD_BYTES)
    return records + _aligned(POINTER_BYTES * rows)


def _floats(count: int) -> int:
    return _aligned(F32_BYTES * count)


def _aligned(size_bytes: int) -> int:
    return _steps(size_bytes, SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


def _steps(size: int, step: int) -> int:
    return -(-size // step)
