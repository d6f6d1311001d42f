"""Attention over paged keys and values with a running maximum (online softmax), in float32.

A program goes over its keys in blocks of BK keys, which begin at multiples of BK. If CUT, a program
attends to one piece of PIECE keys, and `merge` combines the pieces.
"""

import triton
import triton.language as tl

from headroom.kernels.reference.attention import INITIAL_PEAK as REFERENCE_PEAK
from headroom.kernels.triton.device.unpack import LANES, unpack

INITIAL_PEAK = tl.constexpr(REFERENCE_PEAK)  # start of the running maximum
TILE_FIELDS = tl.constexpr(6)  # numbers of a tile in `tiles`, see triton/attention.py


@triton.jit
def _heads(stored, slot, ok, kv_head, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
           KIND: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """Read one head of each slot: [slots, DP], zeros for slots that are not ok and beyond DIM."""
    offset = ((slot * KV_HEADS + kv_head) * HEAD)[:, None, None]
    column = (tl.arange(0, DP // LANES) * LANES)[None, :, None]
    value = unpack(stored, offset, column, DIM, ok[:, None, None], KIND)
    return tl.reshape(value, (slot.shape[0], DP))


@triton.jit
def _seen(
    key, row, row_ok, depth, first, rows, start, tree, trees, depths, window, TREES: tl.constexpr
):
    """Return which keys a tile's rows see: bool [rows, keys]."""
    own = key - start
    if TREES:
        within = (own >= 0) & (own < rows)
        place = tree + row[:, None] * rows + own[None, :]
        owned = (row_ok & (row * 0 + tree >= 0))[:, None]  # the tile's span has a tree
        marked = tl.load(trees + place, owned & within[None, :], other=0) != 0
        later = tl.where(owned, marked, own[None, :] <= row[:, None])
        seen = (own < 0)[None, :] | later
        place = tl.where(own < 0, own, tl.load(depths + first + own, within, other=0))
    else:
        seen = own[None, :] <= row[:, None]
        place = own
    if window > 0:
        seen = seen & (depth[:, None] - place[None, :] < window)
    return seen


@triton.jit(do_not_specialize=["pieces"])
def attend(
    queries, keys, values, tiles, pages, trees, depths, out, stats, scale, window, pieces,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr,
    DIM: tl.constexpr, DP: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, BK: tl.constexpr,
    TREES: tl.constexpr, CUT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS rows and the query heads of one KV head to the keys or to one piece."""
    tiles += tl.program_id(0) * TILE_FIELDS
    first, rows, start = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2)
    tile_row, page_at, tree = tl.load(tiles + 3), tl.load(tiles + 4), tl.load(tiles + 5)
    kv_head, piece = tl.program_id(1), tl.program_id(2)
    query = tl.arange(0, ROWS * GP)
    row, member = tile_row + query // GP, query % GP
    ok = (row < rows) & (member < GROUP)
    head = (first + row) * (KV_HEADS * GROUP) + kv_head * GROUP + member
    value_at = tl.arange(0, DP)[None, :]
    value_ok = ok[:, None] & (value_at < DIM)
    q = tl.load(queries + head[:, None] * DIM + value_at, value_ok, other=0.0) * scale
    depth, least = row, tile_row
    if TREES:
        depth = tl.load(depths + first + row, ok, other=0).to(tl.int64)
        least = tl.zeros_like(tile_row)
    low = tl.zeros_like(start)
    if window > 0:
        low = tl.maximum(start + least - window + 1, low)
    high = start + tl.minimum(rows, tile_row + ROWS)
    begin, end = low // BK * BK, high
    if CUT:
        begin, end = tl.maximum(begin, piece * PIECE), tl.minimum(high, (piece + 1) * PIECE)
    peak = tl.full((ROWS * GP,), INITIAL_PEAK, tl.float32)
    total = tl.zeros((ROWS * GP,), tl.float32)
    sums = tl.zeros((ROWS * GP, DP), tl.float32)
    for block in range(begin, end, BK):
        key = block + tl.arange(0, BK)
        inside = (key >= low) & (key < high)
        page = tl.load(pages + page_at + key // PAGE, inside, other=0)
        slot = page * PAGE + key % PAGE
        k = _heads(keys, slot, inside, kv_head, KV_HEADS, K_HEAD, K_KIND, DIM, DP)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        seen = _seen(key, row, ok, depth, first, rows, start, tree, trees, depths, window, TREES)
        scores = tl.where(seen & inside[None, :], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        decay = tl.exp(peak - higher)
        v = _heads(values, slot, inside, kv_head, KV_HEADS, V_HEAD, V_KIND, DIM, DP)
        total = total * decay + tl.sum(weights, 1)
        sums = tl.dot(weights, v, sums * decay[:, None], input_precision="ieee")
        peak = higher
    if CUT:
        place = head * pieces + piece
        tl.store(out + place[:, None] * DIM + value_at, sums, value_ok)
        tl.store(stats + 2 * place, peak, ok)
        tl.store(stats + 2 * place + 1, total, ok)
    else:
        tl.store(out + head[:, None] * DIM + value_at, sums / total[:, None], value_ok)


@triton.jit(do_not_specialize=["pieces"])
def merge(parts, stats, out, pieces, MOST: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr):
    """Combine the results of a head's pieces."""
    head = tl.program_id(0).to(tl.int64)
    piece, value_at = tl.arange(0, MOST), tl.arange(0, DP)
    place = 2 * (head * pieces + piece)
    peaks = tl.load(stats + place, piece < pieces, other=INITIAL_PEAK)
    totals = tl.load(stats + place + 1, piece < pieces, other=0.0)
    highest = tl.max(peaks, 0)
    whole = tl.sum(totals * tl.exp(peaks - highest), 0)
    sums = tl.zeros((DP,), tl.float32)
    for one in range(pieces):
        at = head * pieces + one
        share = tl.exp(tl.load(stats + 2 * at) - highest)
        sums += share * tl.load(parts + at * DIM + value_at, value_at < DIM, other=0.0)
    tl.store(out + head * DIM + value_at, sums / whole, value_at < DIM)
