"""Matrices of a file cut into pieces that fit into a buffer on their way to a device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from headroom.errors import PlanError
from headroom.formats.quants import QuantType
from headroom.units import gib

INDEX_BYTES = 4  # of a row's place
ALIGNMENT = 16


@dataclass(frozen=True, slots=True, eq=False)
class FileMatrices:
    """Matrices of one size that lie in a file at equal distances."""

    name: str  # of their tensor, as in the file
    path: Path
    quant: QuantType
    rows: int  # of each
    columns: int
    offset: int  # of the first one, bytes from the start of the file
    count: int = 1
    apart: int = 0  # bytes from the start of one to the start of the next; 0: no gaps
    order: torch.Tensor | None = None  # int64 [rows]: the row that comes to each place; one matrix

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.quant.bytes_for(self.columns)

    @property
    def matrix_bytes(self) -> int:
        """The bytes of one matrix."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What is read into a buffer at once: whole matrices, or rows of one."""

    matrix: int  # the first one
    row: int  # the first one of the result
    rows: int  # of the result, of each matrix
    runs: tuple[
        tuple[int, int], ...
    ]  # (offset, bytes) in the file, one after another in the buffer
    matrices: int = 1
    order: torch.Tensor | None = None  # int32 [rows]: which of the buffer's rows

    @property
    def nbytes(self) -> int:
        """The bytes read from the file."""
        return sum(size for _, size in self.runs)

    @property
    def order_at(self) -> int:
        """Where the order lies in the buffer, after the rows."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


def matrices_between(parts: Sequence[FileMatrices], first: int, end: int) -> list[FileMatrices]:
    """Return the matrices from one number to before another, counted over all parts."""
    found, passed = [], 0
    for part in parts:
        low, high = max(0, first - passed), min(part.count, end - passed)
        if low < high:
            begin = part.offset + low * (part.apart or part.matrix_bytes)
            found.append(replace(part, offset=begin, count=high - low))
        passed += part.count
    return found


def pieces(source: FileMatrices, capacity: int, unit: int) -> Iterator[Piece]:
    """Cut matrices into pieces of at most `capacity` bytes, of whole units of rows."""
    size, row_bytes = source.matrix_bytes, source.row_bytes
    apart = source.apart or size
    if source.order is not None:
        yield from _ordered(source, source.order, capacity, unit)
    elif size <= capacity:
        together = capacity // size
        for first in range(0, source.count, together):
            count, at = min(together, source.count - first), source.offset + first * apart
            whole = ((at, count * size),)
            single = tuple((at + number * apart, size) for number in range(count))
            yield Piece(first, 0, source.rows, whole if apart == size else single, count)
    else:
        step = capacity // row_bytes // unit * unit or _refuse(source, unit * row_bytes, capacity)
        for matrix in range(source.count):
            at = source.offset + matrix * apart
            for row in range(0, source.rows, step):
                rows = min(step, source.rows - row)
                yield Piece(matrix, row, rows, ((at + row * row_bytes, rows * row_bytes),))


def _ordered(
    source: FileMatrices, order: torch.Tensor, capacity: int, unit: int
) -> Iterator[Piece]:
    """As many rows of the result at a time as come from a stretch of the file that fits."""
    starts = range(0, len(order), unit)
    lows, highs = (f.reduceat(order.numpy(), starts).tolist() for f in (np.minimum, np.maximum))
    first = 0
    while first < len(starts):
        low, high, end = lows[first], highs[first], first
        while end < len(starts):
            wider = min(low, lows[end]), max(high, highs[end])
            needed = _room(source, wider, (end + 1 - first) * unit)
            if needed > capacity:
                break
            (low, high), end = wider, end + 1
        if end == first:
            _refuse(source, _room(source, (low, high), unit), capacity)
        places = order[first * unit : end * unit]
        run = (source.offset + low * source.row_bytes, (high + 1 - low) * source.row_bytes)
        yield Piece(0, first * unit, len(places), (run,), order=(places - low).int())
        first = end


def _room(source: FileMatrices, span: tuple[int, int], rows: int) -> int:
    low, high = span
    return (high + 1 - low) * source.row_bytes + ALIGNMENT + rows * INDEX_BYTES


def _refuse(source: FileMatrices, needed: int, capacity: int) -> int:
    raise PlanError(
        f"{source.name} goes to its device in pieces of {gib(needed)} or more, "
        f"and the buffers hold {gib(capacity)}.",
        hint="Plan for steps of more rows with a larger --chunk: the buffers are their workspace.",
    )
