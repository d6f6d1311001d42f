"""Products with weights in tiles on an NVIDIA GPU: few rows in f16 as they lie, many unpacked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from headroom.kernels.cuda import plain, scratch, unpacked
from headroom.kernels.cuda.compile import compile_kernel, refuses_device, shared_bytes_of
from headroom.kernels.cuda.narrow import narrow_rows, narrow_type, refuses_type
from headroom.kernels.cuda.pack import pack
from headroom.kernels.cuda.sizes import (
    FEW_ROWS,
    GROUP_ROWS,
    RECORD_COLUMNS,
    TILE_ROWS,
    TILED,
    half_rows_bytes,
    lanes_for,
    record_bytes,
    tile_bytes,
)
from headroom.kernels.ops import Case
from headroom.kernels.weight import Weight

TILES = unpacked.TILES
PACK_BYTES = 64 << 20  # of a file's blocks packed at a time
RECORD_WARPS = 8  # of a block that makes rows ready, a record each
SUM_PITCH = 20  # PITCH of matmul.cu
BLOCK_OVERHEAD_BYTES = 2048  # of shared memory: what a block has besides, and what is kept back
BARRIER_BYTES = 256  # of shared memory that matmul.cu has at fixed places, at most
SMALL_BLOCK_BYTES, LARGE_BLOCK_BYTES = 64 << 10, 227 << 10  # of shared memory, on sm_75 and sm_90
LONG_RECORD = 3072  # bytes; of Q6_K, Q8_0, F16 and BF16
MOST_OUTPUTS = 4  # of matrices that share an input


@dataclass(frozen=True, slots=True, eq=False)
class HalfRows:
    """Rows in f16 with a power of two per 256 columns, as the product kernels read them."""

    pieces: torch.Tensor  # uint8, see halves.cuh
    rows: int
    records: int

    @property
    def groups(self) -> int:
        """Groups of eight rows."""
        return -(-self.rows // GROUP_ROWS)

    @property
    def lanes(self) -> int:
        """Lanes that a piece has words for: four a row, of as many rows as there may be."""
        return lanes_for(self.rows)


@dataclass(frozen=True, slots=True)
class Shape:
    """How warps share a product; sums are taken in an order that follows from `split` alone."""

    split: int  # warps that share a tile's columns
    side: int  # warps of a block with tiles of their own
    height: int  # tiles of a warp
    stages: int  # records that a warp has asked for

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.split * self.side

    @property
    def tiles(self) -> int:
        """Tiles that a block works on at a time."""
        return self.side * self.height

    def shared_bytes(self, record: int, groups: int) -> int:
        """Return the shared memory of a block for records of so many bytes."""
        sums = GROUP_ROWS * groups * SUM_PITCH * 4
        return self.warps * self.height * (self.stages * record + sums)


def refuses(case: Case) -> str | None:
    """Say why a case cannot run here."""
    if reason := refuses_device(case):
        return reason
    if case.quant not in TILED:
        return f"{case.quant} has no tiles for the tensor cores"
    return refuses_type(case.dtype)


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


def half_rows(x: torch.Tensor, norm: RowNorm | None = None) -> HalfRows:
    """Return rows in f16, normed first where a norm is given."""
    columns = x.shape[1]
    out = _empty_rows(len(x), columns, x.device)
    weight, eps, normed = (norm.weight, norm.eps, norm.out) if norm else (None, 0.0, None)
    warps = min(32, out.records) if norm else RECORD_WARPS
    compile_kernel("activations.cu", "norm_rows", {"LANES": out.lanes})(
        (out.rows, 1 if norm else -(-out.records // warps)), (warps * 32,),
        (x, weight, eps, normed, out.pieces, columns, out.records), early=True,
    )  # fmt: skip
    return out


def gated_half_rows(gate: torch.Tensor, up: torch.Tensor, activation: str) -> HalfRows:
    """Return `act(gate) * up` in f16."""
    columns = gate.shape[1]
    out = _empty_rows(len(gate), columns, gate.device)
    defines = {"GELU": int(activation == "gelu"), "LANES": out.lanes}
    compile_kernel("activations.cu", "gate_rows", defines)(
        (out.rows, -(-out.records // RECORD_WARPS)), (RECORD_WARPS * 32,),
        (gate, up, out.pieces, columns, out.records), early=True,
    )  # fmt: skip
    return out


def normed_head_rows(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> HalfRows:
    """Return `weight * x / sqrt(mean(x^2) + eps) * silu(gate)` of a row's heads of 128."""
    columns = x[0].numel()
    out = _empty_rows(len(x), columns, x.device)
    compile_kernel("activations.cu", "norm_heads", {"LANES": out.lanes})(
        (out.rows, -(-out.records // RECORD_WARPS)), (RECORD_WARPS * 32,),
        (x, gate, weight, eps, out.pieces, columns, out.records), early=True,
    )  # fmt: skip
    return out


def _empty_rows(rows: int, columns: int, device: torch.device) -> HalfRows:
    pieces = scratch.empty(half_rows_bytes(rows, columns), dtype=torch.uint8, device=device)
    return HalfRows(pieces, rows, -(-columns // RECORD_COLUMNS))


def product(
    x: HalfRows, weight: Weight, out: torch.Tensor, add: torch.Tensor | None = None
) -> torch.Tensor:
    """Write `x` times the weight's transpose to `out [rows, weight.rows]`, plus `add`."""
    products(x, weight, (out,), add)
    return out


def products(
    x: HalfRows,
    weight: Weight,
    outs: Sequence[torch.Tensor],
    add: torch.Tensor | None = None,
) -> None:
    """Multiply with up to four matrices that lie one after another; each has its own output."""
    tiles = -(-weight.rows // TILE_ROWS)
    ends = list(accumulate(out.shape[1] for out in outs))
    rest = MOST_OUTPUTS - len(outs)
    record = record_bytes(weight.quant)
    limit = shared_bytes_of(weight.data.device)
    shape = shape_for(tiles, x.records, x.groups, record, limit)
    defines = {
        "KIND": weight.quant.ggml_id, "GROUPS": x.groups, "LANES": x.lanes, "SPLIT": shape.split,
        "SIDE": shape.side, "HEIGHT": shape.height, "STAGES": shape.stages,
    }  # fmt: skip
    shared = shape.shared_bytes(record, x.groups)
    compile_kernel("matmul.cu", "product", defines)(
        (_blocks(tiles, shape, shared, weight.data.device),), (shape.warps * 32,),
        (
            *(weight.data, x.pieces, add, *outs, *[None] * rest, *ends, *[ends[-1]] * rest),
            *(x.rows, x.records),
        ),
        shared, early=True,
    )  # fmt: skip


def split_for(tiles: int, records: int, record: int, shared_bytes: int) -> int:
    """Return how many warps share a tile's columns; it depends on the weight and the GPU alone."""
    wanted = 8 if tiles >= 200 else 16
    while wanted > 1 and (
        wanted > records or not _fits(Shape(wanted, 1, 1, 1), record, shared_bytes)
    ):
        wanted //= 2
    return wanted


def _fits(
    shape: Shape, record: int, shared_bytes: int, groups: int = -(-FEW_ROWS // GROUP_ROWS)
) -> bool:
    return shape.shared_bytes(record, groups) <= shared_bytes - BARRIER_BYTES


def shape_for(
    tiles: int, records: int, groups: int, record: int, shared_bytes: int = LARGE_BLOCK_BYTES
) -> Shape:
    """Return how a product's warps share the work, for records of so many bytes.

    Measured 2026-11-15 on an H200: two tiles a warp read activations half as often, one leaves room
    for more warps, which matters where tiles are few or records long. With less shared memory a
    warp has one tile, then one stage. On sm_75, whose blocks have 64 KiB, a copy is done when it
    was asked for: a second stage is of no use there.
    """
    split = split_for(tiles, records, record, shared_bytes)
    low = split > 8 or (groups <= 2 and record > LONG_RECORD) or (groups == 2 and tiles < 512)
    side = max(1, 8 // split)
    wanted = [Shape(split, side, 1 if low else 2, 2), Shape(split, side, 1, 2)]
    if shared_bytes > SMALL_BLOCK_BYTES:
        for shape in wanted:
            if _fits(shape, record, shared_bytes, groups):
                return shape
    while side > 1 and not _fits(Shape(split, side, 1, 1), record, shared_bytes, groups):
        side //= 2
    return Shape(split, side, 1, 1)


def _blocks(tiles: int, shape: Shape, shared: int, device: torch.device) -> int:
    """Return as many blocks as there is work for, or as the GPU holds at a time."""
    gpu = torch.cuda.get_device_properties(device)
    room = gpu.shared_memory_per_multiprocessor // (shared + BLOCK_OVERHEAD_BYTES)
    return min(-(-tiles // shape.tiles), gpu.multi_processor_count * max(1, room))


def matmul(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose in float32; unpacked weights lie in rows."""
    if weight.layout != TILES:
        return plain.matmul(x, weight, dtype, out)
    rows = x.shape[0]
    if out is None:
        out = torch.empty(rows, weight.rows, device=x.device)
    if not rows:
        return out
    if rows <= FEW_ROWS:
        return product(half_rows(x.contiguous()), weight, out)
    unpacked.multiply(narrow_rows(x, narrow_type(dtype)), weight, (out,))
    return out
