"""Products with weights in tiles on an NVIDIA GPU: packed for few rows, unpacked for many."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from headroom.errors import KernelError
from headroom.formats.quants import BF16, F16, QuantType
from headroom.kernels.cuda import matmul_scratch, scratch
from headroom.kernels.cuda.buffers import Buffer
from headroom.kernels.cuda.compile import (
    compile_kernel,
    properties_of,
    refuses_device,
    shared_bytes_of,
)
from headroom.kernels.cuda.matmul_scratch import lanes_for
from headroom.kernels.cuda.matmul_shapes import Gpu, Product, ProductShape, shape_for
from headroom.kernels.cuda.pack import pack
from headroom.kernels.cuda.sizes import (
    BLOCK_OVERHEAD_BYTES,
    DECODE_ROWS,
    GROUP_ROWS,
    MOST_OUTPUTS,
    RECORD_COLUMNS,
    TILE_ROWS,
    TILED,
    record_bytes,
    tile_bytes,
)
from headroom.kernels.ops import Case
from headroom.kernels.types import PRODUCT_TYPES
from headroom.kernels.weight import PLAIN_TYPES, Weight

NARROW_QUANTS = {"bf16": BF16, "f16": F16}  # types that products of many rows compute in
_NARROW_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
POWER_THREADS = 256  # of a block, see powers.cuh


def refuses_type(dtype: str) -> str | None:
    """Return why products on a GPU do not compute in a type; None if they do."""
    return (
        None if dtype in NARROW_QUANTS else f"computes in {' or '.join(NARROW_QUANTS)}, not {dtype}"
    )


def narrow_type(dtype: str) -> torch.dtype:
    """Return the torch type `bf16` or `f16`."""
    return _NARROW_TYPES[dtype]


@dataclass(frozen=True, slots=True, eq=False)
class NarrowRows:
    """Rows in 16 bits, which stand for `values * powers[:, None]`."""

    values: torch.Tensor  # bf16 or f16 [rows, columns]
    powers: torch.Tensor | None = None  # float32 [rows], for f16 only


def empty_narrow_rows(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> NarrowRows:
    """Return memory for 16-bit rows, valid until the frame around the call is left."""
    rows, columns = shape
    buffers = matmul_scratch.narrow_rows(rows, columns, scratch.name_of(dtype))
    values = scratch.take(buffers.values, device)
    return NarrowRows(values, scratch.take(buffers.powers, device) if buffers.powers else None)


def fill_narrow_rows(out: NarrowRows, x: torch.Tensor) -> NarrowRows:
    """Round float32 `x [rows, columns]` into `rows`; f16 memory may have more rows than `x`."""
    if out.powers is None:
        out.values.copy_(x)
        return out
    args = (x, out.values, out.powers, x.shape[1], x.stride(0))
    compile_kernel("narrow.cu", "narrow_rows")((len(x),), (POWER_THREADS,), args)
    return out


def narrow_rows(x: torch.Tensor, dtype: torch.dtype) -> NarrowRows:
    """Return float32 rows rounded to a 16-bit type."""
    return fill_narrow_rows(empty_narrow_rows(x.shape, dtype, x.device), x)


def as_narrow(x: "torch.Tensor | NarrowRows") -> NarrowRows:
    """Return rows in 16 bits: unchanged if they are, else rounded to bf16."""
    if isinstance(x, NarrowRows):
        return x
    return NarrowRows(x if x.dtype == torch.bfloat16 else x.to(torch.bfloat16))


TILES = "tiles"  # the layout of weights in tiles, see tiles.cuh
PACK_BYTES = 64 << 20  # bytes of a file that are packed at a time
RECORD_WARPS = 4  # of a block that rounds rows, one record per warp; see activations.cu


@dataclass(frozen=True, slots=True, eq=False)
class HalfRows:
    """Rows in f16 with a power of two per 256 columns, as the product kernels read them."""

    pieces: torch.Tensor  # uint8, see halves.cuh
    rows: int
    records: int

    @property
    def groups(self) -> int:
        """The number of groups of eight rows."""
        return -(-self.rows // GROUP_ROWS)

    @property
    def lanes(self) -> int:
        """The lanes that a piece has words for: four per row."""
        return lanes_for(self.rows)


def refuses(case: Case) -> str | None:
    """Return why a case cannot run here; None if it can."""
    if reason := refuses_device(case):
        return reason
    if case.quant not in TILED:
        return f"{case.quant} has no tiles for the tensor cores"
    return refuses_type(case.dtype)


def prepare(weight: Weight) -> Weight:
    """Return a weight in tiles on the GPU, where its blocks are packed, some at a time."""
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
    """A norm that is applied to rows before a product."""

    weight: torch.Tensor
    eps: float
    out: torch.Tensor | None = None  # gets the normed rows as float32


def half_rows(x: torch.Tensor, norm: RowNorm | None = None) -> HalfRows:
    """Return rows in f16, normed first if a norm is given."""
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
    """Return the macros of activations.cu for so many rows."""
    return {"LANES": lanes_for(rows)}


def gate_macros(activation: str, rows: int) -> dict[str, int]:
    """Return the macros with which activations.cu is compiled to gate so many rows."""
    return {"GELU": int(activation == "gelu"), "LANES": lanes_for(rows)}


def _empty_rows(rows: int, columns: int, device: torch.device) -> HalfRows:
    pieces = scratch.take(matmul_scratch.half_rows(rows, columns), device)
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


def product_shape(
    weight: Weight, rows: int, device: torch.device
) -> tuple[ProductShape, dict[str, int]]:
    """Return how warps share a product with so many rows, and the macros of matmul.cu."""
    tiles, records = -(-weight.rows // TILE_ROWS), -(-weight.columns // RECORD_COLUMNS)
    product = Product(tiles, records, record_bytes(weight.quant), rows)
    shape = shape_for(product, gpu_of(device))
    kinds = {"KIND": weight.quant.ggml_id, "GROUPS": product.groups, "LANES": lanes_for(rows)}
    return shape, shape.defines | kinds


def gpu_of(device: torch.device) -> Gpu:
    """Return the limits of blocks on a GPU."""
    processors = int(properties_of(device).multi_processor_count)
    return Gpu(shared_bytes_of(device), processors)


def _blocks(tiles: int, shape: ProductShape, shared: int, device: torch.device) -> int:
    """Return the number of blocks: one per unit of work, at most as many as run at a time."""
    gpu = properties_of(device)
    room = gpu.shared_memory_per_multiprocessor // (shared + BLOCK_OVERHEAD_BYTES)
    return min(-(-tiles // shape.tiles), int(gpu.multi_processor_count) * max(1, int(room)))


def matmul(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose in float32; the weight is in tiles or plain rows."""
    if weight.layout != TILES:
        return plain_matmul(x, weight, dtype, out)
    rows = x.shape[0]
    if out is None:
        out = torch.empty(rows, weight.rows, device=x.device)
    if not rows:
        return out
    if rows <= DECODE_ROWS:
        return product(half_rows(x.contiguous()), weight, out)
    multiply_unpacked(narrow_rows(x, narrow_type(dtype)), weight, (out,))
    return out


