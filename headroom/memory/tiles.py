"""Tiles: what weights weigh as a GPU's kernels lay them out, in whole tiles of rows and columns."""

from headroom.formats.quants import BF16, QuantType
from headroom.memory.mixes import kept_in_f32
from headroom.memory.panels import Tensors
from headroom.memory.shape import Padding

TILE_ROWS, RECORD_COLUMNS = 16, 256
PACKED = frozenset(
    ("q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1", "q8_0", "mxfp4", "q4_k", "q5_k", "q6_k")
)

PLAIN = frozenset(("f32", "f16", "bf16"))


def tile_bytes(quant: QuantType, rows: int, columns: int) -> int:
    """Return the bytes of a matrix in tiles; both sides are filled up with zeros."""
    record = quant.bytes_for(RECORD_COLUMNS) * TILE_ROWS
    return -(-rows // TILE_ROWS) * -(-columns // RECORD_COLUMNS) * record


def tile_padding(tensors: Tensors) -> Padding:
    """Return what tiles add to a layer's matrices; those of plain types are held in 16 bits."""
    return Padding(
        bytes=sum(
            _added(quant, *shape)
            for name, (shape, quant) in tensors.items()
            if len(shape) == 2 and not kept_in_f32(name, shape)
        )
    )


def table_tile_padding(tensors: Tensors) -> Padding:
    """Return the same for matrices outside of layers; those of other types stay as they are."""
    return tile_padding(
        {
            name: (shape, quant)
            for name, (shape, quant) in tensors.items()
            if quant.name in PACKED or quant.name in PLAIN
        }
    )


def expert_tile_padding(stacks: Tensors) -> int:
    """Return the bytes that tiles add to one expert; gate and up lie apart even if fused."""
    total = 0
    for name, (shape, quant) in stacks.items():
        matrices = 2 if "gate_up" in name else 1
        total += matrices * _added(quant, shape[1] // matrices, shape[2])
    return total


def _added(quant: QuantType, rows: int, columns: int) -> int:
    file_bytes = quant.bytes_for(rows * columns)
    if quant.name in PACKED:
        return tile_bytes(quant, rows, columns) - file_bytes
    return BF16.bytes_for(rows * columns) - file_bytes
