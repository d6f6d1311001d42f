"""Routed experts of many rows: sorted by expert, multiplied with experts unpacked to 16 bits."""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from headroom.kernels.cuda import experts_packed, experts_scratch, grouped, scratch
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.experts import NO_OTHERS, ExpertTiles, Kinds, Others
from headroom.kernels.cuda.experts_scratch import experts_at_once, group_buffers
from headroom.kernels.cuda.grouped import grouped_product, product_way
from headroom.kernels.cuda.launch import Argument
from headroom.kernels.cuda.matmul import POWER_THREADS, NarrowRows, as_narrow
from headroom.kernels.cuda.sizes import RECORD_COLUMNS, TILE_ROWS, steps_of

PICK_SORT_THREADS = 512  # of picks.cu
GATHER_THREADS, GATHER_BLOCKS = 256, 4096


@dataclass(frozen=True, slots=True, eq=False)
class SortedPicks:
    """The picks of many rows, sorted by expert; those of no expert (negative ids) come last."""

    rows: torch.Tensor  # int64 [picks]: whose pick stands at a place
    places: torch.Tensor  # int64 [rows, used]: where a pick stands
    ends: torch.Tensor  # int32 [experts]: the place after an expert's last
    group_ends: torch.Tensor  # `ends`, counted from the first place of an expert's group


def sort_in_groups(ids: torch.Tensor, experts: int, each: int) -> SortedPicks:
    """Sort the picks int32 `[rows, used]` in one launch; groups are of `each` experts."""
    assert ids.is_contiguous()
    (rows, used), device = ids.shape, ids.device
    owners, places = torch.empty(2, rows * used, dtype=torch.int64, device=device).unbind()
    ends, group_ends = torch.empty(2, experts, dtype=torch.int32, device=device).unbind()
    compile_kernel("picks.cu", "sort_picks")(
        (experts + 1,),
        (PICK_SORT_THREADS,),
        (ids, owners, places, ends, group_ends, rows * used, used, experts, each),
    )
    return SortedPicks(owners, places.view(rows, used), ends, group_ends)


