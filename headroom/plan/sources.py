"""Find the shape of a model for a plan: by a known name, from files, a URL or a hub."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from headroom.errors import FormatError, ModelError
from headroom.families.dims import Dims
from headroom.families.files import open_checkpoint, open_header
from headroom.families.registry import (
    KNOWN,
    NAMINGS,
    find_family,
    is_known,
    read_dims,
    split_mix,
)
from headroom.families.tables import Types, tensor_table
from headroom.formats.checkpoint import Checkpoint, bare_config
from headroom.formats.header import ModelHeader
from headroom.formats.hub import find_model, is_on_disk, list_files
from headroom.formats.hub_names import HubName, choose_file, first_files, parse_hub_name
from headroom.formats.mixes import MIXES, find_mix
from headroom.formats.names import MTP_PREFIX, canonical_name
from headroom.formats.quants import QuantType
from headroom.formats.remote import MissingFileError, read_hub, read_remote
from headroom.formats.tensor import TensorInfo
from headroom.plan.known import known_shape
from headroom.plan.shape import ModelShape, PlanSource
from headroom.plan.shaping import UNUSED_WHERE_SHARED, shape_from, shape_of

# Rotary frequencies, which files of any family may hold; they are computed from settings.
_FREQUENCIES = re.compile(r"rope_freqs|.*inv_freq")
_LAYER = re.compile(r"(?:model\.)?(?:layers|blk)\.(\d+)\.")


def find_shape(text: str, home: Path) -> ModelShape:
    """Return the shape of a model by name, path or URL, as `find_source` does."""
    return find_source(text, home).shape


def find_source(text: str, home: Path) -> PlanSource:
    """Return a model by name, path or URL; a suffix like `:q4_k_m` names a mix.

    A config.json without weights names no types and is taken as bf16.
    """
    if is_known(text):
        return PlanSource(known_shape(text))
    found, mix_name = open_source(text, home)
    if isinstance(found, Checkpoint):
        checkpoint = None if mix_name else found
        return PlanSource(header_shape(found.header, mix_name), checkpoint)
    return PlanSource(header_shape(found, mix_name))


def open_source(text: str, home: Path) -> tuple[Checkpoint | ModelHeader, str]:
    """Return a model by path, URL or name of a hub, and the mix that is named after it."""
    base, mix_name = split_mix(text)
    if mix_name and (file := _file_of_quant(text, home)) is not None:
        base, mix_name = file, ""
    return _open_model(base, home), mix_name


def _file_of_quant(text: str, home: Path) -> str | None:
    """Return the GGUF file that `org/repo:q4_k_m` means; None if it is a mix for safetensors."""
    name = parse_hub_name(text)
    if name is None or name.quant is None or is_on_disk(name.repo, home):
        return None
    if is_on_disk(text, home):
        return text
    files = list_files(name)
    return f"{name.repo}:{choose_file(name, files)}" if first_files(files) else None


def _open_model(text: str, home: Path) -> Checkpoint | ModelHeader:
    """Open a model of this disk, or read its header over the network; a header has no weights."""
    address = re.match(r"https?://", text) is not None
    name = None if "/resolve/" in text else parse_hub_name(text)
    if address and name is None:
        return read_remote(text, NAMINGS)
    try:
        path = find_model(text, home)
    except FormatError as error:
        if name is None:
            raise FormatError(
                f"There is no file, folder or known model {text!r}.",
                hint=f"Known for plans: {', '.join(KNOWN)}, each with :{', :'.join(MIXES)}; or "
                "a .gguf file, a folder, a config.json, a URL, org/repo, org/repo:Q4_K_M or "
                "org/repo:file.gguf.",
                param="model",
            ) from error
        return _read_hub(name)
    return open_checkpoint(path) if bare_config(path) is None else open_header(path)


def _read_hub(name: HubName) -> ModelHeader:
    """Read the header of a repository's safetensors, or of the GGUF file that a name means."""
    if name.file is None and name.quant is not None:
        return read_hub(name.repo, choose_file(name, list_files(name)), NAMINGS)
    try:
        return read_hub(name.repo, name.file, NAMINGS)
    except MissingFileError:
        if name.file is not None:
            raise
        return read_hub(name.repo, choose_file(name, list_files(name)), NAMINGS)


