"""Attention on a GPU: rotation and cache writes, decode over pages, prefill by torch's kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.backends.cuda import (
    SDPAParams,
    can_use_efficient_attention,
    can_use_flash_attention,
    is_flash_attention_available,
)
from torch.nn.functional import scaled_dot_product_attention

from headroom.errors import KernelError
from headroom.formats.quants import BF16, BY_NAME, F16, QuantType
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.attention_scratch import (
    FLASH_STEP,
    MASKED_ROWS,
    MOST_FLASH_DIM,
    WIDE_ROWS,
    attended,
    count_pieces,
    first_key,
    partial_sums,
    span_buffers,
    wide_keys,
    wide_stride,
)
from headroom.kernels.cuda.buffers import Buffer
from headroom.kernels.cuda.compile import compile_kernel, properties_of, shared_bytes_of
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.ops import PagedKv, Span, StepTables

ROPE_WARPS = 4  # warps of a block of rope.cu
MERGE_CHUNK, MERGE_THREADS = 64, 256  # head values and threads of a block of attention.cu
MOST_DIM = 512
# Blocks of a decode launch per multiprocessor; they share all pieces of all contexts. With few
# blocks, some get more long pieces than others (16 sequences of 16k tokens on an H200: 17.4, 17.0
# and 15.4 ms with 2, 4 and 8 blocks). With many, blocks without work take 4 ns each.
BLOCKS_A_PROCESSOR = 16

GateKind = Literal["sigmoid", "softplus"]
_GATES: dict[GateKind, int] = {"sigmoid": 1, "softplus": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """A step's projections: a row has its heads side by side; values after them are not read."""

    q: torch.Tensor  # [rows, heads * dim or more]
    k: torch.Tensor | None  # [rows, kv_heads * dim or more]; None: this layer caches nothing
    # [rows, kv_heads * dim or more]; the tensor of the keys if a layer's values are its keys.
    v: torch.Tensor | None
    heads: int
    dim: int


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """The norms of heads before rotation; None: no norm."""

    q: torch.Tensor | None = None  # float32 [dim]
    k: torch.Tensor | None = None
    values: bool = False  # values are normed, too, without a weight
    eps: float = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """Gates that attention's output is multiplied by: one number per head, or one per value."""

    values: torch.Tensor  # [rows, heads] or [rows, heads * dim], there may be gaps between rows
    kind: GateKind


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The sizes that the attention of a captured step is launched for."""

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
        """The number of pieces of the longest context."""
        return count_pieces(self.max_context)

    @property
    def scratch_floats(self) -> int:
        """The size of the partial sums of a step, in float32 numbers."""
        return self.partial.shape[0]

    @property
    def partial(self) -> Buffer:
        """The buffer of a step's partial sums."""
        return partial_sums(self.rows, self.heads, self.dim, self.max_context)


@dataclass(frozen=True, slots=True)
class DecodeBlock:
    """How the warps of a block share a piece; the order of sums depends on `parts` alone."""

    parts: int  # warps that share the keys of a tile, sixteen keys each
    tiles: int  # groups of eight queries

    def shared_bytes(self, dim: int) -> int:
        """Return the shared memory of a block for heads of so many values."""
        return 2 * (2 * 16 * self.parts + 16 * self.tiles) * (dim + 8)


