"""Routed experts of many rows: sorted by expert, multiplied with experts unpacked to 16 bits."""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from headroom.kernels.cuda import experts_packed, experts_scratch, grouped, scratch
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.experts import NO_ADDENDS, Addends, ExpertTiles, Kinds
from headroom.kernels.cuda.experts_scratch import ExpertShape, experts_at_once, group_buffers
from headroom.kernels.cuda.grouped import grouped_product, product_way
from headroom.kernels.cuda.launch import Argument
from headroom.kernels.cuda.matmul import POWER_THREADS, NarrowRows, as_narrow
from headroom.kernels.cuda.sizes import RECORD_COLUMNS, TILE_ROWS, steps_of
from headroom.kernels.ops import Picks

PICK_SORT_THREADS = 512  # of a block of picks.cu
GATHER_THREADS, GATHER_BLOCKS = 256, 4096


@dataclass(frozen=True, slots=True, eq=False)
class SortedPicks:
    """The picks of many rows, sorted by expert; picks with negative ids come last."""

    rows: torch.Tensor  # int64 [picks]: the row of the pick at each place
    places: torch.Tensor  # int64 [rows, used]: the place of each pick
    ends: torch.Tensor  # int32 [experts]: the place after an expert's last pick
    group_ends: torch.Tensor  # `ends`, counted from the first place of an expert's group


def sort_in_groups(ids: torch.Tensor, experts: int, each: int) -> SortedPicks:
    """Sort the picks, int32 `[rows, used]`, in one launch; a group has `each` experts."""
    assert ids.is_contiguous()
    (rows, used), device = ids.shape, ids.device
    owners, places = scratch.empty_integers((2, rows * used), "i64", device).unbind()
    ends, group_ends = scratch.empty_integers((2, experts), "i32", device).unbind()
    compile_kernel("picks.cu", "sort_picks")(
        (experts + 1,),
        (PICK_SORT_THREADS,),
        (ids, owners, places, ends, group_ends, rows * used, used, experts, each),
    )
    return SortedPicks(owners, places.view(rows, used), ends, group_ends)


