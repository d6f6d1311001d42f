"""Scratch of attention, and sizes that torch's attention kernels limit."""

from dataclasses import dataclass

from headroom.kernels.cuda.buffers import Buffer, Buffers, floats

# Decode cuts a context into pieces: (bound, keys of a piece up to it); beyond the last bound there
# are 32 pieces between a power of two and the next. attention.cuh has the same rule.
_SMALL_PIECES = ((4096, 128), (16384, 256))
_PIECES_OF_DOUBLING = 32

# Prefill: torch's flash attention takes heads of at most this width, a multiple of this step.
MOST_FLASH_DIM, FLASH_STEP = 256, 8
MASKED_ROWS = 512  # rows that share one mask
# Wider heads attend by matrix products, so many rows and scores at a time. More rows would read
# keys less often; fewer rows leave more keys to a part, so that fewer parts are summed up.
WIDE_ROWS, WIDE_SCORES = 256, 32 << 20
_WIDE_STEP = 64  # keys of a part are a multiple of this


def count_pieces(context: int) -> int:
    """Return the number of pieces that decode cuts a context of `context` tokens into."""
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
    """Return the buffer of decode's partial sums: per piece values, a maximum, a sum of weights."""
    return floats(rows * heads * count_pieces(context) * (dim + 2))


@dataclass(frozen=True, slots=True)
class SpanBuffers(Buffers):
    """The keys, values and queries that the prefill of one sequence gathers, in 16 bits."""

    keys: Buffer  # [keys, kv_heads, dim]
    values: Buffer
    queries: Buffer  # [rows, heads, dim]


def gathered(keys: int, kv_heads: int, dim: int, dtype: str) -> Buffer:
    """Return the buffer of keys or values that are gathered from their pages."""
    return Buffer((keys, kv_heads, dim), dtype)


def span_buffers(
    rows: int, keys: int, heads: int, kv_heads: int, dim: int, dtype: str
) -> SpanBuffers:
    """Return the buffers of `rows` new rows that see `keys` keys."""
    both = gathered(keys, kv_heads, dim, dtype)
    return SpanBuffers(both, both, Buffer((rows, heads, dim), dtype))


def first_key(start: int, window: int) -> int:
    """Return the first key that the row at position `start` sees; a window of 0 sees all keys."""
    return max(0, start - window + 1) if window else 0


def wide_keys(heads: int, rows: int) -> int:
    """Return how many keys the rows of wide heads attend to at a time."""
    return max(1, WIDE_SCORES // (heads * rows * _WIDE_STEP)) * _WIDE_STEP


def wide_stride(keys: int) -> int:
    """Return the row stride of the scores of a part of `keys` keys: a multiple of 32 bytes."""
    return -(-keys // 8) * 8