def header_shape(header: ModelHeader, mix_name: str = "", dims: Dims | None = None) -> ModelShape:
    """Return the shape of a model with the types of its file, or with those of a mix.

    A caller that has read the header's dimensions already passes them as `dims`.
    """
    dims = dims or read_dims(header)
    if mix_name or not header.tensors:
        mix_name = mix_name or "bf16"
        return shape_of(f"{header.name}:{mix_name}", dims, find_mix(mix_name))
    return shape_from(header.name, dims, file_types(header, dims))


def file_types(header: ModelHeader, dims: Dims) -> Types:
    """Return a file's tensors by GGUF's names; refuse tensors that contradict the settings."""
    left, types = dict(header.tensors), Types()
    family = find_family(header.architecture)
    for name, shape in tensor_table(dims).items():
        ours = canonical_name(name, family.naming, "gguf")
        quant = _take(left, ours, shape, header)
        if quant is not None:
            types[name] = (shape, quant)
        elif not _may_be_missing(name, dims):
            raise ModelError(
                f"{header.metadata.path} has no tensor {ours!r}, which its settings call for."
            )
    # With extra layers that predict further ahead, which config.json does not count as layers.
    ahead = header.metadata.get_int("hf.num_nextn_predict_layers", 0)
    all_layers = header.metadata.get_int("block_count") + ahead
    for name, info in left.items():
        layer = _LAYER.match(name)
        number = -1 if layer is None else int(layer[1])
        extra_head = number >= dims.layers and (number < all_layers or MTP_PREFIX in info.name)
        tied_copy = dims.tied and name == "head"
        unused = family.leaves_out(name) or _FREQUENCIES.fullmatch(name)
        if not (extra_head or tied_copy or unused):
            raise ModelError(
                f"{header.metadata.path} has a tensor {name!r}, which {header.architecture} "
                "models do not use."
            )
    return types


def layers_ahead(names: Iterable[str], layers: int) -> set[int]:
    """Return the numbers of layers after a model's own, which predict further ahead."""
    found = [int(layer[1]) for name in names if (layer := _LAYER.match(name)) is not None]
    return {number for number in found if number >= layers}


def _may_be_missing(name: str, dims: Dims) -> bool:
    if name == "rope_freqs.weight":
        return True
    layer = _LAYER.match(name)
    shares = layer is not None and int(layer[1]) >= dims.layers - dims.shared_kv_layers
    return shares and name.endswith(UNUSED_WHERE_SHARED)


def _take(
    left: dict[str, TensorInfo], name: str, shape: tuple[int, ...], header: ModelHeader
) -> QuantType | None:
    """Remove a tensor, or one tensor for each expert, from `left` and return its type."""
    info = left.pop(name, None)
    if info is not None:
        return _checked(info, shape, header)
    before, _, part = name.rpartition(".experts.")
    if not before:
        return None
    found = {_checked(x, shape[1:], header) for x in _each_expert(left, before, part, shape[0])}
    if len(found) > 1:
        raise ModelError(f"{header.metadata.path}: the experts of {name} have different types.")
    return found.pop() if found else None


def _each_expert(
    left: dict[str, TensorInfo], before: str, part: str, count: int
) -> Iterator[TensorInfo]:
    """Remove the tensors of all experts from `left` and yield them; none if they are stacked."""
    names = [f"{before}.experts.0.{part}"]
    if names[0] not in left:
        return
    for index in range(count):
        name = f"{before}.experts.{index}.{part}"
        if name not in left:
            raise ModelError(f"There is no tensor {name!r}, but {count} experts are said to be.")
        yield left.pop(name)


def _checked(info: TensorInfo, shape: tuple[int, ...], header: ModelHeader) -> QuantType:
    path = header.metadata.path
    # Some files have a vector as a matrix of one row, or a convolution with an axis of size 1.
    if _without_ones(info.shape) != _without_ones(shape):
        raise ModelError(f"{path}: {info.name} is {list(info.shape)}, not {list(shape)}.")
    if not info.quant.runs:
        raise ModelError(f"{path}: {info.name} has type {info.quant}, which is no weight type.")
    return info.quant


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
