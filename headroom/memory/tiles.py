"""Tiles: what weights weigh as a GPU's kernels lay them out, in whole tiles of rows and columns."""

from headroom.formats.quants import BF16, F16, F32, QuantType
from headroom.kernels.cuda.sizes import PACKED, TILED, tile_bytes
from headroom.memory.mixes import kept_in_f32
from headroom.memory.panels import Tensors, expert_padding
from headroom.memory.shape import Padding

PLAIN = frozenset((F32, F16, BF16))


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
            if quant in PACKED | PLAIN
        }
    )


def expert_tile_padding(stacks: Tensors) -> int:
    """Return the bytes that tiles add to one expert; types without tiles stay as they are."""
    return expert_padding(stacks, _added_to_expert)


def _added_to_expert(quant: QuantType, rows: int, columns: int) -> int:
    if quant not in TILED:
        return 0
    return tile_bytes(quant, rows, columns) - quant.bytes_for(rows * columns)


def _added(quant: QuantType, rows: int, columns: int) -> int:
    file_bytes = quant.bytes_for(rows * columns)
    if quant in PACKED:
        return tile_bytes(quant, rows, columns) - file_bytes
    return BF16.bytes_for(rows * columns) - file_bytes
