"""Attention of long spans: cached keys and values gathered, then torch's own fused products."""

from collections.abc import Callable

import torch
from torch.backends.cuda import is_flash_attention_available
from torch.nn.functional import scaled_dot_product_attention

from headroom.formats.quants import BY_NAME, QuantType
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.wide import attend_wide
from headroom.kernels.ops import PagedKv, Span
from headroom.kernels.weight import PLAIN_TYPES, plain_type

MOST_FLASH_DIM = 256
MOST_SCORES = 16 << 20  # held at a time by the plain path, in numbers
MASKED_ROWS = 512  # rows that share one mask
FLASH_STEP = 8  # of the width of heads
GATHER_THREADS = 128


def prefill(
    queries: torch.Tensor, cache: PagedKv, spans: tuple[Span, ...], window: int, dtype: str
) -> torch.Tensor:
    """Attend from `queries [rows, heads, dim]`, already scaled: float32 `[rows, heads * dim]`.

    A row sees keys up to its own, the last `window` of them if window > 0; products are made in
    `dtype`. Rows that belong to no span come back as zeros.
    """
    rows, heads, dim = queries.shape
    out = scratch.empty(rows, heads, dim, device=queries.device)
    if sum(span.rows for span in spans) < rows:
        out.zero_()
    for span in spans:
        first = max(0, span.start - window + 1) if window else 0
        count = span.start + span.rows - first
        mine = slice(span.first_row, span.first_row + span.rows)
        where = (cache.page_size, span.pages, (first, count), dtype)
        with scratch.frame():
            keys = gather(cache.keys, cache.k_type, *where)
            values = gather(cache.values, cache.v_type, *where)
            wanted = scratch.empty(span.rows, heads, dim, dtype=keys.dtype, device=keys.device)
            out[mine] = attend(wanted.copy_(queries[mine]), keys, values, window)
    return out.flatten(1)


def gather(
    stored: torch.Tensor,
    quant: QuantType,
    page_size: int,
    pages: torch.Tensor,
    part: tuple[int, int],
    dtype: str,
) -> torch.Tensor:
    """Return keys or values `first` to `first + count` of a sequence: `[count, kv_heads, dim]`."""
    first, count = part
    kv_heads, width = stored.shape[1:]
    dim = width if quant.name in PLAIN_TYPES else width // quant.block_bytes * quant.block
    out = scratch.empty(count, kv_heads, dim, dtype=plain_type(dtype), device=stored.device)
    defines = {
        "DIM": dim,
        "PAGE": page_size,
        "KIND": quant.ggml_id,
        "OUT_KIND": BY_NAME[dtype].ggml_id,
    }
    kernel = compile_kernel("attention.cu", "gather", defines)
    kernel((count,), (GATHER_THREADS,), (stored, pages, out, first, kv_heads))
    return out


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int
) -> torch.Tensor:
    """Attend from `queries [rows, heads, dim]` to keys and values `[count, kv_heads, dim]`.

    Row i's own key is the one at `count - rows + i`. The answers have the type of the keys.
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
    bias = causal_mask(queries.shape[0], keys.shape[0])
    mixed = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0, enable_gqa=True)
    return mixed[0].transpose(0, 1)


def _attend_by_key_head(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """The heads of a key head as those of one sequence, all with the same keys where they lie.

    Of torch's fused kernels only the one for sm_80 and later knows of groups; the one that takes
    masks, and that older GPUs have, takes any head's keys by their address, so that nothing is
    repeated. Without a mask rows see keys up to their own.
    """
    (rows, heads, dim), (count, kv_heads, _) = queries.shape, keys.shape
    group = heads // kv_heads
    q = queries.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    k, v = (
        part.transpose(0, 1)[:, None].expand(kv_heads, group, count, dim) for part in (keys, values)
    )
    bias = causal_mask(rows, count) if seen is None else seen
    mixed = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)


def causal_mask(rows: int, count: int) -> torch.Tensor:
    """Return a mask, by its sizes alone, of rows that see keys up to their own."""
    from torch.nn.attention.bias import causal_lower_right  # all of torch's compiler comes with it

    return causal_lower_right(rows, count)


def _has_flash(keys: torch.Tensor) -> bool:
    return keys.is_cuda and is_flash_attention_available()


def _attend_window(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int
) -> torch.Tensor:
    """Torch's flash attention, which knows windows and groups; its public function has none."""
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
    """Run some rows at a time, each chunk with the keys that it can see and a mask of them."""
    rows, heads, _ = queries.shape
    count = keys.shape[0]
    step = MASKED_ROWS
    if run is _attend_plain:  # which holds the scores of all heads
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
