"""Routed experts on a GPU: products of tiles for few rows, products of sorted rows for many."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda import half_experts, scratch
from headroom.kernels.cuda.compile import compile_kernel, refuses_device
from headroom.kernels.cuda.expert_tiles import NO_OTHERS, ExpertTiles, Others, expert_constants
from headroom.kernels.cuda.half_experts import Unpacked
from headroom.kernels.cuda.narrow import NarrowRows, as_narrow, refuses_type
from headroom.kernels.cuda.picks import ExpertGroup, expert_group, grouped_product, sort_picks
from headroom.kernels.cuda.sizes import (
    EXPERT_STEP,
    RECORD_COLUMNS,
    TILE_ROWS,
    TILED,
    experts_at_once,
    tile_bytes,
)
from headroom.kernels.cuda.unpacked import unpack_defines
from headroom.kernels.ops import Case


def refuses(case: Case) -> str | None:
    """Say why a case cannot run here."""
    if reason := refuses_device(case):
        return reason
    if strange := [str(kind) for kind in case.experts if kind not in TILED]:
        return f"{strange[0]} is not a type of the tensor cores"
    return refuses_type(case.dtype)


def refuses_sizes(width: int, hidden: int) -> str | None:
    """Say why experts of a width cannot run here."""
    if width % EXPERT_STEP or hidden % EXPERT_STEP:
        return f"matrices of {width} x {hidden} are not multiples of {EXPERT_STEP}"
    return None


def table_of(
    pieces: Sequence[torch.Tensor], kinds: tuple[QuantType, ...], width: int, hidden: int
) -> ExpertTiles:
    """Return the table of experts whose gates, ups and downs lie in `pieces [experts, bytes]`."""
    first = torch.tensor([piece.data_ptr() for piece in pieces])
    apart = torch.tensor([piece.shape[1] for piece in pieces])
    where = first + apart * torch.arange(len(pieces[0]))[:, None]
    nbytes = sum(piece.nbytes for piece in pieces)
    addresses = where.to(pieces[0].device)
    return ExpertTiles(addresses, kinds, width, hidden, nbytes, tuple(pieces))


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRows:
    """Many rows and the experts that each of them chose."""

    x: torch.Tensor  # bf16 or f16 [rows, hidden]
    ids: torch.Tensor  # int32 [rows, used], negative: none
    weights: torch.Tensor  # [rows, used]
    powers: torch.Tensor | None = None  # [rows], of rows in f16


def many_rows(
    x: torch.Tensor | NarrowRows,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: ExpertTiles,
    activation: str,
    others: Others = NO_OTHERS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the same for many rows: each expert unpacked once for the rows that chose it."""
    narrow = as_narrow(x)
    rows = ChosenRows(narrow.values, ids, weights, narrow.powers)
    unpacked = _ByAddress(table, narrow.values.dtype)
    return sum_groups(rows, table, activation, unpacked, others, out)


