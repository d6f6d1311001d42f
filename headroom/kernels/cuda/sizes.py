"""Constants of the CUDA kernels and the sizes of weights in tiles, shared with the planner."""

from headroom.formats.quants import BF16, BY_NAME, F16, QuantType

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
PLAIN_STEP = 4  # of the columns of F16 and BF16, which are read so many at a time
EXPERT_STEP = 8  # of an expert's sides: 16 bytes of a row in bf16, which products of many rows read


def steps_of(size: int, step: int) -> int:
    """Return how many steps cover a size."""
    return -(-size // step)


def record_bytes(quant: QuantType) -> int:
    """Return the bytes of sixteen rows of 256 columns."""
    return quant.bytes_for(RECORD_COLUMNS) * TILE_ROWS


def tile_bytes(quant: QuantType, rows: int, columns: int) -> int:
    """Return the bytes of a matrix in tiles, both sides filled up to whole tiles by zeros."""
    return -(-rows // TILE_ROWS) * -(-columns // RECORD_COLUMNS) * record_bytes(quant)
