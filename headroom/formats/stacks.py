"""Stacks of experts that a family's safetensors arrange in its own way, put in the usual order."""

from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from headroom.formats.names import Naming
from headroom.formats.tensor import ComposedTensor, TensorInfo

if TYPE_CHECKING:
    from headroom.formats.tensor import Bytes


def in_usual_order(name: str, info: TensorInfo, naming: Naming) -> TensorInfo:
    """Return a tensor of safetensors, by our name of it, as other families have it."""
    part = name.split(".", 2)[-1]
    if part in naming.transposed_stacks and info.quant.block == 1 and len(info.shape) == 3:
        experts, columns, rows = info.shape
        compose = partial(_transpose, info)
        info = _composed(info, (experts, rows, columns), compose)
    if part in naming.alternating_stacks and len(info.shape) > 1 and info.shape[1] % 2 == 0:
        info = _composed(info, info.shape, partial(_part_rows, info))
    return info


def _composed(info: TensorInfo, shape: tuple[int, ...], compose: "partial[Bytes]") -> TensorInfo:
    parts = info.parts if isinstance(info, ComposedTensor) else (info,)
    return ComposedTensor(
        name=info.name,
        shape=shape,
        quant=info.quant,
        path=info.path,
        offset=info.offset,
        source=info.source,
        parts=parts,
        method=info.stored_type,
        compose=compose,
    )


def _transpose(info: TensorInfo) -> "Bytes":
    """Return the bytes of a stack of matrices `[experts, columns, rows]` with rows first."""
    values = info.data().view(f"u{info.quant.block_bytes}").reshape(info.shape)
    return np.ascontiguousarray(values.swapaxes(1, 2)).reshape(-1).view(np.uint8)


def _part_rows(info: TensorInfo) -> "Bytes":
    """Return a stack whose even rows were gates, and whose odd rows ups, with all gates first."""
    experts, rows = info.shape[:2]
    size = info.quant.bytes_for(prod(info.shape[2:]))
    split = info.data().reshape(experts, rows // 2, 2, size)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(-1)
