"""Launchers of attention on CUDA: rotation and cache writes, and a few rows over a long context."""

from dataclasses import dataclass
from typing import Literal

import torch

from headroom.errors import KernelError
from headroom.kernels.cuda import scratch as lent
from headroom.kernels.cuda.compile import compile_kernel, properties_of, shared_bytes_of
from headroom.kernels.cuda.sizes import DECODE_ROWS, count_pieces
from headroom.kernels.ops import PagedKv, StepTables

WARPS = 4  # of rope.cu
MERGE_CHUNK, MERGE_THREADS = 64, 256  # of attention.cu
MOST_DIM = 512
# Of a step's attention, which share all pieces. With few, some get more long pieces than others
# (16 sequences of 16k on an H200: 17.4, 17.0 and 15.4 ms with 2, 4 and 8); with many, those that
# find nothing to do take time: 4 ns each.
BLOCKS_A_PROCESSOR = 16

GateKind = Literal["sigmoid", "softplus"]
_GATES: dict[GateKind, int] = {"sigmoid": 1, "softplus": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """A step's projections, rows of heads side by side; what follows the heads is not read."""

    q: torch.Tensor  # [rows, heads * dim or more]
    k: torch.Tensor | None  # [rows, kv_heads * dim or more]; None: this layer caches nothing
    v: torch.Tensor | None  # the same; keys themselves where values are keys
    heads: int
    dim: int


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """How heads are normed before they are rotated."""

    q: torch.Tensor | None = None  # float32 [dim]
    k: torch.Tensor | None = None
    values: bool = False  # values are normed too, without a weight
    eps: float = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """What attention's output is multiplied by: one number a head, or one a value."""

    values: torch.Tensor  # [rows, heads] or [rows, heads * dim], rows may lie apart
    kind: GateKind


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What is fixed about a step's attention: its bucket and its heads."""

    rows: int
    sequences: int
    span_rows: int  # most rows of one sequence
    heads: int
    kv_heads: int
    dim: int
    max_context: int
    window: int = 0  # last tokens that a row sees; 0: all
    exact: bool = False  # float32 throughout

    @property
    def pieces(self) -> int:
        """The pieces that the longest context has."""
        return count_pieces(self.max_context)

    @property
    def scratch_floats(self) -> int:
        """The float32 numbers that a step needs besides its result."""
        return self.rows * self.heads * self.pieces * (self.dim + 2)


@dataclass(frozen=True, slots=True)
class DecodeBlock:
    """How warps share a piece; sums are taken in an order that follows from `parts` alone."""

    parts: int  # warps that share the keys of a tile, sixteen each
    tiles: int  # groups of eight queries

    def shared_bytes(self, dim: int) -> int:
        """Return the shared memory of a block for heads of so many values."""
        return 2 * (2 * 16 * self.parts + 16 * self.tiles) * (dim + 8)


def decode_block(dim: int, groups: int, shared_bytes: int) -> DecodeBlock:
    """Return how a block takes `groups` groups of queries, with so much shared memory at most."""
    parts = 2 if dim > 256 else 4
    while parts > 1 and DecodeBlock(parts, 1).shared_bytes(dim) > shared_bytes:
        parts //= 2
    most = 2 if dim > 256 else 4
    tiles = 1 if groups == 1 else min(most, 2 if groups == 2 else 4)
    while tiles > 1 and DecodeBlock(parts, tiles).shared_bytes(dim) > shared_bytes:
        tiles //= 2
    return DecodeBlock(parts, tiles)


def rope_write(
    projected: Projected,
    norms: HeadNorms,
    rope: tuple[torch.Tensor, torch.Tensor],
    tables: StepTables,
    cache: PagedKv,
    queries: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Norm and rotate heads, cache keys and values, and write `queries [rows, heads, dim]`.

    `rope` holds cos and sin `[rows, half]`. Queries are multiplied by `scale`, in float32 or bf16
    as the tensor to write to is.
    """
    q, k, v = projected.q, projected.k, projected.v
    cos, sin = rope
    kv_heads = cache.keys.shape[1] if k is not None else 0
    kernel = compile_kernel(
        "rope.cu",
        "rope_write",
        {
            "DIM": projected.dim,
            "HALF": cos.shape[-1],
            "K_KIND": cache.k_type.ggml_id,
            "V_KIND": cache.v_type.ggml_id,
            "Q_BF16": int(queries.dtype == torch.bfloat16),
        },
    )
    args = (
        *(q, k, v, cos, sin, norms.q, norms.k, tables.sequence, tables.slots),
        *(cache.keys, cache.values, queries, projected.heads, kv_heads),
        *(0 if part is None else part.stride(0) for part in (q, k, v)),
        *(int(norms.values), float(norms.eps), float(scale)),
    )
    jobs = projected.heads + 2 * kv_heads
    kernel((-(-jobs // WARPS), tables.rows), (32 * WARPS,), args, early=True)
    return queries


def decode(
    queries: torch.Tensor,
    cache: PagedKv,
    tables: StepTables,
    shape: DecodeShape,
    scratch: torch.Tensor,
    gate: Gate | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from float32 `queries [rows, heads, dim]`, already scaled: `out [rows, heads * dim]`.

    `scratch` has at least `shape.scratch_floats` numbers. A row's bits do not depend on the other
    rows of the step, nor on the bucket.
    """
    _check(shape, scratch, gate)
    assert shape.rows <= DECODE_ROWS  # a lane looks after each
    if out is None:
        out = lent.empty(shape.rows, shape.heads * shape.dim, device=queries.device)
    sums = shape.rows * shape.heads * shape.pieces * shape.dim
    parts, stats = scratch[:sums], scratch[sums:]
    defines = {
        "DIM": shape.dim,
        "GROUP": shape.heads // shape.kv_heads,
        "K_KIND": cache.k_type.ggml_id,
        "V_KIND": cache.v_type.ggml_id,
        "PAGE": cache.page_size,
    }
    exact = shape.exact or "f32" in (cache.k_type.name, cache.v_type.name)
    groups = -(-shape.span_rows * defines["GROUP"] // 8)  # of eight queries
    block = decode_block(shape.dim, 1 if exact else groups, shared_bytes_of(queries.device))
    tiles = block.tiles
    blocks = -(-groups // tiles)
    args = (
        *(queries, cache.keys, cache.values, tables.sequence, tables.index, tables.starts),
        *(tables.pages, tables.trees, parts, stats, tables.rows, shape.kv_heads),
        tables.pages.shape[1],
    )
    last = (shape.window, shape.pieces)
    if exact:
        each = (shape.pieces, shape.kv_heads, shape.sequences * blocks)
        keys = 16 if shape.dim > 256 else 32
        shared = 4 * (keys * (shape.dim + 1) + 8 * shape.dim + 8 * keys + 24)
        exact_args = (*args, blocks, *last)
        compile_kernel("exact.cu", "decode_exact", defines)(each, (128,), exact_args, shared)
    else:
        defines |= {"TILES": tiles, "PARTS": block.parts}
        kernel = compile_kernel("decode.cu", "decode", defines)
        items = shape.pieces * shape.kv_heads * shape.sequences * blocks  # at most
        processors = int(properties_of(queries.device).multi_processor_count)
        grid = (min(items, BLOCKS_A_PROCESSOR * processors),)
        threads = (32 * block.parts * tiles,)
        kernel(grid, threads, (*args, *last), block.shared_bytes(shape.dim), early=True)
    _merge(shape, tables, (parts, stats), exact, gate, out)
    return out


def _merge(
    shape: DecodeShape,
    tables: StepTables,
    scratch: tuple[torch.Tensor, torch.Tensor],
    exact: bool,
    gate: Gate | None,
    out: torch.Tensor,
) -> None:
    defines = {
        "DIM": shape.dim,
        "PAGE": 1,  # merging reads no pages
        "BASE2": int(not exact),
        "GATE": _GATES[gate.kind] if gate else 0,
        "GATE_PER_HEAD": int(gate is not None and gate.values.shape[1] == shape.heads),
    }
    args = (
        *(*scratch, tables.sequence, tables.index, tables.starts),
        *((gate.values, out, gate.values.stride(0)) if gate else (None, out, 0)),
        *(shape.window, shape.pieces),
    )
    grid = (shape.heads, shape.rows, -(-shape.dim // MERGE_CHUNK))
    compile_kernel("attention.cu", "merge", defines)(grid, (MERGE_THREADS,), args, early=True)


def _check(shape: DecodeShape, scratch: torch.Tensor, gate: Gate | None) -> None:
    if shape.dim % 16 or shape.dim > MOST_DIM:
        raise KernelError(
            f"Heads of {shape.dim} values do not run on CUDA.",
            hint=f"Sizes that are a multiple of 16, up to {MOST_DIM}, do.",
        )
    if scratch.numel() < shape.scratch_floats:
        raise KernelError(
            f"Attention needs {shape.scratch_floats} numbers of scratch, not {scratch.numel()}."
        )
    if gate is not None and gate.values.shape[1] not in (shape.heads, shape.heads * shape.dim):
        raise KernelError(
            f"{gate.values.shape[1]} gates belong neither to {shape.heads} heads "
            f"nor to their {shape.heads * shape.dim} values."
        )
