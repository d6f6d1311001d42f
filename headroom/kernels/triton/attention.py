"""Attention over paged keys and values in Triton, for every cache type."""

import torch

from headroom.kernels.ops import Case, PagedKv, Span
from headroom.kernels.reference.quantise import refuses_cache
from headroom.kernels.triton import launch
from headroom.kernels.triton.launch import blocks, find_kernel, power_of_2

LEAST_SIDE = 16  # smallest side of a matrix product's tiles (tl.dot)
LONG_SPAN = 32  # a span of so many rows has enough programs without cutting its keys into pieces
SHORT_QUERIES, LONG_QUERIES = 16, 64  # queries (rows x heads) of a tile; long: with such spans
PIECE_KEYS = 512  # keys of a piece, which one program attends to
BLOCK_KEYS, BLOCK_VALUES = 64, 8192  # most keys of a block, and most keys x head values


def refuses(case: Case) -> str | None:
    """Return why a case cannot run here; None if it can."""
    return launch.refuses(case) or refuses_cache(case)


def write_kv(
    cache: PagedKv, kv_slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Cache keys and values at their KV slots, in the types of the cache."""
    rows, width = len(keys), keys[0].numel() if len(keys) else 0
    if not rows:
        return
    kv_slots = kv_slots.contiguous()
    parts = ((keys, cache.keys, cache.k_type), (values, cache.values, cache.v_type))
    for given, stored, quant in parts:
        find_kernel("cache", "write")[(rows,)](
            *(given.contiguous(), kv_slots, stored, width, stored.stride(0), quant.ggml_id),
            *(power_of_2(blocks(width, 32)), power_of_2(width)),
            enable_fp_fusion=False,  # no fma: the reference rounds products before it adds
        )


def attention(
    queries: torch.Tensor, cache: PagedKv, spans: tuple[Span, ...], scale: float, window: int
) -> torch.Tensor:
    """Return the attention of every span's rows over their sequence's cached tokens."""
    queries = queries.contiguous()
    (rows, heads, dim), kv_heads, device = queries.shape, cache.keys.shape[1], queries.device
    out = torch.empty(rows, heads, dim, device=device)
    if not rows:
        return out
    group = heads // kv_heads
    padded, width = power_of_2(group), power_of_2(dim, LEAST_SIDE)
    long = max(span.rows for span in spans) >= LONG_SPAN
    tile_rows = max(1, (LONG_QUERIES if long else SHORT_QUERIES) // padded)
    pieces = 1 if long else blocks(max(span.start + span.rows for span in spans), PIECE_KEYS)
    tiles, pages, trees, depths = _tables(spans, tile_rows, device)
    parts, stats = out, out
    if pieces > 1:
        parts = torch.empty(rows, heads, pieces, dim, device=device)
        stats = torch.empty(rows, heads, pieces, 2, device=device)
    find_kernel("attention", "attend")[len(tiles), kv_heads, pieces](
        *(queries, cache.keys, cache.values, tiles, pages, trees, depths, parts, stats),
        *(float(scale), window, pieces, kv_heads, group, padded, dim, width),
        *(cache.k_type.ggml_id, cache.v_type.ggml_id, *_head_sizes(cache), cache.page_size),
        *(tile_rows, max(LEAST_SIDE, min(BLOCK_KEYS, BLOCK_VALUES // width))),
        *(bool(len(trees)), pieces > 1, PIECE_KEYS),
        num_warps=4 if width <= 128 else 8,
        num_stages=1,
    )
    if pieces > 1:
        find_kernel("attention", "merge")[(rows * heads,)](
            parts, stats, out, pieces, power_of_2(pieces), dim, width
        )
    return out


def _tables(
    spans: tuple[Span, ...], tile_rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tiles of rows [tiles, 6], all pages, all trees, and the depths of the trees' rows.

    The fields of a tile: first row of its span, the span's rows and start, the tile's first row in
    the span, offset of the span's pages, and offset of its tree (-1: no tree).
    """
    tiles, trees, depths, page, byte = [], [], [], 0, 0
    any_tree = any(span.tree is not None for span in spans)
    for span in spans:
        place = -1 if span.tree is None else byte
        tiles += [
            (span.first_row, span.rows, span.start, row, page, place)
            for row in range(0, span.rows, tile_rows)
        ]
        page += len(span.pages)
        if span.tree is not None:
            trees.append(span.tree.flatten().view(torch.uint8).to(device))
            byte += span.tree.numel()
        if any_tree:
            own = torch.arange(span.rows) if span.tree is None else span.tree.sum(1) - 1
            depths.append(own.to(device))
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    return (
        torch.tensor(tiles, dtype=torch.int64).to(device, non_blocking=True),
        torch.cat([span.pages.to(device) for span in spans]),
        torch.cat(trees) if trees else nothing,
        torch.cat(depths) if depths else nothing,
    )


def _head_sizes(cache: PagedKv) -> tuple[int, int]:
    """Return the size of one head of a KV slot of keys and of values: bytes, or values if plain."""
    return cache.keys.stride(1), cache.values.stride(1)
