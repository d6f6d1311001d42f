"""Constants of the CUDA kernels and the sizes of weights in tiles, shared with the planner."""

from headroom.formats.quants import BF16, F16, QuantType
from headroom.kernels.types import PACKED

# The most rows of a step on the decode path, where one pass over the packed weights serves all
# rows, and steps are captured in a CUDA graph.
DECODE_ROWS = 32
BF16_SM = 80  # least compute capability (10 x major + minor) with tensor cores for bf16
BLOCK_OVERHEAD_BYTES = 2048  # shared memory of a block that kernels cannot use, and their barriers
GROUP_ROWS = 8  # rows of a group in f16, see halves.cuh
MOST_OUTPUTS = 4  # most matrices of one product, which share an input
TILE_ROWS, RECORD_COLUMNS = 16, 256  # weight rows of a tile and columns of a record, see tiles.cuh
TILED = PACKED | {F16, BF16}  # types that lie in tiles on a GPU; F32 does not
PLAIN_STEP = 4  # columns of F16 and BF16 weights are a multiple of this
# An expert's sizes are a multiple of this: products of many rows read 16 bytes of bf16.
EXPERT_STEP = 8


def is_decode(rows: int) -> bool:
    """Return whether a step of this many rows takes the decode path."""
    return rows <= DECODE_ROWS


def steps_of(size: int, step: int) -> int:
    """Return the number of steps of size `step` that cover `size`."""
    return -(-size // step)


def record_bytes(quant: QuantType) -> int:
    """Return the bytes of a record: sixteen rows of 256 columns."""
    return quant.bytes_for(RECORD_COLUMNS) * TILE_ROWS


def tile_bytes(quant: QuantType, rows: int, columns: int) -> int:
    """Return the bytes of a matrix in tiles, padded to whole tiles with zeros."""
    return -(-rows // TILE_ROWS) * -(-columns // RECORD_COLUMNS) * record_bytes(quant)
