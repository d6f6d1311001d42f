"""Matrices of a file in pieces: nothing is left out, nothing exceeds its buffer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import PlanError
from headroom.formats.quants import BY_NAME
from headroom.layers.upload import (
    FileMatrices,
    FileRange,
    UploadPiece,
    matrices_between,
    split_matrices,
)

UNIT = 16


def matrices(rows: int, count: int = 1, **more: object) -> FileMatrices:
    """Rows of 36 bytes each, from byte 1000 on."""
    return FileMatrices(
        "w", Path("f"), BY_NAME["q4_0"], rows, 64, 1000, count, **more  # type: ignore[arg-type]
    )  # fmt: skip


def row_offsets(source: FileMatrices, piece: UploadPiece) -> dict[tuple[int, int], int]:
    """Where in the file each row of the result lies, by matrix and row."""
    size, staged = source.row_bytes, []
    for part in piece.ranges:
        staged += range(part.offset, part.offset + part.nbytes, size)
    if piece.order is not None:
        staged = [staged[place] for place in piece.order.tolist()]
    assert len(staged) == piece.matrices * piece.rows
    return {
        (piece.matrix + at // piece.rows, piece.row + at % piece.rows): offset
        for at, offset in enumerate(staged)
    }


@given(
    rows=st.integers(1, 70), count=st.integers(1, 5), room=st.integers(16, 200), gap=st.booleans()
)
def test_every_row_comes_once_and_from_its_place(
    rows: int, count: int, room: int, gap: bool
) -> None:
    apart = rows * 36 * 2 if gap else 0
    source, found = matrices(rows, count, apart=apart), {}
    for piece in split_matrices(source, room * 36, UNIT):
        assert piece.nbytes <= room * 36
        assert piece.row % UNIT == 0
        assert piece.rows == rows or piece.matrices == 1
        new = row_offsets(source, piece)
        assert not new.keys() & found.keys()
        found |= new
    assert found == {
        (matrix, row): 1000 + matrix * (apart or rows * 36) + row * 36
        for matrix in range(count)
        for row in range(rows)
    }


@given(seed=st.integers(0, 99), heads=st.integers(1, 6), room=st.integers(150, 400))
def test_rows_in_another_order_come_from_where_the_order_says(
    seed: int, heads: int, room: int
) -> None:
    torch.manual_seed(seed)
    # Each head's own rows are mixed, and even rows of all heads come before odd ones.
    order = torch.cat([head * 24 + torch.randperm(24) for head in range(heads)])
    order = torch.cat((order[::2], order[1::2]))
    source, found = matrices(24 * heads, order=order), {}
    for piece in split_matrices(source, room * 36, UNIT):
        assert piece.order is not None
        assert piece.order_at >= piece.nbytes
        assert piece.order_at + piece.order.nbytes <= room * 36
        found |= row_offsets(source, piece)
    assert found == {(0, row): 1000 + 36 * place for row, place in enumerate(order.tolist())}


def test_neighbours_are_read_in_one_go() -> None:
    (piece,) = split_matrices(matrices(20, 6), 36 * 120, UNIT)
    assert piece.ranges == (FileRange(1000, 36 * 120),)


@pytest.mark.parametrize("order", [None, torch.arange(32) * 7 % 32])
def test_rows_that_no_buffer_holds_are_refused(order: torch.Tensor | None) -> None:
    with pytest.raises(PlanError, match=r"^w goes to its device in pieces of .* or more, and the "):
        list(split_matrices(matrices(32, order=order), 36 * 15, UNIT))


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    gap=st.booleans(),
    bounds=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_some_matrices_of_several_parts_are_those_between_two_numbers(
    counts: list[int], gap: bool, bounds: tuple[int, int]
) -> None:
    apart = 5000 if gap else 0
    parts = [
        replace(matrices(16, count, apart=apart), offset=100_000 * number)
        for number, count in enumerate(counts)
    ]
    first, end = bounds
    assert _starts(matrices_between(parts, first, end)) == _starts(parts)[first:end]


def _starts(parts: Sequence[FileMatrices]) -> list[int]:
    """Where every matrix begins."""
    return [
        part.offset + number * (part.apart or part.matrix_bytes)
        for part in parts
        for number in range(part.count)
    ]
