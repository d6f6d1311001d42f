"""From the tensors of a GGUF table to those of safetensors: names, shapes, and order of rows."""

from collections.abc import Iterator
from dataclasses import dataclass

from headroom.families.dims import Dims
from headroom.families.registry import find_family
from headroom.families.synth.blocks import as_plain
from headroom.families.synth.values import Source
from headroom.families.tables import tensor_table
from headroom.families.tensors import inner_name
from headroom.formats.gguf_writer import TensorEntry
from headroom.formats.names import MTP_PREFIX, safetensors_name
from headroom.formats.quants import QuantType
from headroom.formats.writing import Job


@dataclass(frozen=True, slots=True)
class Origin:
    """The GGUF tensor that the values of a safetensors tensor come from."""

    name: str  # in GGUF
    shape: tuple[int, ...]  # in GGUF
    expert: int | None = None  # the expert, where the GGUF tensor is a stack of all of them


def safetensors_table(dims: Dims, quant: QuantType) -> Iterator[tuple[TensorEntry, Origin]]:
    """Yield every tensor of a model's safetensors, with its origin."""
    family = find_family(dims.architecture)
    layout = family.synthesis.layout
    for name, shape in tensor_table(dims).items():
        if name == "rope_freqs.weight":  # transformers computes it from settings
            continue
        if len(shape) == 3 and not layout.stacked_experts:
            for expert in range(shape[0]):
                theirs = _name(name, dims, expert)
                yield TensorEntry(theirs, shape[1:], quant), Origin(name, shape, expert)
            continue
        entry = TensorEntry(_name(name, dims), layout.shape(_part(name), shape), quant)
        yield entry, Origin(name, shape)


def safetensors_jobs(source: Source, entry: TensorEntry, origin: Origin) -> Iterator[Job]:
    """Yield the jobs that make a tensor's bytes; tensors that conversion changes are one job."""
    dims = source.recipe.dims
    undo = find_family(dims.architecture).synthesis.layout.undo(_part(origin.name), dims)
    theirs = TensorEntry(origin.name, origin.shape, entry.quant)
    if undo is not None:
        yield lambda: as_plain(undo(source.floats(origin.name, origin.shape)), entry.quant)
    elif origin.expert is not None:
        yield from source.slab_jobs(theirs, origin.expert)
    else:
        yield from source.jobs(theirs)


def _part(name: str) -> str:
    return inner_name(name).removesuffix(".weight").removesuffix(".bias")


def _name(name: str, dims: Dims, expert: int | None = None) -> str:
    family = find_family(dims.architecture)
    layout = family.synthesis.layout
    theirs = safetensors_name(name, family.naming, dims.layers, expert)
    if not theirs.endswith(layout.bare):
        theirs += ".weight"
    at_root = theirs == "lm_head.weight" or theirs.startswith(MTP_PREFIX)
    return theirs if at_root else layout.prefix + theirs
