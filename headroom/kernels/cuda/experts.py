"""Routed experts of many rows on a GPU: products of rows sorted by expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda import grouped, half_experts, scratch, sizes, sorted_experts
from headroom.kernels.cuda.compile import compile_kernel, refuses_device
from headroom.kernels.cuda.expert_tiles import (
    NO_OTHERS,
    ExpertTiles,
    Kinds,
    Others,
)
from headroom.kernels.cuda.half_experts import Unpacked
from headroom.kernels.cuda.narrow import NarrowRows, as_narrow, refuses_type
from headroom.kernels.cuda.picks import (
    ExpertGroup,
    expert_group,
    gather_rows,
    grouped_product,
    product_way,
    sort_in_groups,
)
from headroom.kernels.cuda.sizes import (
    EXPERT_STEP,
    RECORD_COLUMNS,
    TILE_ROWS,
    TILED,
    experts_at_once,
    steps_of,
)
from headroom.kernels.ops import Case

UNPACK_WARPS = 4


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
    """Return the weighted sum of each row's experts, each unpacked once for rows that chose it.

    Where experts have few rows each their tiles are multiplied as they lie.
    """
    narrow = as_narrow(x)
    if _as_they_lie(ids, table):
        if out is None:
            out = torch.empty(len(ids), table.hidden, device=ids.device)
        _compile_unpacked(table.kinds, activation, narrow.values.dtype, ids.device)
        rest = (*others.arguments, out)
        sorted_experts.sum_experts(narrow, (ids, weights), table, activation, rest)
        return out
    rows = ChosenRows(narrow.values, ids, weights, narrow.powers)
    unpacked = _ByAddress(table, narrow.values.dtype)
    return sum_groups(rows, table, activation, unpacked, others, out)


def _as_they_lie(ids: torch.Tensor, table: ExpertTiles) -> bool:
    """Tell whether tiles are multiplied packed: few rows of an expert, and no link to any."""
    here = all(part.device == ids.device for part in table.memory)
    return here and len(ids) <= sizes.sorted_rows(len(table.addresses), ids.shape[1])


@cache
def _compile_unpacked(
    kinds: Kinds, activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Compile what steps of more rows run: those come when a request waits."""
    compile_kernel("unpack.cu", "unpack", _unpack_constants(kinds, dtype))
    compile_kernel("picks.cu", "sort_picks")
    if dtype == torch.float16:
        half_experts.compile_all(activation)
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
                half_experts.add_group(x, group, unpacked, activation, (ids, weights), rest)
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
    own = scratch.empty(picks, hidden, dtype=torch.bfloat16, device=x.device)
    inner = scratch.empty(picks, width, dtype=torch.bfloat16, device=x.device)
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
    return scratch.empty(
        group.size, 2 * table.width, table.hidden, dtype=dtype, device=table.addresses.device
    )


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
