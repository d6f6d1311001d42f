"""Scratch of attention, and what torch's attention kernels allocate beside it."""

from dataclasses import dataclass

from headroom.kernels.cuda.buffers import Buffer, Buffers, floats

# Decode cuts a context into pieces: up to each bound, pieces of so many keys; beyond the last bound
# 32 pieces between a power of two and the next. attention.cuh cuts alike.
_SMALL_PIECES = ((4096, 128), (16384, 256))
_PIECES_OF_DOUBLING = 32

# Prefill: the widest heads of torch's flash attention, and what their width must be a multiple of.
MOST_FLASH_DIM, FLASH_STEP = 256, 8
MASKED_ROWS = 512  # rows that share one mask
# Attention of wider heads, by products: rows and scores at a time. More rows would read keys less
# often, fewer leave more keys to a part and so add up fewer parts.
WIDE_ROWS, WIDE_SCORES = 256, 32 << 20
_WIDE_STEP = 64  # of keys


def count_pieces(context: int) -> int:
    """Return how many pieces decode cuts a context of so many tokens into."""
    pieces = first = 0
    for bound, size in _SMALL_PIECES:
        pieces += -(-(min(context, bound) - first) // size)
        if context <= bound:
            return pieces
        first = bound
    while context > 2 * first:
        pieces += _PIECES_OF_DOUBLING
        first *= 2
    return pieces + -(-(context - first) * _PIECES_OF_DOUBLING // first)


def queries(rows: int, heads: int, dim: int) -> Buffer:
    """Return the buffer of normed and rotated queries."""
    return floats(rows, heads, dim)


def attended(rows: int, heads: int, dim: int) -> Buffer:
    """Return the buffer of attention's output."""
    return floats(rows, heads * dim)


def partial_sums(rows: int, heads: int, dim: int, context: int) -> Buffer:
    """Return decode's sums over each piece of the context, with a maximum and a sum of weights."""
    return floats(rows * heads * count_pieces(context) * (dim + 2))


@dataclass(frozen=True, slots=True)
class SpanBuffers(Buffers):
    """What the prefill of one sequence gathers, in 16 bits."""

    keys: Buffer  # [keys, kv_heads, dim]
    values: Buffer
    queries: Buffer  # [rows, heads, dim]


def gathered(keys: int, kv_heads: int, dim: int, dtype: str) -> Buffer:
    """Return the buffer of keys or values that are gathered from their pages."""
    return Buffer((keys, kv_heads, dim), dtype)


def span_buffers(rows: int, keys: int, heads: tuple[int, int], dim: int, dtype: str) -> SpanBuffers:
    """Return the buffers of `rows` new rows that see `keys` keys; `heads` is (query, key) heads."""
    query_heads, kv_heads = heads
    both = gathered(keys, kv_heads, dim, dtype)
    return SpanBuffers(both, both, Buffer((rows, query_heads, dim), dtype))


def first_key(start: int, window: int) -> int:
    """Return the first key that the row at position `start` sees; a window of 0 sees all keys."""
    return max(0, start - window + 1) if window else 0


def wide_keys(heads: int, rows: int) -> int:
    """Return how many keys such rows of wide heads attend to at a time."""
    return max(1, WIDE_SCORES // (heads * rows * _WIDE_STEP)) * _WIDE_STEP


def wide_stride(keys: int) -> int:
    """Return the scores that a row has room for in a part of `keys` keys: whole 32 bytes."""
    return -(-keys // 8) * 8