def sum_groups(
    chosen: ChosenRows,
    table: ExpertTiles,
    activation: str,
    unpacked: Unpacked,
    others: Others = NO_OTHERS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, however they come to be unpacked.

    As many experts at a time as may be unpacked; a row's sum runs over those groups in order, and
    within one over its experts, the best first.
    """
    ids, weights = chosen.ids, chosen.weights
    rows, used = ids.shape
    picks = sort_picks(ids, len(table.addresses))
    constants = expert_constants(table, activation)
    if out is None:
        out = torch.empty(rows, table.hidden, device=ids.device)
    for first, each in group_bounds(table):
        group = expert_group(picks, first, each)
        with scratch.frame():
            if chosen.powers is not None:
                x, rest = NarrowRows(chosen.x, chosen.powers), (*others.arguments, out)
                half_experts.add_group(x, group, unpacked, activation, (picks, ids, weights), rest)
                others = Others(residual=out)
                continue
            answers = _group_answers(chosen.x, group, table.width, constants, unpacked)
            compile_kernel("experts.cu", "combine", constants)(
                (rows,),
                (256,),
                (
                    *(answers, picks.places, group.start, ids, group.first, group.last),
                    *(weights, used, table.hidden, *others.arguments, out),
                ),
            )
        others = Others(residual=out)
    return out


def group_bounds(table: ExpertTiles) -> list[tuple[int, int]]:
    """Return the first expert and the size of every group; the last may be smaller."""
    count = len(table.addresses)
    each = experts_at_once(count, table.width, table.hidden, scratch.unpack_bytes())
    return [(first, min(each, count - first)) for first in range(0, count, each)]


def _group_answers(
    x: torch.Tensor,
    group: ExpertGroup,
    width: int,
    constants: dict[str, int],
    unpacked: Unpacked,
) -> torch.Tensor:
    """Return the answers `[picks, hidden]` in bf16 of a group's experts, its own picks first."""
    picks, hidden = len(group.rows), x.shape[1]
    plain = unpacked.gates_and_ups(group)
    own = scratch.empty(picks, hidden, dtype=torch.bfloat16, device=x.device)
    inner = scratch.empty(picks, width, dtype=torch.bfloat16, device=x.device)
    torch.index_select(x, 0, group.rows, out=own)
    both = grouped_product(own, plain, group.ends, group.among)
    compile_kernel("experts.cu", "activate", constants)(
        (4096,), (256,), (both, inner, picks, width)
    )
    del both  # its memory may serve the answers
    return grouped_product(inner, unpacked.downs(group), group.ends, group.among)


class _ByAddress:
    """Unpacks all experts of a group from where they lie; downs take the place of gates and ups."""

    def __init__(self, table: ExpertTiles, dtype: torch.dtype = torch.bfloat16) -> None:
        self._table, self._dtype = table, dtype
        self._room: torch.Tensor | None = None  # of the group at hand

    def gates_and_ups(self, group: ExpertGroup) -> torch.Tensor:
        width = self._table.width
        self._room = plain = empty_gates_and_ups(self._table, group, self._dtype)
        for part in range(2):
            _unpack(self._table, part, plain[:, part * width :], group)
        return plain

    def downs(self, group: ExpertGroup) -> torch.Tensor:
        assert self._room is not None
        count, width, hidden = len(self._room), self._table.width, self._table.hidden
        plain = self._room.flatten()[: count * hidden * width].view(count, hidden, width)
        _unpack(self._table, 2, plain, group)
        return plain


def empty_gates_and_ups(
    table: ExpertTiles, group: ExpertGroup, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return room for a group's gates and ups, until the frame around the call is left."""
    count = group.last - group.first + 1
    return scratch.empty(
        count, 2 * table.width, table.hidden, dtype=dtype, device=table.addresses.device
    )


@dataclass(frozen=True, slots=True, eq=False)
class SomeExperts:
    """Experts of a group that are unpacked at once."""

    which: torch.Tensor  # int32 [n], counted from the group's first, on the GPU
    # uint8: all of gate, up and down of one expert after another; None: they lie where the table
    # says.
    staged: torch.Tensor | None = None


def unpack_some(
    table: ExpertTiles,
    some: SomeExperts,
    group: ExpertGroup,
    gates_and_ups: torch.Tensor,
    downs: torch.Tensor,
) -> None:
    """Write all matrices of those experts that were chosen to their places in a group."""
    sizes = matrix_bytes(table.kinds, table.width, table.hidden)
    outs = (gates_and_ups, gates_and_ups[:, table.width :], downs)
    for part, out in enumerate(outs):
        rows, columns = _sides(table, part)
        tiles, records = _up(rows, TILE_ROWS), _up(columns, RECORD_COLUMNS)
        constants = unpack_defines(table.kinds[part], out.dtype)
        staged = None if some.staged is None else some.staged[sum(sizes[:part]) :]
        compile_kernel("dequant.cu", "dequantise_some", constants)(
            (tiles, _up(records, 4), len(some.which)),
            (128,),
            (
                *(some.which, staged, sum(sizes), table.addresses[group.first :], group.ends),
                *(out, part, out.stride(0), rows, columns, records),
            ),
        )


def matrix_bytes(kinds: Sequence[QuantType], width: int, hidden: int) -> tuple[int, int, int]:
    """Return the bytes of an expert's gate, up and down in tiles."""
    gate, up, down = kinds
    return (
        tile_bytes(gate, width, hidden),
        tile_bytes(up, width, hidden),
        tile_bytes(down, hidden, width),
    )


def _unpack(table: ExpertTiles, part: int, out: torch.Tensor, group: ExpertGroup) -> None:
    """Write one matrix of every chosen expert of a group to its place in `out [experts, ...]`."""
    rows, columns = _sides(table, part)
    tiles, records = _up(rows, TILE_ROWS), _up(columns, RECORD_COLUMNS)
    constants = unpack_defines(table.kinds[part], out.dtype)
    addresses = table.addresses[group.first : group.last + 1]
    compile_kernel("dequant.cu", "dequantise_experts", constants)(
        (tiles, _up(records, 4), len(addresses)),
        (128,),
        (addresses, group.ends, out, part, out.stride(0), rows, columns, records),
    )


def _sides(table: ExpertTiles, part: int) -> tuple[int, int]:
    """Rows and columns of one of an expert's matrices."""
    return (table.hidden, table.width) if part == 2 else (table.width, table.hidden)


def _up(size: int, step: int) -> int:
    return -(-size // step)