def decode_block(dim: int, groups: int, shared_bytes: int) -> DecodeBlock:
    """Return how a block with this limit of shared memory computes groups of eight queries."""
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

    `rope` holds cos and sin `[rows, half]`. Queries are multiplied by `scale` and written in the
    type of `queries`, float32 or bf16.
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
        *(q, k, v, cos, sin, norms.q, norms.k, tables.sequence, tables.kv_slots),
        *(cache.keys, cache.values, queries, projected.heads, kv_heads),
        *(0 if part is None else part.stride(0) for part in (q, k, v)),
        *(int(norms.values), float(norms.eps), float(scale)),
    )
    jobs = projected.heads + 2 * kv_heads
    kernel((-(-jobs // ROPE_WARPS), tables.rows), (32 * ROPE_WARPS,), args, early=True)
    return queries


def decode(
    queries: torch.Tensor,
    cache: PagedKv,
    tables: StepTables,
    shape: DecodeShape,
    partial: torch.Tensor,
    gate: Gate | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from float32 `queries [rows, heads, dim]`, already scaled: `out [rows, heads * dim]`.

    `partial` has at least `shape.scratch_floats` numbers. A row's bits do not depend on the other
    rows of the step, nor on the bucket.
    """
    _check(shape, partial, gate)
    assert shape.rows <= DECODE_ROWS  # one lane of a warp reads each row's tables
    if out is None:
        out = scratch.take(attended(shape.rows, shape.heads, shape.dim), queries.device)
    sums = shape.rows * shape.heads * shape.pieces * shape.dim
    parts, stats = partial[:sums], partial[sums:]
    defines = {
        "DIM": shape.dim,
        "GROUP": shape.heads // shape.kv_heads,
        "K_KIND": cache.k_type.ggml_id,
        "V_KIND": cache.v_type.ggml_id,
        "PAGE": cache.page_size,
    }
    exact = shape.exact or "f32" in (cache.k_type.name, cache.v_type.name)
    groups = -(-shape.span_rows * defines["GROUP"] // 8)  # groups of eight queries
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
        # Upper bound: sequences may be shorter.
        items = shape.pieces * shape.kv_heads * shape.sequences * blocks
        processors = int(properties_of(queries.device).multi_processor_count)
        grid = (min(items, BLOCKS_A_PROCESSOR * processors),)
        threads = (32 * block.parts * tiles,)
        kernel(grid, threads, (*args, *last), block.shared_bytes(shape.dim), early=True)
    _merge(shape, tables, (parts, stats), exact, gate, out)
    return out


def _merge(
    shape: DecodeShape,
    tables: StepTables,
    partial: tuple[torch.Tensor, torch.Tensor],
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
        *(*partial, tables.sequence, tables.index, tables.starts),
        *((gate.values, out, gate.values.stride(0)) if gate else (None, out, 0)),
        *(shape.window, shape.pieces),
    )
    grid = (shape.heads, shape.rows, -(-shape.dim // MERGE_CHUNK))
    compile_kernel("attention.cu", "merge", defines)(grid, (MERGE_THREADS,), args, early=True)


def _check(shape: DecodeShape, partial: torch.Tensor, gate: Gate | None) -> None:
    if shape.dim % 16 or shape.dim > MOST_DIM:
        raise KernelError(
            f"Heads of {shape.dim} values do not run on CUDA.",
            hint=f"Sizes that are a multiple of 16, up to {MOST_DIM}, do.",
        )
    if partial.numel() < shape.scratch_floats:
        raise KernelError(
            f"Attention needs {shape.scratch_floats} numbers of scratch, not {partial.numel()}."
        )
    if gate is not None and gate.values.shape[1] not in (shape.heads, shape.heads * shape.dim):
        raise KernelError(
            f"{gate.values.shape[1]} gates belong neither to {shape.heads} heads "
            f"nor to their {shape.heads * shape.dim} values."
        )


MOST_SCORES = 16 << 20  # most scores, in numbers, that `_attend_plain` holds at a time
GATHER_THREADS = 128


def prefill(
    queries: torch.Tensor, cache: PagedKv, spans: tuple[Span, ...], window: int, dtype: str
) -> torch.Tensor:
    """Attend from `queries [rows, heads, dim]`, already scaled: float32 `[rows, heads * dim]`.

    A row sees keys up to its own, only the last `window` of them if window > 0. Products are
    computed in `dtype`. Rows that belong to no span come back as zeros.
    """
    (rows, heads, dim), device = queries.shape, queries.device
    kv_heads = cache.keys.shape[1]
    out = scratch.take(attended(rows, heads, dim), device).view(rows, heads, dim)
    if sum(span.rows for span in spans) < rows:
        out.zero_()
    for span in spans:
        first = first_key(span.start, window)
        count = span.start + span.rows - first
        mine = slice(span.first_row, span.first_row + span.rows)
        buffers = span_buffers(span.rows, count, heads, kv_heads, dim, dtype)
        with scratch.frame():
            keys, values, wanted = (scratch.take(buffer, device) for buffer in buffers)
            gather(cache.keys, cache.k_type, cache.page_size, span.pages, first, keys)
            gather(cache.values, cache.v_type, cache.page_size, span.pages, first, values)
            out[mine] = attend(wanted.copy_(queries[mine]), keys, values, window)
    return out.flatten(1)


def gather(
    stored: torch.Tensor,
    quant: QuantType,
    page_size: int,
    pages: torch.Tensor,
    first: int,
    out: torch.Tensor,
) -> None:
    """Copy a sequence's keys or values from token `first` on to `out [count, kv_heads, dim]`."""
    count, kv_heads, dim = out.shape
    defines = {
        "DIM": dim,
        "PAGE": page_size,
        "KIND": quant.ggml_id,
        "OUT_KIND": BY_NAME[scratch.name_of(out.dtype)].ggml_id,
    }
    kernel = compile_kernel("attention.cu", "gather", defines)
    kernel((count,), (GATHER_THREADS,), (stored, pages, out, first, kv_heads))


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int
) -> torch.Tensor:
    """Attend from `queries [rows, heads, dim]` to keys and values `[count, kv_heads, dim]`.

    The key of row i is at `count - rows + i`. The result has the type of the keys.
    """
    queries = queries.to(keys.dtype)
    half, wide = keys.dtype == torch.float16, queries.shape[2] > MOST_FLASH_DIM
    if keys.dtype == torch.float32:
        return _in_chunks(queries, keys, values, window, _attend_plain)
    if window and not (half or wide or queries.shape[2] % FLASH_STEP) and _has_flash(keys):
        return _attend_window(queries, keys, values, window)
    if window:
        return _in_chunks(queries, keys, values, window, _attend_by_key_head)
    if wide:
        return attend_wide(queries, keys, values)
    if half:
        return _attend_by_key_head(queries, keys, values)
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values))
    return attend_causal(q, k, v, grouped=True)[0].transpose(0, 1)


def _attend_by_key_head(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with each KV head as a batch entry, whose query heads read its keys without copies.

    Of torch's fused kernels only the one for sm_80 and later supports grouped queries. The one that
    takes masks, which older GPUs have, too, reads keys by strides: expanded keys are not copied.
    Without `seen`, rows see keys up to their own.
    """
    (rows, heads, dim), (count, kv_heads, _) = queries.shape, keys.shape
    group = heads // kv_heads
    q = queries.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    k, v = (
        part.transpose(0, 1)[:, None].expand(kv_heads, group, count, dim) for part in (keys, values)
    )
    if seen is None:
        mixed = attend_causal(q, k, v, grouped=False)
    else:
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0)
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)


_LOWER_RIGHT = 2  # torch's number for a mask whose last row sees all keys


def attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, grouped: bool
) -> torch.Tensor:
    """Attend from `q [batch, heads, rows, dim]` to `[batch, kv heads, count, dim]`.

    The key of row i is at `count - rows + i`, and a row sees keys up to its own. With `grouped`, a
    KV head serves several query heads. This calls what torch's `causal_lower_right` calls, whose
    module imports torch's whole compiler: 2 s at every start.
    """
    rows, count = q.shape[-2], k.shape[-2]
    if rows == count:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=grouped)
    params = SDPAParams(q, k, v, None, 0.0, False, grouped)
    if can_use_flash_attention(params):  # its causal mask is the lower right one
        mixed: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal=True, return_debug_mask=False, scale=1.0
        )[0]
        return mixed
    if can_use_efficient_attention(params):
        mixed = torch.ops.aten._efficient_attention_forward(
            *(part.transpose(1, 2) for part in (q, k, v)),
            bias=None,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            max_seqlen_q=None,
            max_seqlen_k=None,
            dropout_p=0.0,
            custom_mask_type=_LOWER_RIGHT,
            compute_log_sumexp=False,
            scale=1.0,
            seqlen_k=None,
        )[0]
        return mixed.transpose(1, 2)
    seen = torch.ones(rows, count, dtype=torch.bool, device=q.device).tril(count - rows)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0, enable_gqa=grouped)


def _has_flash(keys: torch.Tensor) -> bool:
    return keys.is_cuda and is_flash_attention_available()


def _attend_window(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int
) -> torch.Tensor:
    """Call torch's flash attention, which supports windows, unlike torch's public function."""
    rows, count = queries.shape[0], keys.shape[0]
    mixed: torch.Tensor = torch.ops.aten._flash_attention_forward(
        *(part.unsqueeze(0) for part in (queries, keys, values)),
        *(None, None, rows, count, 0.0, True, False),
        scale=1.0,
        window_size_left=window - 1,
        window_size_right=0,
    )[0]
    return mixed[0]


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _in_chunks(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int, run: Attend
) -> torch.Tensor:
    """Attend from chunks of rows, each with a mask and with only the keys that its rows see."""
    rows, heads, _ = queries.shape
    count = keys.shape[0]
    step = MASKED_ROWS
    if run is _attend_plain:  # it holds the scores of all heads
        widest = min(count, window + MASKED_ROWS) if window else count
        step = max(1, min(step, MOST_SCORES // (heads * widest)))
    place = torch.arange(count, dtype=torch.int32, device=keys.device)
    out = torch.empty_like(queries)
    for first in range(0, rows, step):
        end = min(first + step, rows)
        last = count - rows + end
        low = max(0, count - rows + first - window + 1) if window else 0
        own, key = place[count - rows + first : last, None], place[None, low:last]
        seen = key <= own
        if window:
            seen &= own - key < window
        out[first:end] = run(queries[first:end], keys[low:last], values[low:last], seen)
    return out


def _attend_plain(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    rows, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = grouped.flatten(1, 2) @ keys.permute(1, 2, 0)
    scores = scores.view(kv_heads, -1, *seen.shape).masked_fill_(~seen, float("-inf"))
    weights = torch.softmax(scores, dim=-1).flatten(1, 2)
    mixed = (weights @ values.transpose(0, 1)).view(kv_heads, -1, rows, values.shape[2])
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)


WEIGH_THREADS = 256
_F32 = torch.float32
_WIDE_KINDS = {torch.float16: F16.ggml_id, torch.bfloat16: BF16.ggml_id}


def attend_wide(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend from `queries [rows, heads, dim]`, in f16 or bf16, to `[count, kv_heads, dim]`.

    Row i sees the keys up to `count - rows + i`. Scores and sums are float32, softmax weights have
    16 bits. Only a part of the scores is in memory at a time, however long the context.
    """
    rows, count = queries.shape[0], keys.shape[0]
    out = torch.empty_like(queries)
    for first in range(0, rows, WIDE_ROWS):
        mine = slice(first, min(first + WIDE_ROWS, rows))
        seen = count - rows + mine.stop
        _attend_rows(queries[mine], keys[:seen], values[:seen], out[mine])
    return out


def _attend_rows(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
) -> None:
    """Attend with the query heads of a KV head as rows of one product: no key is copied."""
    (rows, heads, dim), (count, kv_heads, _) = queries.shape, keys.shape
    split, lines = (rows, kv_heads, heads // kv_heads, dim), (kv_heads, rows * heads // kv_heads)
    grouped = queries.view(split).transpose(0, 1).reshape(*lines, dim)
    part = min(count, wide_keys(heads, rows))
    places = torch.empty(heads * rows * wide_stride(part), dtype=_F32, device=keys.device)
    stats = torch.empty(*lines, 2, dtype=_F32, device=keys.device)
    factors = torch.empty(*lines, 1, dtype=_F32, device=keys.device)
    sums, more = torch.empty(2, *lines, dim, dtype=_F32, device=keys.device)
    kernel = compile_kernel("weigh.cu", "weigh", {"OUT_KIND": _WIDE_KINDS[keys.dtype]})
    for first in range(0, count, part):
        end = min(first + part, count)
        size, stride = end - first, wide_stride(end - first)
        scores = places[: heads * rows * stride].view(*lines, stride)
        torch.bmm(grouped, keys[first:end].permute(1, 2, 0), out_dtype=_F32, out=scores[..., :size])
        shape = (size, stride, split[2], count - rows + 1 - first, int(first == 0))
        kernel((lines[1], kv_heads), (WEIGH_THREADS,), (scores, stats, factors, *shape))
        weights, mixed = scores.view(keys.dtype)[..., :size], more if first else sums
        torch.bmm(weights, values[first:end].transpose(0, 1), out_dtype=_F32, out=mixed)
        if first:
            torch.addcmul(more, sums, factors, out=sums)
    sums /= stats[..., 1:]
    out.view(split).copy_(sums.view(kv_heads, rows, -1, dim).transpose(0, 1))
