"""Products with weights in tiles on an NVIDIA GPU: few rows in f16 as they lie, many unpacked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda import plain, scratch, unpacked
from headroom.kernels.cuda.compile import (
    Code,
    compile_kernel,
    properties_of,
    refuses_device,
    shared_bytes_of,
)
from headroom.kernels.cuda.narrow import narrow_rows, narrow_type, refuses_type
from headroom.kernels.cuda.pack import pack
from headroom.kernels.cuda.product_shapes import Gpu, Product, Shape, shape_for
from headroom.kernels.cuda.sizes import (
    BLOCK_OVERHEAD_BYTES,
    DECODE_ROWS,
    GROUP_ROWS,
    MOST_OUTPUTS,
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
RECORD_WARPS = 4  # of a block that makes rows ready, a record each; see activations.cu


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
    compile_kernel("activations.cu", "norm_rows", row_macros(out.rows))(
        (out.rows, 1 if norm else -(-out.records // warps)), (warps * 32,),
        (x, weight, eps, normed, out.pieces, columns, out.records), early=True,
    )  # fmt: skip
    return out


def gated_half_rows(gate: torch.Tensor, up: torch.Tensor, activation: str) -> HalfRows:
    """Return `act(gate) * up` in f16."""
    columns = gate.shape[1]
    out = _empty_rows(len(gate), columns, gate.device)
    compile_kernel("activations.cu", "gate_rows", gate_macros(activation, out.rows))(
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
    compile_kernel("activations.cu", "norm_heads", row_macros(out.rows))(
        (out.rows, -(-out.records // RECORD_WARPS)), (RECORD_WARPS * 32,),
        (x, gate, weight, eps, out.pieces, columns, out.records), early=True,
    )  # fmt: skip
    return out


def row_macros(rows: int) -> dict[str, int]:
    """Return what activations.cu is compiled with for so many rows."""
    return {"LANES": lanes_for(rows)}


def gate_macros(activation: str, rows: int) -> dict[str, int]:
    """Return the same where rows are gated."""
    return {"GELU": int(activation == "gelu"), "LANES": lanes_for(rows)}


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
    shape, macros = product_shape(weight, x.rows, weight.data.device)
    shared = shape.shared_bytes(record_bytes(weight.quant), x.groups)
    compile_kernel("matmul.cu", "product", macros)(
        (_blocks(tiles, shape, shared, weight.data.device),), (shape.warps * 32,),
        (
            *(weight.data, x.pieces, add, *outs, *[None] * rest, *ends, *[ends[-1]] * rest),
            *(x.rows, x.records),
        ),
        shared, early=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TiledSize:
    """A weight in tiles as far as kernels depend on it."""

    quant: QuantType
    rows: int
    columns: int

    def codes(self, rows: int, device: torch.device) -> tuple[Code, ...]:
        """Return what a product with so many rows is compiled from, those made ready before it."""
        _, macros = product_shape(self, rows, device)
        return (("activations.cu", row_macros(rows)), ("matmul.cu", macros))


@dataclass(frozen=True, slots=True)
class Gates:
    """Rows that are gated on their way into a product."""

    activation: str

    def codes(self, rows: int, device: torch.device) -> tuple[Code, ...]:
        """Return what so many rows are gated by."""
        return (("activations.cu", gate_macros(self.activation, rows)),)


def product_shape(
    weight: Weight | TiledSize, rows: int, device: torch.device
) -> tuple[Shape, dict[str, int]]:
    """Return how warps share a product with so many rows, and what matmul.cu is compiled with."""
    tiles, records = -(-weight.rows // TILE_ROWS), -(-weight.columns // RECORD_COLUMNS)
    product = Product(tiles, records, record_bytes(weight.quant), rows)
    shape = shape_for(product, gpu_of(device))
    kinds = {"KIND": weight.quant.ggml_id, "GROUPS": product.groups, "LANES": lanes_for(rows)}
    return shape, shape.defines | kinds


def gpu_of(device: torch.device) -> Gpu:
    """Return what blocks may have on a GPU."""
    processors = int(properties_of(device).multi_processor_count)
    return Gpu(shared_bytes_of(device), processors)


def _blocks(tiles: int, shape: Shape, shared: int, device: torch.device) -> int:
    """Return as many blocks as there is work for, or as the GPU holds at a time."""
    gpu = properties_of(device)
    room = gpu.shared_memory_per_multiprocessor // (shared + BLOCK_OVERHEAD_BYTES)
    return min(-(-tiles // shape.tiles), int(gpu.multi_processor_count) * max(1, int(room)))


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
    if rows <= DECODE_ROWS:
        return product(half_rows(x.contiguous()), weight, out)
    unpacked.multiply(narrow_rows(x, narrow_type(dtype)), weight, (out,))
    return out
