"""Tiles: what weights weigh as a GPU's kernels lay them out, in whole tiles of rows and columns."""

from headroom.formats.mixes import kept_in_f32
from headroom.formats.quants import BF16, F32, QuantType
from headroom.kernels.cuda.sizes import EXPERT_STEP, TILED, tile_bytes
from headroom.plan.panels import Tensors, expert_padding
from headroom.plan.shape import Padding


def tile_padding(tensors: Tensors) -> Padding:
    """Return what tiles add to a layer's matrices; those of F32 are held in 16 bits."""
    return Padding(
        bytes=sum(
            _added_to_dense(quant, *shape)
            for name, (shape, quant) in tensors.items()
            if len(shape) == 2 and not kept_in_f32(name, shape)
        )
    )


def table_tile_padding(tensors: Tensors) -> Padding:
    """Return the same for matrices outside of layers; those of other types stay as they are."""
    return tile_padding(
        {name: (shape, quant) for name, (shape, quant) in tensors.items() if quant in TILED | {F32}}
    )


def expert_tile_padding(stacks: Tensors) -> int:
    """Return the bytes that tiles add to one expert; those without tiles stay as they are."""
    if any(quant not in TILED or shape[2] % EXPERT_STEP for shape, quant in stacks.values()):
        return 0
    return expert_padding(stacks, _added)


def _added(quant: QuantType, rows: int, columns: int) -> int:
    return tile_bytes(quant, rows, columns) - quant.bytes_for(rows * columns)


def _added_to_dense(quant: QuantType, rows: int, columns: int) -> int:
    if quant in TILED:
        return _added(quant, rows, columns)
    return BF16.bytes_for(rows * columns) - quant.bytes_for(rows * columns)
