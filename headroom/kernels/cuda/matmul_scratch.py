"""Scratch of matrix products: input rows in 16 bits, and unpacked weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.kernels.cuda.buffers import Buffer, Buffers, ScratchCount, floats
from headroom.kernels.cuda.sizes import GROUP_ROWS, RECORD_COLUMNS, TILE_ROWS

# The rows of an unpacked part are a multiple of this if possible, to fit cuBLAS's tiles.
PART_ROWS = 256


def lanes_for(rows: int) -> int:
    """Return the lanes of a piece of f16 rows (halves.cuh): four per row, for 1, 2, 4 or 8 rows."""
    return 4 << min(3, (rows - 1).bit_length())


def half_rows_bytes(rows: int, columns: int) -> int:
    """Return the bytes of f16 rows with a power of two per 256 columns, in pieces of halves.cuh."""
    lanes = lanes_for(rows)
    piece = 136 * lanes + -(-lanes // 16) * 16
    return -(-rows // GROUP_ROWS) * -(-columns // RECORD_COLUMNS) * piece


def half_rows(rows: int, columns: int) -> Buffer:
    """Return the buffer of rows as products of the decode path read them."""
    return Buffer((half_rows_bytes(rows, columns),), "u8")


@dataclass(frozen=True, slots=True)
class NarrowBuffers(Buffers):
    """Rows in 16 bits, as products of the prefill path read them."""

    values: Buffer  # bf16 or f16 [rows, columns]
    powers: Buffer | None  # float32 [rows] for f16: what each row was divided by


def narrow_rows(rows: int, columns: int, dtype: str) -> NarrowBuffers:
    """Return the buffers of rows in bf16 or f16."""
    return NarrowBuffers(Buffer((rows, columns), dtype), floats(rows) if dtype == "f16" else None)


def products(rows: int, outputs: Sequence[int]) -> list[Buffer]:
    """Return the buffers of the products of rows with matrices of so many outputs each."""
    return [floats(rows, width) for width in outputs]


def part_rows(rows: int, columns: int, most_bytes: int) -> int:
    """Return how many rows of a weight are unpacked at a time.

    All parts but the last have this size, and none has more than `most_bytes` unless a single tile
    does.
    """
    fitting = most_bytes // (2 * columns)
    if rows <= fitting:
        return rows
    step = PART_ROWS if fitting >= PART_ROWS else TILE_ROWS
    fitting = max(step, fitting // step * step)
    each = -(-rows // -(-rows // fitting))
    return -(-each // step) * step


@dataclass(frozen=True, slots=True)
class PartBuffers(Buffers):
    """A part of a weight that is unpacked for many rows, and its products."""

    answers: Buffer  # [rows, rows of the part]: bf16, or float32 for rows in f16
    weight: Buffer | None  # 16 bits [rows of the part, columns]; None: the weight is plain already


def unpacked_part(rows: int, part: int, columns: int, dtype: str, *, tiled: bool) -> PartBuffers:
    """Return the buffers of a product of `rows` rows with `part` rows of a weight."""
    answers = Buffer((rows, part), "f32" if dtype == "f16" else dtype)
    return PartBuffers(answers, Buffer((part, columns), dtype) if tiled else None)


def unpacked_parts(outputs: int, columns: int, unpack_bytes: int) -> list[int]:
    """Return the rows of each part of a weight that `multiply_unpacked` unpacks in turn."""
    each = part_rows(outputs, columns, unpack_bytes)
    return [min(each, outputs - first) for first in range(0, outputs, each)]


def count_unpacked(
    count: ScratchCount,
    rows: int,
    weights: Sequence[int],
    columns: int,
    dtype: str,
    unpack_bytes: int,
    *,
    tiled: bool,
) -> None:
    """Count `multiply_unpacked` for weights of so many rows each: one part after another."""
    parts = [part for outputs in weights for part in unpacked_parts(outputs, columns, unpack_bytes)]
    for part in count.largest(parts):
        with count.frame():
            count.take(unpacked_part(rows, part, columns, dtype, tiled=tiled))
