"""Routed experts on a GPU: packed products for few rows, bf16 products of sorted rows for many."""

from dataclasses import dataclass

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda.compile import Argument, compile_kernel
from headroom.kernels.cuda.matmul import FEW_ROWS, HalfRows, half_rows, pack_into
from headroom.kernels.cuda.pack import PACKED, RECORD_COLUMNS, TILE_ROWS, tile_bytes
from headroom.kernels.cuda.picks import grouped_product, sort_picks
from headroom.kernels.ops import Case, ExpertTable

WARPS = 8
PARTS = 3  # matrices of an expert: gate, up, down


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
    if strange := [str(kind) for kind in case.experts if kind not in PACKED]:
        return f"{strange[0]} is not a packed type of the tensor cores"
    return None if case.dtype == "bf16" else f"computes in bf16, not {case.dtype}"


def prepare(table: ExpertTable) -> ExpertTiles:
    """Return the experts in tiles on the GPU, each of the three parts in one piece."""
    pieces, addresses = [], []
    for part in table.parts:
        size = tile_bytes(part[0].quant, part[0].rows, part[0].columns)
        piece = torch.empty(len(part), size, dtype=torch.uint8, device="cuda")
        for place, weight in zip(piece, part, strict=True):
            pack_into(place, weight)
        pieces.append(piece)
        addresses.append([piece.data_ptr() + size * number for number in range(len(part))])
    where = torch.tensor(addresses, dtype=torch.int64, device="cuda").T.contiguous()
    gate, size = table.gate[0], sum(piece.nbytes for piece in pieces)
    return ExpertTiles(where, table.kinds, gate.rows, gate.columns, size, tuple(pieces))


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
    inner = torch.empty(rows * used, table.width, device=device)
    compile_kernel("experts.cu", "gate_up", constants)(
        (_up(table.width, 32), rows * used),
        (WARPS * 32,),
        (
            *(table.addresses, ids, x.pieces, x.groups, used, table.width, x.records),
            inner,
        ),
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
    """Return the same for many rows: each expert unpacked once for the rows that chose it."""
    (rows, used), width, hidden = ids.shape, table.width, table.hidden
    count = len(table.addresses)
    picks = sort_picks(ids, count)
    constants = _constants(table, activation)
    plain = torch.empty(count, 2 * width, hidden, dtype=torch.bfloat16, device=x.device)
    for part in range(2):
        _unpack(table, part, plain[:, part * width :], picks.ends)
    both = grouped_product(x.to(torch.bfloat16)[picks.rows], plain, picks.ends)
    inner = both.new_empty(rows * used, width)
    compile_kernel("experts.cu", "activate", constants)(
        (4096,), (256,), (both, inner, rows * used, width)
    )
    plain = plain.flatten()[: count * hidden * width].view(count, hidden, width)
    _unpack(table, 2, plain, picks.ends)
    answers = grouped_product(inner, plain, picks.ends)
    if out is None:
        out = torch.empty(rows, hidden, device=x.device)
    compile_kernel("experts.cu", "combine", constants)(
        (rows,),
        (256,),
        (answers, picks.places, ids, weights, used, hidden, *others.arguments, out),
    )
    return out


def _unpack(table: ExpertTiles, part: int, out: torch.Tensor, ends: torch.Tensor) -> None:
    """Write one matrix of every chosen expert to its place in `out [experts, ...]`."""
    rows, columns = (table.hidden, table.width) if part == 2 else (table.width, table.hidden)
    tiles, records = _up(rows, TILE_ROWS), _up(columns, RECORD_COLUMNS)
    constants = {"KIND": table.kinds[part].ggml_id, "WARPS": 4}
    compile_kernel("dequant.cu", "dequantise_experts", constants)(
        (tiles, _up(records, 4), len(table.addresses)),
        (128,),
        (table.addresses, ends, out, part, out.stride(0), rows, columns, records),
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
