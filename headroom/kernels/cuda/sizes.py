"""Sizes of what the launchers take and make: plain numbers, which the planner counts with, too."""

from headroom.formats.quants import BF16, BY_NAME, F16, QuantType

ALIGNMENT = 256  # bytes at which a buffer of a step's scratch begins
# The most rows of a step on the decode path: one pass over the packed weights serves them, and such
# steps are captured in a CUDA graph.
DECODE_ROWS = 32
BLOCK_OVERHEAD_BYTES = 2048  # of shared memory: barriers of a block, and what is kept back
GROUP_ROWS = 8  # of rows in f16, see halves.cuh
MOST_OUTPUTS = 4  # of matrices that share an input
TILE_ROWS, RECORD_COLUMNS = 16, 256  # of weights in tiles, see tiles.cuh
PACKED = frozenset(
    BY_NAME[name]
    for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "q4_k", "q5_k", "q6_k")
)
TILED = PACKED | {F16, BF16}  # types that lie in tiles on a GPU; F32 does not
# Up to so many picks an expert, on average, its packed tiles are multiplied as they lie; 0: never.
# They are taken apart anew for every 32 rows: for more rows it costs less to unpack an expert once
# and to leave the products to the fastest there are. Measured 2026-11-15 on an H200, 256 experts of
# 512 x 2048 in Q4_K and Q6_K: with 64 picks 1.0 ms a layer, unpacked 1.3; with 128 they are 1.8.
SORTED_PICKS = 64
TILE_PICKS = 32  # most of an expert's rows that are multiplied at once, see sorted.cu
ROW_TILE_BYTES = 32  # of a tile of such rows: where its matrices are, and which rows meet them
PLAIN_STEP = 4  # of the columns of F16 and BF16, which are read so many at a time
EXPERT_STEP = 8  # of an expert's sides: 16 bytes of a row in bf16, which products of many rows read

# A piece of the context ends at the first of these bounds beyond it: (bound, keys of a piece).
_SMALL_PIECES = ((4096, 128), (16384, 256))
_PIECES_OF_DOUBLING = 32
_BF16_BYTES = 2

# Attention of wide heads, by products: rows and scores at a time. More rows would read keys less
# often, fewer leave more keys to a part and so add up fewer parts.
WIDE_ROWS, WIDE_SCORES = 256, 32 << 20
_WIDE_STEP = 64  # of keys


def steps_of(size: int, step: int) -> int:
    """Return how many steps cover a size."""
    return -(-size // step)


def count_pieces(context: int) -> int:
    """Return how many pieces a context of so many tokens has; attention.cuh cuts it alike."""
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


def wide_keys(heads: int, rows: int) -> int:
    """Return how many keys such rows of wide heads attend to at a time."""
    return max(1, WIDE_SCORES // (heads * rows * _WIDE_STEP)) * _WIDE_STEP


def wide_stride(keys: int) -> int:
    """Return the scores that a row of a part has room for: rows begin at whole 32 bytes."""
    return -(-keys // 8) * 8


def lanes_for(rows: int) -> int:
    """Return the lanes of a piece of so many rows: of one, two, four or eight of them."""
    return 4 << min(3, (rows - 1).bit_length())


def half_rows_bytes(rows: int, columns: int) -> int:
    """Return the bytes of few rows in f16 with their scales, in the pieces of halves.cuh."""
    lanes = lanes_for(rows)
    piece = 136 * lanes + -(-lanes // 16) * 16
    return -(-rows // GROUP_ROWS) * -(-columns // RECORD_COLUMNS) * piece


def experts_at_once(count: int, width: int, hidden: int, most_bytes: int) -> int:
    """Return how many experts' gates and ups are unpacked at a time, in groups of one size."""
    fitting = max(1, most_bytes // (2 * _BF16_BYTES * width * hidden))
    return -(-count // -(-count // fitting))


def sorted_rows(experts: int, used: int) -> int:
    """Return the most rows of a step whose experts' tiles are multiplied as they lie."""
    return SORTED_PICKS * experts // used


def sorted_groups(picks: int, experts: int, rows: int = GROUP_ROWS) -> int:
    """Return how many groups of `rows` picks have room for, however they spread over experts.

    An expert's groups begin where those that end before it are counted full, and one more for each:
    sorted_rows.cu finds them without knowing how many picks other experts have one by one.
    """
    return picks // rows + experts


def record_bytes(quant: QuantType) -> int:
    """Return the bytes of sixteen rows of 256 columns."""
    return quant.bytes_for(RECORD_COLUMNS) * TILE_ROWS


def tile_bytes(quant: QuantType, rows: int, columns: int) -> int:
    """Return the bytes of a matrix in tiles, both sides filled up to whole tiles by zeros."""
    return -(-rows // TILE_ROWS) * -(-columns // RECORD_COLUMNS) * record_bytes(quant)