SPREAD_THREADS = 256


def multiply_unpacked(
    x: NarrowRows, weight: Weight, outs: Sequence[torch.Tensor], add: bool = False
) -> None:
    """Write `x` times the weight's transpose to float32 `outs`, or add it to them.

    Each output belongs to one of the matrices that lie one after another in the weight.
    """
    rows = x.values
    tiled = weight.layout == TILES
    first = 0
    for count in matmul_scratch.unpacked_parts(weight.rows, weight.columns, scratch.unpack_bytes()):
        buffers = matmul_scratch.unpacked_part(
            len(rows), count, weight.columns, scratch.name_of(rows.dtype), tiled=tiled
        )
        with scratch.frame():
            answers = scratch.take(buffers.answers, rows.device)
            plain = _plain_part(weight, first, count, buffers.weight)
            if x.powers is None:
                torch.mm(rows, plain.T, out=answers)
            else:
                torch.mm(rows, plain.T, out_dtype=torch.float32, out=answers)
            if x.powers is None:
                _spread(answers, first, outs, add)
            else:
                _spread_powers(answers, first, outs, add, x.powers)
        first += count


def dequantise(weight: Weight, out: torch.Tensor) -> torch.Tensor:
    """Write a weight's values to `out [rows, columns]`, bf16 or f16."""
    records = -(-weight.columns // RECORD_COLUMNS)
    tiles = -(-weight.rows // TILE_ROWS)
    kernel = compile_kernel("dequant.cu", "dequantise", unpack_defines(weight.quant, out.dtype))
    share = max(1, min(-(-records // 4), 2048 // max(1, tiles)))
    kernel((tiles, share), (128,), (weight.data, out, weight.rows, weight.columns, records))
    return out


def unpack_defines(quant: QuantType, dtype: torch.dtype) -> dict[str, int]:
    """Return the macros of dequant.cu that unpacks weights of one type to another."""
    return {"KIND": quant.ggml_id, "WARPS": 4, "OUT_F16": int(dtype == torch.float16)}


def _plain_part(weight: Weight, first: int, count: int, buffer: Buffer | None) -> torch.Tensor:
    """Return `count` rows of a weight in 16 bits, unpacked to a buffer if the weight is in tiles.

    The first row must be the first of a tile.
    """
    if buffer is None:
        return weight.data[first : first + count]
    out = scratch.take(buffer, weight.data.device)
    if count == weight.rows:
        return dequantise(weight, out)
    tiles = weight.data[tile_bytes(weight.quant, first, weight.columns) :]
    return dequantise(replace(weight, data=tiles, rows=count), out)


def _spread(answers: torch.Tensor, first: int, outs: Sequence[torch.Tensor], add: bool) -> None:
    """Copy or add products with a weight's rows from `first` on to their matrices' outputs."""
    (rows, count), rest = answers.shape, MOST_OUTPUTS - len(outs)
    ends = list(accumulate(out.shape[1] for out in outs))
    apart = [out.stride(0) for out in outs]
    fours = not any(number % 4 for number in (first, count, *ends, *apart))
    wide = 4 if fours and not any(out.data_ptr() % 16 for out in outs) else 1
    kernel = compile_kernel("spread.cu", "spread", {"ADD": int(add), "WIDE": wide})
    kernel(
        (-(-count // (SPREAD_THREADS * wide)), rows), (SPREAD_THREADS,),
        (
            *(answers, *outs, *[None] * rest, *ends, *[ends[-1]] * rest),
            *(*apart, *[0] * rest, first, count),
        ),
    )  # fmt: skip


def _spread_powers(
    answers: torch.Tensor,
    first: int,
    outs: Sequence[torch.Tensor],
    add: bool,
    powers: torch.Tensor,
) -> None:
    """Copy or add float32 products, times the powers of their rows, to the outputs."""
    at, end, by = 0, first + answers.shape[1], powers[:, None]
    for out in outs:
        begin, stop = max(first, at), min(end, at + out.shape[1])
        if begin < stop:
            part, target = answers[:, begin - first : stop - first], out[:, begin - at : stop - at]
            target.addcmul_(part, by) if add else torch.mul(part, by, out=target)
        at += out.shape[1]


PADDED_ROWS = 32  # fewer rows are padded: cuBLAS's order of sums depends on their number


def refuses_plain(case: Case) -> str | None:
    """Return why a case cannot run here; None if it can."""
    if reason := refuses_device(case):
        return reason
    if case.quant.name not in PLAIN_TYPES:
        return f"{case.quant} is packed"
    return None if case.dtype == "bf16" else f"computes in bf16, not {case.dtype}"


def refuses_plain_f16(case: Case) -> str | None:
    """Return why a case cannot run here in f16; None if it can."""
    if case.dtype == "f16":
        return refuses_plain(replace(case, dtype="bf16"))
    return f"computes in f16, not {case.dtype}"


def prepare_plain(weight: Weight, dtype: str = "bf16") -> Weight:
    """Return a plain weight in bf16 or f16, on its device."""
    return replace(weight, data=weight.data.to(narrow_type(dtype)), quant=NARROW_QUANTS[dtype])


def prepare_plain_f16(weight: Weight) -> Weight:
    """Return a plain weight in f16, on its device."""
    return prepare_plain(weight, "f16")


def plain_matmul(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose in float32."""
    answers = plain_product(x, weight.data)
    return answers if out is None else out.copy_(answers)


def plain_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x [rows, columns]` times narrow `weight [outputs, columns]`, transposed, as float32.

    `weight` is bf16 or f16.
    """
    if weight.dtype == torch.float16:
        return _plain_half_product(x, weight)
    rows, rounded = len(x), x.to(torch.bfloat16)
    if rows < PADDED_ROWS:
        rounded = torch.nn.functional.pad(rounded, (0, 0, 0, PADDED_ROWS - rows))
    return torch.mm(rounded, weight.T, out_dtype=torch.float32)[:rows]


def _plain_half_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `plain_product` in f16; each row is divided by a power of two before rounding."""
    rows = max(len(x), PADDED_ROWS)
    padded = NarrowRows(weight.new_zeros(rows, x.shape[1]), x.new_zeros(rows))
    fill_narrow_rows(padded, x)
    assert padded.powers is not None
    answers = torch.mm(padded.values, weight.T, out_dtype=torch.float32)
    return answers.mul_(padded.powers[:, None])[: len(x)]


EMBED_CHUNK, EMBED_WARPS = 2048, 4


def embed(ids: torch.Tensor, table: Weight, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Write the table's rows `ids` (int64) to `out` as float32, times `scale`.

    The table is in tiles, or in file layout on the device or in pinned memory of the host.
    """
    if table.layout == TILES:
        records = -(-table.columns // RECORD_COLUMNS)
        defines = {"KIND": table.quant.ggml_id, "WARPS": EMBED_WARPS}
        kernel = compile_kernel("dequant.cu", "embed_tiles", defines)
        grid = (ids.shape[0], -(-records // EMBED_WARPS))
        args = (table.data, ids, out, table.columns, records, float(scale))
        kernel(grid, (32 * EMBED_WARPS,), args)
        return out
    if table.quant not in PRODUCT_TYPES or table.layout != "rows":
        raise KernelError(
            f"Rows of {table.quant} in the layout {table.layout} are not read on CUDA.",
            hint="Keep the table in file layout and in a type that has kernels.",
        )
    kernel = compile_kernel("small.cu", "embed", {"KIND": table.quant.ggml_id})
    grid = (-(-table.columns // EMBED_CHUNK), ids.shape[0])
    kernel(grid, (256,), (table.data, ids, out, table.columns, float(scale)))
    return out
