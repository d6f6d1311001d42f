"""Routed experts on a GPU: packed products for few rows, bf16 products of sorted rows for many."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.compile import Argument, compile_kernel
from headroom.kernels.cuda.matmul import FEW_ROWS, HalfRows, half_rows
from headroom.kernels.cuda.pack import PACKED, RECORD_COLUMNS, TILE_ROWS
from headroom.kernels.cuda.picks import ExpertGroup, expert_group, grouped_product, sort_picks
from headroom.kernels.ops import Case

WARPS = 8
PARTS = 3  # matrices of an expert: gate, up, down
Kinds = tuple[QuantType, ...]  # of those


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTiles:
    """One layer's experts in tiles, found by their addresses."""

    addresses: torch.Tensor  # int64 [experts, PARTS], on the GPU
    kinds: tuple[QuantType, ...]
    width: int  # of an expert
    hidden: int
    nbytes: int
    memory: tuple[torch.Tensor, ...]  # that the addresses point into, kept alive


@dataclass(frozen=True, slots=True, eq=False)
class Others:
    """What rows get besides their routed experts, added where those are summed."""

    residual: torch.Tensor | None = None  # [rows, hidden]
    shared: torch.Tensor | None = None  # [rows, hidden]: of the expert that every row visits
    shared_logits: torch.Tensor | None = None  # [rows, n]: of its weight, the first of each row

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The last arguments of kernels that sum, but for their output."""
        stride = 0 if self.shared_logits is None else self.shared_logits.stride(0)
        return self.residual, self.shared, self.shared_logits, stride


NO_OTHERS = Others()


def refuses(case: Case) -> str | None:
    """Say why a case cannot run here."""
    if case.device != "cuda":
        return f"runs on cuda, not {case.device}"
    if case.reference:
        return "plain kernels were asked for"
    if case.triton:
        return "Triton's kernels were asked for"
    if strange := [str(kind) for kind in case.experts if kind not in PACKED]:
        return f"{strange[0]} is not a packed type of the tensor cores"
    return None if case.dtype == "bf16" else f"computes in bf16, not {case.dtype}"


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


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: ExpertTiles,
    activation: str,
    dtype: str,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, the best first."""
    if len(x) <= FEW_ROWS:
        return few_rows(half_rows(x.contiguous()), ids, weights, table, activation)
    return many_rows(x, ids, weights, table, activation)


def few_rows(
    x: HalfRows,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: ExpertTiles,
    activation: str,
    others: Others = NO_OTHERS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, for rows in f16.

    Picks with a negative id are passed over. `out` may be the residual itself.
    """
    (rows, used), device = ids.shape, ids.device
    constants = _constants(table, activation) | {"LANES": x.lanes}
    inner = scratch.empty(rows * used, table.width, device=device)
    compile_kernel("experts.cu", "gate_up", constants)(
        (_up(table.width, 32), rows * used),
        (WARPS * 32,),
        (
            *(table.addresses, ids, x.pieces, x.groups, used, table.width, x.records),
            inner,
        ),
        early=True,
    )
    if out is None:
        out = torch.empty(rows, table.hidden, device=device)
    records = _up(table.width, RECORD_COLUMNS)
    compile_kernel("experts.cu", "down", constants)(
        (_up(table.hidden, TILE_ROWS), rows),
        (WARPS * 32,),
        (
            *(table.addresses, ids, weights, inner, used, table.width, table.hidden, records),
            *(*others.arguments, out),
        ),
        early=True,
    )
    return out


def many_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: ExpertTiles,
    activation: str,
    others: Others = NO_OTHERS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the same for many rows: each expert unpacked once for the rows that chose it.

    As many experts at a time as may be unpacked; a row's sum runs over those groups in order, and
    within one over its experts, the best first.
    """
    rows, used = ids.shape
    picks = sort_picks(ids, len(table.addresses))
    constants = _constants(table, activation)
    narrow = x if x.dtype == torch.bfloat16 else x.to(torch.bfloat16)
    if out is None:
        out = torch.empty(rows, table.hidden, device=x.device)
    each = experts_at_once(len(table.addresses), table.width, table.hidden, scratch.unpack_bytes())
    for first in range(0, len(table.addresses), each):
        group = expert_group(picks, first, each)
        with scratch.frame():
            answers = _group_answers(narrow, group, table, constants)
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


def experts_at_once(count: int, width: int, hidden: int, most_bytes: int) -> int:
    """Return how many experts' gates and ups are unpacked at a time, in groups of one size."""
    fitting = max(1, most_bytes // (4 * width * hidden))
    return -(-count // -(-count // fitting))


def _group_answers(
    x: torch.Tensor, group: ExpertGroup, table: ExpertTiles, constants: dict[str, int]
) -> torch.Tensor:
    """Return the answers `[picks, hidden]` in bf16 of a group's experts, its own picks first."""
    count, picks = group.last - group.first + 1, len(group.rows)
    width, hidden = table.width, table.hidden
    plain = scratch.empty(count, 2 * width, hidden, dtype=torch.bfloat16, device=x.device)
    own = scratch.empty(picks, hidden, dtype=torch.bfloat16, device=x.device)
    inner = scratch.empty(picks, width, dtype=torch.bfloat16, device=x.device)
    for part in range(2):
        _unpack(table, part, plain[:, part * width :], group)
    torch.index_select(x, 0, group.rows, out=own)
    both = grouped_product(own, plain, group.ends)
    compile_kernel("experts.cu", "activate", constants)(
        (4096,), (256,), (both, inner, picks, width)
    )
    del both  # its memory may serve the answers
    plain = plain.flatten()[: count * hidden * width].view(count, hidden, width)
    _unpack(table, 2, plain, group)
    return grouped_product(inner, plain, group.ends)


def _unpack(table: ExpertTiles, part: int, out: torch.Tensor, group: ExpertGroup) -> None:
    """Write one matrix of every chosen expert of a group to its place in `out [experts, ...]`."""
    rows, columns = (table.hidden, table.width) if part == 2 else (table.width, table.hidden)
    tiles, records = _up(rows, TILE_ROWS), _up(columns, RECORD_COLUMNS)
    constants = {"KIND": table.kinds[part].ggml_id, "WARPS": 4}
    addresses = table.addresses[group.first : group.last + 1]
    compile_kernel("dequant.cu", "dequantise_experts", constants)(
        (tiles, _up(records, 4), len(addresses)),
        (128,),
        (addresses, group.ends, out, part, out.stride(0), rows, columns, records),
    )


def _constants(table: ExpertTiles, activation: str) -> dict[str, int]:
    gate, up, down = (kind.ggml_id for kind in table.kinds)
    return {
        "GATE": gate,
        "UP": up,
        "DOWN": down,
        "GELU": int(activation == "gelu"),
        "WARPS": WARPS,
        "LANES": 4,  # any, where no rows in f16 are read
    }


def _up(size: int, step: int) -> int:
    return -(-size // step)
