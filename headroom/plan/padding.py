"""Padding: the bytes that the kernels' layouts add to weights.

The C++ kernels of a CPU hold matrices in *panels* of sixteen rows, the CUDA kernels in *tiles* of
rows and columns. Both fill the last panel or tile up with zeros. Names of a layer's tensors are
GGUF's without "blk.N.".
"""

from collections.abc import Callable

from headroom.families.tables import Types
from headroom.formats.mixes import kept_in_f32
from headroom.formats.quants import BF16, F32, QuantType
from headroom.kernels.cuda.sizes import EXPERT_STEP, TILED, tile_bytes
from headroom.plan.shape import Padding

# The layout of native/panels.h: sixteen rows side by side, each panel at a multiple of 64 bytes.
PANEL_ROWS, PANEL_ALIGNMENT = 16, 64
_EXACT = "ffn_gate_inp.weight"  # the one matrix that is f32 whatever its file's type


def panel_bytes(quant: QuantType, rows: int, columns: int) -> int:
    """Return the bytes of a matrix in panels; rows are filled up with zeros."""
    panel = -(-PANEL_ROWS * quant.bytes_for(columns) // PANEL_ALIGNMENT) * PANEL_ALIGNMENT
    return panel * -(-rows // PANEL_ROWS)


def panel_padding(tensors: Types) -> Padding:
    """Return what panels add to the matrices among the tensors; others stay as in the file."""
    size_bytes = values = floats = 0
    for name, (shape, quant) in tensors.items():
        exact = name == _EXACT
        if len(shape) != 2 or (kept_in_f32(name, shape) and not exact):
            continue
        rows, columns = shape
        size_bytes += _added_by_panels(F32 if exact else quant, rows, columns)
        added = -rows % PANEL_ROWS * columns
        values += added
        floats += added * exact
    return Padding(size_bytes, values, floats)


def expert_padding(stacks: Types, added: Callable[[QuantType, int, int], int]) -> int:
    """Return the bytes that a layout adds to one expert; `added` says what a matrix gets.

    Kernels hold gate and up apart even if the file has them fused.
    """
    total = 0
    for name, (shape, quant) in stacks.items():
        matrices = 2 if "gate_up" in name else 1
        total += matrices * added(quant, shape[1] // matrices, shape[2])
    return total


def expert_panel_padding(stacks: Types) -> int:
    """Return the bytes that panels add to one expert."""
    return expert_padding(stacks, _added_by_panels)


def _added_by_panels(quant: QuantType, rows: int, columns: int) -> int:
    return panel_bytes(quant, rows, columns) - quant.bytes_for(rows * columns)


def tile_padding(tensors: Types) -> Padding:
    """Return what tiles add to a layer's matrices; types without tiles are held in 16 bits."""
    return Padding(
        bytes=sum(
            _added_to_dense(quant, *shape)
            for name, (shape, quant) in tensors.items()
            if len(shape) == 2 and not kept_in_f32(name, shape)
        )
    )


def table_tile_padding(tensors: Types) -> Padding:
    """Return what tiles add to matrices outside of layers; types without tiles stay as they are."""
    return tile_padding(
        {name: (shape, quant) for name, (shape, quant) in tensors.items() if quant in TILED | {F32}}
    )


def expert_tile_padding(stacks: Types) -> int:
    """Return the bytes that tiles add to one expert; 0 where one of its types has no tiles."""
    if any(quant not in TILED or shape[2] % EXPERT_STEP for shape, quant in stacks.values()):
        return 0
    return expert_padding(stacks, _added_by_tiles)


def _added_by_tiles(quant: QuantType, rows: int, columns: int) -> int:
    return tile_bytes(quant, rows, columns) - quant.bytes_for(rows * columns)


def _added_to_dense(quant: QuantType, rows: int, columns: int) -> int:
    if quant in TILED:
        return _added_by_tiles(quant, rows, columns)
    return BF16.bytes_for(rows * columns) - quant.bytes_for(rows * columns)