def sort_picks(ids: torch.Tensor, experts: int) -> SortedPicks:
    """Sort the picks `[rows, used]` of one group with torch, without waiting for the device."""
    flat = ids.flatten().long()
    numbers, order = torch.where(flat < 0, experts, flat).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=ids.device)
    every = torch.arange(experts, device=ids.device)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    return SortedPicks(order // ids.shape[1], places.view(ids.shape), ends, ends)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGroup:
    """Neighbouring experts and their picks, which come first in the group's buffers."""

    first: int  # number of the first expert
    last: int
    start: torch.Tensor | None  # int32 [1]: the group's first place; None: 0
    picks: SortedPicks  # of all groups
    ends: torch.Tensor  # int32 [experts of the group], counted from `start`

    @property
    def most(self) -> int:
        """The most picks that the group can have: all of the step."""
        return self.picks.rows.shape[0]

    @property
    def among(self) -> int:
        """The number of experts in all groups, which share the picks."""
        return self.picks.ends.shape[0]

    @property
    def size(self) -> int:
        """The number of experts in the group."""
        return self.last - self.first + 1


def expert_group(picks: SortedPicks, first: int, count: int) -> ExpertGroup:
    """Return the group of `count` experts from `first` on, without waiting for the device."""
    ends = picks.group_ends[first : first + count]
    start = picks.ends[first - 1 : first] if first else None
    return ExpertGroup(first, first + ends.shape[0] - 1, start, picks, ends)


def gather_rows(x: torch.Tensor, group: ExpertGroup, out: torch.Tensor) -> torch.Tensor:
    """Copy the 16-bit rows of `x` that a group's picks read to `out [picks, ...]` and return it.

    Rows after the group's last pick are undefined.
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
    """Unpacks a group's experts to the type of the rows; called in this order within a frame."""

    def gates_and_ups(self, group: ExpertGroup) -> torch.Tensor: ...

    def downs(self, group: ExpertGroup) -> torch.Tensor: ...


def compile_all(activation: str) -> None:
    """Compile the kernels before a step needs them; all but the products are in one source."""
    compile_kernel("half_experts.cu", "combine", _constants(activation))
    grouped.kernels(torch.float16)


def add_group(
    x: NarrowRows,
    group: ExpertGroup,
    unpacked: Unpacked,
    activation: str,
    picks: Picks,
    rest: tuple[Argument, ...],  # what is added to each row's sum (see Addends), and the output
) -> None:
    """Write the weighted sums of a group's expert outputs, plus what `rest` adds."""
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
    """Return `act(gate) * up` of a group's picks; values after its last pick are undefined."""
    picks, width = group.most, gates_and_ups.shape[1] // 2
    device, columns = x.values.device, x.values.shape[1]
    buffers = group_buffers(group.size, ExpertShape(width, columns), picks, "f16")
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
    """Many rows and the picks of each row."""

    x: torch.Tensor  # bf16 or f16 [rows, hidden]
    ids: torch.Tensor  # int32 [rows, used], negative: none
    weights: torch.Tensor  # [rows, used]
    powers: torch.Tensor | None = None  # [rows], for rows in f16


def many_rows(
    x: torch.Tensor | NarrowRows,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: ExpertTiles,
    activation: str,
    addends: Addends = NO_ADDENDS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts; an expert is unpacked once for all its rows.

    If experts have few rows each, their packed tiles are multiplied without unpacking.
    """
    narrow = as_narrow(x)
    if _as_they_lie(ids, table):
        if out is None:
            out = torch.empty(len(ids), table.hidden, device=ids.device)
        _compile_unpacked(table.kinds, activation, narrow.values.dtype, ids.device)
        rest = (*addends.arguments, out)
        experts_packed.sum_experts(narrow, Picks(ids, weights), table, activation, rest)
        return out
    rows = ChosenRows(narrow.values, ids, weights, narrow.powers)
    unpacked = _ByAddress(table, narrow.values.dtype)
    return sum_groups(rows, table, activation, unpacked, addends, out)


def _as_they_lie(ids: torch.Tensor, table: ExpertTiles) -> bool:
    """Return whether packed tiles are multiplied: few rows per expert, all experts on the GPU."""
    here = all(part.device == ids.device for part in table.memory)
    return here and len(ids) <= experts_scratch.sorted_rows(len(table.addresses), ids.shape[1])


@cache
def _compile_unpacked(
    kinds: Kinds, activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Compile the kernels of longer steps now, so that a later request does not wait for them."""
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
    addends: Addends = NO_ADDENDS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, which `unpacked` unpacks group by group.

    A group has as many experts as may be unpacked at a time. A row's sum runs over the groups in
    order, and within a group over its experts, the best first.
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
                x, rest = NarrowRows(chosen.x, chosen.powers), (*addends.arguments, out)
                add_group(x, group, unpacked, activation, Picks(ids, weights), rest)
                addends = Addends(residual=out)
                continue
            answers = _group_answers(chosen.x, group, table.width, constants, unpacked)
            compile_kernel("many_experts.cu", "combine", constants)(
                (rows,),
                (256,),
                (
                    *(answers, picks.places, group.start, ids, group.first, group.last),
                    *(weights, used, table.hidden, *addends.arguments, out),
                ),
            )
        addends = Addends(residual=out)
    return out


def group_bounds(table: ExpertTiles) -> list[tuple[int, int]]:
    """Return the first expert and the size of every group; the last may be smaller."""
    count = len(table.addresses)
    each = experts_at_once(count, ExpertShape(table.width, table.hidden), scratch.unpack_bytes())
    return [(first, min(each, count - first)) for first in range(0, count, each)]


def _group_answers(
    x: torch.Tensor,
    group: ExpertGroup,
    width: int,
    constants: dict[str, int],
    unpacked: Unpacked,
) -> torch.Tensor:
    """Return the outputs `[picks, hidden]` of a group's experts in bf16, sorted as the picks."""
    picks, hidden = group.most, x.shape[1]
    plain = unpacked.gates_and_ups(group)
    buffers = group_buffers(group.size, ExpertShape(width, hidden), picks, "bf16")
    own = scratch.take(buffers.rows, x.device)
    inner = scratch.take(buffers.inner, x.device)
    both = grouped_product(gather_rows(x, group, own), plain, group.ends, group.among)
    compile_kernel("many_experts.cu", "activate", constants)(
        (4096,), (256,), (both, inner, group.ends, group.size - 1, width)
    )
    del both  # frees its memory for the outputs
    return grouped_product(inner, unpacked.downs(group), group.ends, group.among)


class _ByAddress:
    """Unpacks all experts of a group from the table's addresses; downs overwrite gates and ups."""

    def __init__(self, table: ExpertTiles, dtype: torch.dtype = torch.bfloat16) -> None:
        self._table, self._dtype = table, dtype
        self._room: torch.Tensor | None = None  # memory of the current group

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
    """Return memory for a group's gates and ups, valid until the frame around the call is left."""
    shape = ExpertShape(table.width, table.hidden)
    buffers = group_buffers(group.size, shape, group.most, scratch.name_of(dtype))
    return scratch.take(buffers.gates_and_ups, table.addresses.device)


@dataclass(frozen=True, slots=True, eq=False)
class SomeExperts:
    """Experts of a group that are unpacked in one launch."""

    which: torch.Tensor | None  # int32 [n] on the GPU, relative to the group's first; None: all
    # uint8: gate, up and down of one expert after another; None: read from the table's addresses.
    staged: torch.Tensor | None = None


ALL_EXPERTS = SomeExperts(None)


def unpack_some(
    table: ExpertTiles,
    some: SomeExperts,
    group: ExpertGroup,
    gates_and_ups: torch.Tensor | None,
    downs: torch.Tensor | None,
) -> None:
    """Unpack matrices of those of the experts that have picks to their places in the group.

    Gates and ups, or downs, are left out if their output is None.
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
    """Return the blocks that unpack a matrix, one record per warp."""
    return steps_of(rows, TILE_ROWS) * steps_of(steps_of(columns, RECORD_COLUMNS), UNPACK_WARPS)
