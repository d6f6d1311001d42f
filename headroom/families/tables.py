"""Tensor tables: all weights of a model, named, shaped and typed as in its GGUF file."""

from math import prod

from headroom.families.dims import Dims
from headroom.families.registry import find_family
from headroom.families.tensors import inner_name
from headroom.formats.mixes import Mix, gets_better, tensor_type
from headroom.formats.quants import QuantType

Types = dict[str, tuple[tuple[int, ...], QuantType]]  # a file's tensors by GGUF's names


def tensor_table(dims: Dims) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model's file by its name."""
    family = find_family(dims.architecture)
    table: dict[str, tuple[int, ...]] = dict(family.outer(dims))
    for index in range(dims.layers + dims.mtp):
        layer = family.layer(dims, index)
        table |= {f"blk.{index}.{name}": shape for name, shape in layer.tensors.items()}
    return table


def tensor_types(dims: Dims, mix: Mix) -> Types:
    """Return every tensor of a model's file by its name, with its shape and type."""
    table = tensor_table(dims)
    mixers = [name for name in table if "attn_v." in name or "attn_qkv." in name]
    better = {name for i, name in enumerate(mixers) if gets_better(i, len(mixers))}
    for name in table:
        if "ffn_down" in name and gets_better(int(name.split(".")[1]), dims.layers):
            better.add(name)
    return {
        name: (shape, tensor_type(mix, inner_name(name), shape, dims.tied, name in better))
        for name, shape in table.items()
    }


def file_bytes(dims: Dims, mix: Mix) -> int:
    """Return the bytes of all tensors of a model's file."""
    return sum(quant.bytes_for(prod(shape)) for shape, quant in tensor_types(dims, mix).values())
