"""Attention over paged keys and values in plain torch.

Each row's result depends on its own query and its own cached tokens alone, to the bit: queries
go in tiles of fixed size and keys in blocks of fixed size and alignment, summed block by block
with a running maximum. A block that a row may not see changes nothing in its sums.
"""

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.ops import PagedKv, Span
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.reference.quantise import quantise
from headroom.kernels.weight import PLAIN_TYPES

QUERY_TILE = 8
KEY_BLOCK = 128
LOWEST = -1e30  # a running maximum before any key; finite, so that differences stay numbers


def write_kv(cache: PagedKv, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Store keys and values at their slots in the cache's types."""
    cache.keys[slots] = quantise(keys, cache.k_type)
    cache.values[slots] = quantise(values, cache.v_type)


def attention(
    queries: torch.Tensor, cache: PagedKv, spans: tuple[Span, ...], scale: float, window: int
) -> torch.Tensor:
    """Attend from every span's rows to its sequence's cached tokens."""
    out = torch.empty(queries.shape[0], queries.shape[1], _head_dim(cache.values, cache.v_type)).to(
        queries.device
    )
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.rows)
        out[rows] = _attend_span(queries[rows], cache, span, scale, window)
    return out


def _attend_span(
    queries: torch.Tensor, cache: PagedKv, span: Span, scale: float, window: int
) -> torch.Tensor:
    kv_heads = cache.keys.shape[1]
    tiles = _query_tiles(queries * scale, kv_heads)  # [kv_heads, tiles, tile * group, dim]
    padded_rows = tiles.shape[1] * QUERY_TILE
    position = span.start + torch.arange(padded_rows, device=queries.device)
    position = position.clamp(max=span.start + span.rows - 1)  # padding repeats the last row's view
    limits = position.view(1, -1, QUERY_TILE, 1).repeat_interleave(
        tiles.shape[2] // QUERY_TILE, dim=2
    )
    length = span.start + span.rows
    first_key = max(0, span.start - window + 1) if window else 0
    shape = (*tiles.shape[:3], 1)
    peak = torch.full(shape, LOWEST, device=queries.device)
    total = torch.zeros(shape, device=queries.device)
    summed = torch.zeros(
        *tiles.shape[:3], _head_dim(cache.values, cache.v_type), device=queries.device
    )
    for block in range(first_key // KEY_BLOCK * KEY_BLOCK, length, KEY_BLOCK):
        keys, values = _read_block(cache, span.pages, block, length)
        key_position = block + torch.arange(KEY_BLOCK, device=queries.device)
        seen = key_position <= limits
        if window:
            seen &= limits - key_position < window
        scores = (tiles @ keys.mT[:, None]).masked_fill(~seen, float("-inf"))
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_peak)
        decay = torch.exp(peak - new_peak)
        total = total * decay + weights.sum(-1, keepdim=True)
        summed = summed * decay + weights @ values[:, None]
        peak = new_peak
    return _rows_of_tiles(summed / total, span.rows)


def _query_tiles(queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[rows, heads, dim] to [kv_heads, tiles, QUERY_TILE * group, dim], padded with zeros."""
    rows, heads, dim = queries.shape
    tiles = -(-rows // QUERY_TILE)
    padded = torch.zeros(tiles * QUERY_TILE, heads, dim, device=queries.device)
    padded[:rows] = queries
    grouped = padded.view(tiles, QUERY_TILE, kv_heads, heads // kv_heads, dim)
    return grouped.permute(2, 0, 1, 3, 4).flatten(2, 3).contiguous()


def _rows_of_tiles(tiles: torch.Tensor, rows: int) -> torch.Tensor:
    """[kv_heads, tiles, QUERY_TILE * group, dim] back to [rows, heads, dim]."""
    kv_heads, count, _, dim = tiles.shape
    split = tiles.view(kv_heads, count, QUERY_TILE, -1, dim)
    return split.permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1, 2)[:rows]


def _read_block(
    cache: PagedKv, pages: torch.Tensor, first: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, KEY_BLOCK, dim] of one block; zeros past the sequence's end."""
    position = torch.arange(first, min(first + KEY_BLOCK, length), device=pages.device)
    slots = pages[position // cache.page_size] * cache.page_size + position % cache.page_size
    read = []
    for stored, quant in ((cache.keys, cache.k_type), (cache.values, cache.v_type)):
        dim = _head_dim(stored, quant)
        block = torch.zeros(KEY_BLOCK, stored.shape[1], dim, device=pages.device)
        block[: len(position)] = _floats(stored[slots], quant, dim)
        read.append(block.transpose(0, 1).contiguous())
    return read[0], read[1]


def _floats(stored: torch.Tensor, quant: QuantType, dim: int) -> torch.Tensor:
    return stored.float() if quant.name in PLAIN_TYPES else dequantise(stored, quant, dim)


def _head_dim(stored: torch.Tensor, quant: QuantType) -> int:
    if quant.name in PLAIN_TYPES:
        return stored.shape[-1]
    return stored.shape[-1] // quant.block_bytes * quant.block
