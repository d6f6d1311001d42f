"""Attention over paged keys and values in plain torch.

A row's bits depend only on its query and its sequence's cached tokens. Queries are computed in
tiles of fixed size, and keys in blocks of fixed size and alignment, with a running maximum. A block
of which a row sees no key leaves the row's sums unchanged.
"""

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.ops import PagedKv, Span
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.reference.quantise import quantise
from headroom.kernels.reference.sizes import KEY_BLOCK, QUERY_TILE
from headroom.kernels.weight import PLAIN_TYPES

INITIAL_PEAK = -1e30  # start of the running maximum; finite, so that differences are not NaN


def write_kv(
    cache: PagedKv, kv_slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Cache keys and values at their KV slots, in the types of the cache."""
    cache.keys[kv_slots] = quantise(keys, cache.k_type)
    cache.values[kv_slots] = quantise(values, cache.v_type)


def attention(
    queries: torch.Tensor,
    cache: PagedKv,
    spans: tuple[Span, ...],
    scale: float,
    window: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of every span's rows over their sequence's cached tokens."""
    out = torch.empty(queries.shape[0], queries.shape[1], _head_dim(cache.values, cache.v_type)).to(
        queries.device
    )
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.rows)
        out[rows] = _attend_span(queries[rows], cache, span, scale, window, sinks)
    return out


def _attend_span(
    queries: torch.Tensor,
    cache: PagedKv,
    span: Span,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    kv_heads = cache.keys.shape[1]
    tiles = _query_tiles(queries * scale, kv_heads)  # [kv_heads, tiles, tile * group, dim]
    view = _View(span, tiles.shape[1] * QUERY_TILE, window)
    first_key, length = max(0, span.start - window + 1) if window else 0, span.start + span.rows
    shape = (*tiles.shape[:3], 1)
    if sinks is None:
        peak = torch.full(shape, INITIAL_PEAK, device=queries.device)
        total = torch.zeros(shape, device=queries.device)
    else:  # the sink is the first score: its weight is exp(sink - sink)
        every = sinks.expand(len(queries), -1)[..., None]
        peak, total = _query_tiles(every, kv_heads), torch.ones(shape, device=queries.device)
    summed = torch.zeros(
        *tiles.shape[:3], _head_dim(cache.values, cache.v_type), device=queries.device
    )
    for block in range(first_key // KEY_BLOCK * KEY_BLOCK, length, KEY_BLOCK):
        keys, values = _read_block(cache, span.pages, block, (first_key, length))
        seen = view.seen(block + torch.arange(KEY_BLOCK, device=queries.device))
        seen = seen.view(1, -1, QUERY_TILE, KEY_BLOCK)
        seen = seen.repeat_interleave(tiles.shape[2] // QUERY_TILE, dim=2)
        scores = (tiles @ keys.mT[:, None]).masked_fill(~seen, float("-inf"))
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_peak)
        decay = torch.exp(peak - new_peak)
        total = total * decay + weights.sum(-1, keepdim=True)
        summed = summed * decay + weights @ values[:, None]
        peak = new_peak
    return _rows_of_tiles(summed / total, span.rows)


class _View:
    """Which keys the rows of a span see; padding rows see what the last row sees."""

    def __init__(self, span: Span, rows: int, window: int) -> None:
        self._start, self._window, self._tree = span.start, window, None
        row = torch.arange(rows, device=span.pages.device).clamp(max=span.rows - 1)
        depth = torch.arange(span.rows, device=span.pages.device)
        if span.tree is not None:
            depth = span.tree.sum(1) - 1
            self._tree = span.tree[row]
        self._depth = depth  # depth of each row of the span in its tree
        self._position = (span.start + depth[row])[:, None]

    def seen(self, keys: torch.Tensor) -> torch.Tensor:
        """Return which of the cached tokens `keys` each row sees: bool [rows, keys]."""
        position = keys
        if self._tree is None:
            seen = keys <= self._position
        else:
            own = (keys - self._start).clamp(0, len(self._depth) - 1)
            before, within = keys < self._start, keys < self._start + len(self._depth)
            position = torch.where(before, keys, self._start + self._depth[own])
            seen = before | (within & self._tree[:, own])
        return seen & (self._position - position < self._window) if self._window else seen


def _query_tiles(queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Rearrange [rows, heads, dim] to [kv_heads, tiles, QUERY_TILE * group, dim], zero-padded."""
    rows, heads, dim = queries.shape
    tiles = -(-rows // QUERY_TILE)
    padded = torch.zeros(tiles * QUERY_TILE, heads, dim, device=queries.device)
    padded[:rows] = queries
    grouped = padded.view(tiles, QUERY_TILE, kv_heads, heads // kv_heads, dim)
    return grouped.permute(2, 0, 1, 3, 4).flatten(2, 3).contiguous()


def _rows_of_tiles(tiles: torch.Tensor, rows: int) -> torch.Tensor:
    """Rearrange [kv_heads, tiles, QUERY_TILE * group, dim] back to [rows, heads, dim]."""
    kv_heads, count, _, dim = tiles.shape
    split = tiles.view(kv_heads, count, QUERY_TILE, -1, dim)
    return split.permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1, 2)[:rows]


def _read_block(
    cache: PagedKv, pages: torch.Tensor, first: int, wanted: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read keys and values [kv_heads, KEY_BLOCK, dim] of a block; zeros outside `wanted`."""
    low, high = max(first, wanted[0]), min(first + KEY_BLOCK, wanted[1])
    position = torch.arange(low, high, device=pages.device)
    kv_slots = pages[position // cache.page_size] * cache.page_size + position % cache.page_size
    read = []
    for stored, quant in ((cache.keys, cache.k_type), (cache.values, cache.v_type)):
        dim = _head_dim(stored, quant)
        block = torch.zeros(KEY_BLOCK, stored.shape[1], dim, device=pages.device)
        block[low - first : high - first] = _floats(stored[kv_slots], quant, dim)
        read.append(block.transpose(0, 1).contiguous())
    return read[0], read[1]


def _floats(stored: torch.Tensor, quant: QuantType, dim: int) -> torch.Tensor:
    return stored.float() if quant.name in PLAIN_TYPES else dequantise(stored, quant, dim)


def _head_dim(stored: torch.Tensor, quant: QuantType) -> int:
    if quant.name in PLAIN_TYPES:
        return stored.shape[-1]
    return stored.shape[-1] // quant.block_bytes * quant.block