def sort_picks(ids: torch.Tensor, experts: int) -> SortedPicks:
    """Sort the picks `[rows, used]` of one group by torch: nothing waits for the device."""
    flat = ids.flatten().long()
    numbers, order = torch.where(flat < 0, experts, flat).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=ids.device)
    every = torch.arange(experts, device=ids.device)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    return SortedPicks(order // ids.shape[1], places.view(ids.shape), ends, ends)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGroup:
    """The picks of neighbouring experts, their own first: what follows is another group's."""

    first: int  # expert
    last: int
    start: torch.Tensor | None  # int32 [1]: the group's first place among all; None: the very first
    picks: SortedPicks  # of all groups
    ends: torch.Tensor  # int32 [experts of the group], counted from `start`

    @property
    def most(self) -> int:
        """The most picks that it can have: all."""
        return self.picks.rows.shape[0]

    @property
    def among(self) -> int:
        """Experts of all groups, over which the picks spread."""
        return self.picks.ends.shape[0]

    @property
    def size(self) -> int:
        """Its experts."""
        return self.last - self.first + 1


def expert_group(picks: SortedPicks, first: int, count: int) -> ExpertGroup:
    """Return the group of `count` experts from `first` on, without waiting for the device."""
    ends = picks.group_ends[first : first + count]
    start = picks.ends[first - 1 : first] if first else None
    return ExpertGroup(first, first + ends.shape[0] - 1, start, picks, ends)


def gather_rows(x: torch.Tensor, group: ExpertGroup, out: torch.Tensor) -> torch.Tensor:
    """Write the rows of `x`, of 16 bits, that a group's picks belong to; return `out [picks, ...]`.

    Rows after the group's last have no meaning.
    """
    assert x.is_contiguous()
    words = x.shape[1] // 8
    compile_kernel("picks.cu", "gather")(
        (min(group.most, GATHER_BLOCKS),),
        (GATHER_THREADS,),
        (x, group.picks.rows, group.start, group.ends, out, group.size - 1, words),
    )
    return out


class Unpacked(Protocol):
    """Brings a group's experts to the rows' type, asked in this order within a frame."""

    def gates_and_ups(self, group: ExpertGroup) -> torch.Tensor: ...

    def downs(self, group: ExpertGroup) -> torch.Tensor: ...


def compile_all(activation: str) -> None:
    """Compile the kernels before a step needs them: one source has all but the products."""
    compile_kernel("half_experts.cu", "combine", _constants(activation))
    grouped.kernels(torch.float16)


def add_group(
    x: NarrowRows,
    group: ExpertGroup,
    unpacked: Unpacked,
    activation: str,
    picks: tuple[torch.Tensor, torch.Tensor],  # ids and weights
    rest: tuple[Argument, ...],  # what rows get besides, and the output
) -> None:
    """Write the weighted sums of the answers of a group's experts, and what rows get besides."""
    plain = unpacked.gates_and_ups(group)
    inner = _inner_rows(x, group, plain, activation)
    answers = grouped_product(inner.values, unpacked.downs(group), group.ends, group.among)
    ids, weights = picks
    rows, used = ids.shape
    compile_kernel("half_experts.cu", "combine", _constants(activation))(
        (rows,),
        (POWER_THREADS,),
        (
            *(answers, inner.powers, group.picks.places, group.start, ids, group.first, group.last),
            *(weights, used, answers.shape[1], *rest),
        ),
    )


def _inner_rows(
    x: NarrowRows, group: ExpertGroup, gates_and_ups: torch.Tensor, activation: str
) -> NarrowRows:
    """`act(gate) * up` of a group's picks, its own first; those of others have no meaning."""
    picks, width = group.most, gates_and_ups.shape[1] // 2
    device, columns = x.values.device, x.values.shape[1]
    buffers = group_buffers(group.size, (width, columns), picks, "f16")
    assert buffers.powers is not None
    own = scratch.take(buffers.rows, device)
    values = scratch.take(buffers.inner, device)
    powers = scratch.take(buffers.powers, device)
    gathered = gather_rows(x.values, group, own)
    both = grouped_product(gathered, gates_and_ups, group.ends, group.among)
    compile_kernel("half_experts.cu", "activate", _constants(activation))(
        (picks,),
        (POWER_THREADS,),
        (
            *(both, x.powers, group.picks.rows, group.start, group.ends, values, powers),
            *(group.size - 1, width),
        ),
    )
    return NarrowRows(values, powers)


UNPACK_WARPS = 4


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
    """Return the weighted sum of each row's experts, each unpacked once for rows that chose it.

    Where experts have few rows each their tiles are multiplied as they lie.
    """
    narrow = as_narrow(x)
    if _as_they_lie(ids, table):
        if out is None:
            out = torch.empty(len(ids), table.hidden, device=ids.device)
        _compile_unpacked(table.kinds, activation, narrow.values.dtype, ids.device)
        rest = (*others.arguments, out)
        experts_packed.sum_experts(narrow, (ids, weights), table, activation, rest)
        return out
    rows = ChosenRows(narrow.values, ids, weights, narrow.powers)
    unpacked = _ByAddress(table, narrow.values.dtype)
    return sum_groups(rows, table, activation, unpacked, others, out)


def _as_they_lie(ids: torch.Tensor, table: ExpertTiles) -> bool:
    """Tell whether tiles are multiplied packed: few rows of an expert, and no link to any."""
    here = all(part.device == ids.device for part in table.memory)
    return here and len(ids) <= experts_scratch.sorted_rows(len(table.addresses), ids.shape[1])


@cache
def _compile_unpacked(
    kinds: Kinds, activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Compile what steps of more rows run: those come when a request waits."""
    compile_kernel("unpack.cu", "unpack", _unpack_constants(kinds, dtype))
    compile_kernel("picks.cu", "sort_picks")
    if dtype == torch.float16:
        compile_all(activation)
        return
    compile_kernel("many_experts.cu", "combine", _constants(activation))
    if product_way(device) == "own":
        grouped.kernels(dtype)


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
    bounds = group_bounds(table)
    picks = sort_in_groups(ids, len(table.addresses), bounds[0][1])
    constants = _constants(activation)
    if out is None:
        out = torch.empty(rows, table.hidden, device=ids.device)
    for first, each in bounds:
        group = expert_group(picks, first, each)
        with scratch.frame():
            if chosen.powers is not None:
                x, rest = NarrowRows(chosen.x, chosen.powers), (*others.arguments, out)
                add_group(x, group, unpacked, activation, (ids, weights), rest)
                others = Others(residual=out)
                continue
            answers = _group_answers(chosen.x, group, table.width, constants, unpacked)
            compile_kernel("many_experts.cu", "combine", constants)(
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
    picks, hidden = group.most, x.shape[1]
    plain = unpacked.gates_and_ups(group)
    buffers = group_buffers(group.size, (width, hidden), picks, "bf16")
    own = scratch.take(buffers.rows, x.device)
    inner = scratch.take(buffers.inner, x.device)
    both = grouped_product(gather_rows(x, group, own), plain, group.ends, group.among)
    compile_kernel("many_experts.cu", "activate", constants)(
        (4096,), (256,), (both, inner, group.ends, group.size - 1, width)
    )
    del both  # its memory may serve the answers
    return grouped_product(inner, unpacked.downs(group), group.ends, group.among)


class _ByAddress:
    """Unpacks all experts of a group from where they lie; downs take the place of gates and ups."""

    def __init__(self, table: ExpertTiles, dtype: torch.dtype = torch.bfloat16) -> None:
        self._table, self._dtype = table, dtype
        self._room: torch.Tensor | None = None  # of the group at hand

    def gates_and_ups(self, group: ExpertGroup) -> torch.Tensor:
        self._room = plain = empty_gates_and_ups(self._table, group, self._dtype)
        unpack_some(self._table, ALL_EXPERTS, group, plain, None)
        return plain

    def downs(self, group: ExpertGroup) -> torch.Tensor:
        assert self._room is not None
        count, width, hidden = len(self._room), self._table.width, self._table.hidden
        plain = self._room.flatten()[: count * hidden * width].view(count, hidden, width)
        unpack_some(self._table, ALL_EXPERTS, group, None, plain)
        return plain


def empty_gates_and_ups(
    table: ExpertTiles, group: ExpertGroup, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return room for a group's gates and ups, until the frame around the call is left."""
    sizes = table.width, table.hidden
    buffers = group_buffers(group.size, sizes, group.most, scratch.name_of(dtype))
    return scratch.take(buffers.gates_and_ups, table.addresses.device)


@dataclass(frozen=True, slots=True, eq=False)
class SomeExperts:
    """Experts of a group that are unpacked at once."""

    which: torch.Tensor | None  # int32 [n], counted from the group's first, on the GPU; None: all
    # uint8: all of gate, up and down of one expert after another; None: they lie where the table
    # says.
    staged: torch.Tensor | None = None


ALL_EXPERTS = SomeExperts(None)


def unpack_some(
    table: ExpertTiles,
    some: SomeExperts,
    group: ExpertGroup,
    gates_and_ups: torch.Tensor | None,
    downs: torch.Tensor | None,
) -> None:
    """Write matrices of those experts that were chosen to their places in a group, in one launch.

    None: none of those matrices.
    """
    width, hidden = table.width, table.hidden
    wide, high = 2 * _unpack_blocks(width, hidden), _unpack_blocks(hidden, width)
    first, end = 0 if gates_and_ups is not None else wide, wide if downs is None else wide + high
    out = downs if gates_and_ups is None else gates_and_ups
    assert out is not None
    compile_kernel("unpack.cu", "unpack", _unpack_constants(table.kinds, out.dtype))(
        (end - first, group.size if some.which is None else some.which.shape[0]),
        (UNPACK_WARPS * 32,),
        (
            *(some.which, some.staged, table.addresses, group.ends, gates_and_ups, downs),
            *(width, hidden, group.first, first),
        ),
    )


def _constants(activation: str) -> dict[str, int]:
    return {"GELU": int(activation == "gelu")}


def _unpack_constants(kinds: Kinds, dtype: torch.dtype) -> dict[str, int]:
    gate, up, down = (kind.ggml_id for kind in kinds)
    narrow = {"WARPS": UNPACK_WARPS, "OUT_F16": int(dtype == torch.float16)}
    return {"GATE": gate, "UP": up, "DOWN": down} | narrow


def _unpack_blocks(rows: int, columns: int) -> int:
    """Blocks that unpack a matrix, a record for each warp."""
    return steps_of(rows, TILE_ROWS) * steps_of(steps_of(columns, RECORD_COLUMNS), UNPACK_WARPS)
