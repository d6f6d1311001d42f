"""Products with packed weights on an NVIDIA GPU: few rows on 8-bit tensor cores, many in bf16."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from headroom.kernels.cuda import unpacked
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.pack import PACKED, RECORD_COLUMNS, TILE_ROWS, pack, tile_bytes
from headroom.kernels.ops import Case
from headroom.kernels.weight import Weight

TILES = unpacked.TILES
FEW_ROWS = 32  # the most that one pass over the weight serves; the planner counts the same
PACK_BYTES = 64 << 20  # of a file's blocks packed at a time
QUANTISE_THREADS = 256
MOST_OUTPUTS = 4  # of matrices that share an input


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedRows:
    """Rows rounded to 8 bits per 32 columns, as the product kernels read them."""

    values: torch.Tensor  # uint8 [rows, records * 256]
    scales: torch.Tensor  # float32 [groups, blocks, group]
    sums: torch.Tensor
    halves: torch.Tensor
    records: int
    group: int = 8  # rows whose scales lie together


def refuses(case: Case) -> str | None:
    """Say why a case cannot run here."""
    if case.device != "cuda":
        return f"runs on cuda, not {case.device}"
    if case.reference:
        return "plain kernels were asked for"
    if case.triton:
        return "Triton's kernels were asked for"
    if case.quant not in PACKED:
        return f"{case.quant} is not a packed type of the tensor cores"
    return None if case.dtype == "bf16" else f"computes in bf16, not {case.dtype}"


def prepare(weight: Weight) -> Weight:
    """Return a weight in tiles on the GPU; its blocks are taken apart there, some at a time."""
    size = tile_bytes(weight.quant, weight.rows, weight.columns)
    tiles = torch.empty(size, dtype=torch.uint8, device="cuda")
    step = max(1, PACK_BYTES // (weight.data.shape[1] * TILE_ROWS)) * TILE_ROWS
    for part, source in zip(
        torch.split(tiles, tile_bytes(weight.quant, step, weight.columns)),
        torch.split(weight.data, step),
        strict=True,
    ):
        pack(source.to("cuda"), weight.quant, len(source), weight.columns, part)
    return replace(weight, data=tiles, layout=TILES)


@dataclass(frozen=True, slots=True, eq=False)
class RowNorm:
    """A norm that rows go through on their way into a product."""

    weight: torch.Tensor
    eps: float
    out: torch.Tensor | None = None  # gets the normed rows as float32


def quantise(x: torch.Tensor, group: int = 8, norm: RowNorm | None = None) -> QuantisedRows:
    """Round rows to 8 bits, normed first where a norm is given."""
    weight, eps, normed = (norm.weight, norm.eps, norm.out) if norm else (None, 0.0, None)
    return _quantise(x, None, 0, (weight, eps, normed), group)


def quantise_gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> QuantisedRows:
    """Round `act(gate) * up` to 8 bits."""
    return _quantise(gate, up, int(activation == "gelu"), (None, 0.0, None), 8)


def _quantise(
    x: torch.Tensor,
    up: torch.Tensor | None,
    gelu: int,
    norm: tuple[torch.Tensor | None, float, torch.Tensor | None],
    group: int,
) -> QuantisedRows:
    rows, columns = x.shape
    records = -(-columns // RECORD_COLUMNS)
    padded = -(-rows // group) * group
    values = torch.empty(rows, records * RECORD_COLUMNS, dtype=torch.uint8, device=x.device)
    scales = torch.empty(padded * records * 8, device=x.device)
    sums, halves = torch.empty_like(scales), torch.empty(2 * len(scales), device=x.device)
    kernel = compile_kernel("activations.cu", "quantise")
    kernel(
        (rows, -(-records // (QUANTISE_THREADS // 32))), (QUANTISE_THREADS,),
        (x, up, gelu, *norm, values, scales, sums, halves, columns, records, group),
    )  # fmt: skip
    return QuantisedRows(values, scales, sums, halves, records, group)


def product(
    x: QuantisedRows, weight: Weight, out: torch.Tensor, add: torch.Tensor | None = None
) -> torch.Tensor:
    """Write `x` times the weight's transpose to `out [rows, weight.rows]`, plus `add`."""
    products(x, weight, (out,), add)
    return out


def products(
    x: QuantisedRows,
    weight: Weight,
    outs: Sequence[torch.Tensor],
    add: torch.Tensor | None = None,
) -> None:
    """Multiply with up to four matrices that lie one after another; each has its own output."""
    rows, tiles = outs[0].shape[0], -(-weight.rows // TILE_ROWS)
    ends = list(accumulate(out.shape[1] for out in outs))
    rest = MOST_OUTPUTS - len(outs)
    where = (*outs, *[None] * rest, *ends, *[ends[-1]] * rest)
    warps = warps_for(tiles, x.records)
    if rows == 1:
        warps = warps_for_one(tiles, x.records)
    defines = {"KIND": weight.quant.ggml_id, "WARPS": warps}
    if rows == 1:
        kernel = compile_kernel("matmul.cu", "product_one", defines | {"TILES": 1})
        kernel(
            (tiles,), (warps * 32,),
            (weight.data, x.values, x.scales, x.group, add, *where, x.records),
        )  # fmt: skip
        return
    groups = 1 if rows <= 8 else 2  # of eight rows that share a pass over the weight
    kernel = compile_kernel("matmul.cu", "product", defines | {"TILES": groups})
    kernel(
        (tiles, -(-rows // (8 * groups))), (warps * 32,),
        (weight.data, x.values, x.scales, x.sums, x.halves, add, *where, rows, x.records),
    )  # fmt: skip


def warps_for(tiles: int, records: int) -> int:
    """Return how many warps share a tile's columns; it depends on the weight alone.

    Measured 2026-11-15 on an H200: four, or more where there are too few tiles to fill it.
    """
    wanted = 4 if tiles >= 256 else 8 if tiles >= 160 else 16
    while wanted > 2 and wanted > records:
        wanted //= 2
    return wanted


def warps_for_one(tiles: int, records: int) -> int:
    """Return the same for a single row, whose warps finish sooner (measured likewise)."""
    wanted = 4 if tiles >= 1024 else 8 if tiles >= 200 else 16
    while wanted > 2 and wanted > records:
        wanted //= 2
    return wanted


def matmul(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose in float32."""
    rows = x.shape[0]
    if out is None:
        out = torch.empty(rows, weight.rows, device=x.device)
    if rows <= FEW_ROWS:
        return product(quantise(x.contiguous()), weight, out)
    unpacked.multiply(x.to(torch.bfloat16), weight, (out,))
    return out
