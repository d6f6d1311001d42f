"""Panels: what weights weigh as the C++ kernels lay them out, in whole panels of rows."""

from collections.abc import Callable, Mapping

from headroom.formats.mixes import kept_in_f32
from headroom.formats.quants import F32, QuantType
from headroom.plan.shape import Padding

# The layout of native/panels.h: sixteen rows side by side, each panel at a multiple of 64 bytes.
PANEL_ROWS, ALIGNMENT = 16, 64
_EXACT = "ffn_gate_inp.weight"  # the one matrix that is f32 whatever its file's type

Tensors = Mapping[str, tuple[tuple[int, ...], QuantType]]  # by GGUF's names without "blk.N."


def panel_bytes(quant: QuantType, rows: int, columns: int) -> int:
    """Return the bytes of a matrix in panels; rows are filled up with zeros."""
    panel = -(-PANEL_ROWS * quant.bytes_for(columns) // ALIGNMENT) * ALIGNMENT
    return panel * -(-rows // PANEL_ROWS)


def padding(tensors: Tensors) -> Padding:
    """Return what panels add to those of the tensors that are multiplied by."""
    size_bytes = values = floats = 0
    for name, (shape, quant) in tensors.items():
        exact = name == _EXACT
        if len(shape) != 2 or (kept_in_f32(name, shape) and not exact):
            continue
        rows, columns = shape
        size_bytes += _added(F32 if exact else quant, rows, columns)
        added = -rows % PANEL_ROWS * columns
        values += added
        floats += added * exact
    return Padding(size_bytes, values, floats)


def expert_padding(stacks: Tensors, added: Callable[[QuantType, int, int], int]) -> int:
    """Return the bytes that a layout adds to one expert, by what it adds to a matrix.

    Gate and up lie apart even if the file has them fused.
    """
    total = 0
    for name, (shape, quant) in stacks.items():
        matrices = 2 if "gate_up" in name else 1
        total += matrices * added(quant, shape[1] // matrices, shape[2])
    return total


def expert_panel_padding(stacks: Tensors) -> int:
    """Return the bytes that panels add to one expert."""
    return expert_padding(stacks, _added)


def _added(quant: QuantType, rows: int, columns: int) -> int:
    return panel_bytes(quant, rows, columns) - quant.bytes_for(rows * columns)
