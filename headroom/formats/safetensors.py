"""Safetensors: a mapped, lazy reader of single and indexed files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from headroom.errors import FormatError
from headroom.formats.quants import (
    BF16,
    F8_E4M3,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    supported,
)
from headroom.formats.tensor import TensorInfo, check_no_overlap, map_file

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_JSON_BYTES = 64 << 20  # of an index, a config or a tokenizer's settings
MAX_DIMENSIONS = 16
INDEX_NAME = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"

_TYPES = {
    "F32": F32, "F16": F16, "BF16": BF16, "F64": F64, "F8_E4M3": F8_E4M3,
    "U8": U8, "I8": I8, "I16": I16, "I32": I32, "I64": I64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One safetensors file's header: where its tensors lie."""

    path: Path
    tensors: Mapping[str, TensorInfo]  # by their names in the file
    header: memoryview  # the bytes before the data


def read_safetensors(path: Path) -> SafetensorsFile:
    """Read the header of one safetensors file; tensors stay on disk until used."""
    view = map_file(path)
    return parse_safetensors(view, path, len(view))


def header_end(view: memoryview, path: Path, file_bytes: int) -> int:
    """Return where the header of a file ends, from the file's first bytes."""
    if min(len(view), file_bytes) < 8:
        raise FormatError(f"{path} has {file_bytes} bytes; it is not a safetensors file.")
    size = int.from_bytes(view[:8], "little")
    if size > min(file_bytes - 8, MAX_HEADER_BYTES):
        raise FormatError(
            f"{path} says that its header has {size} bytes; the file has {file_bytes} and a header "
            f"at most {MAX_HEADER_BYTES}.",
            hint="It is truncated, corrupt or not a safetensors file; download it again.",
        )
    return 8 + size


def parse_safetensors(view: memoryview, path: Path, file_bytes: int) -> SafetensorsFile:
    """Read a header from the first bytes of a file, which must hold all of it."""
    end = header_end(view, path, file_bytes)
    header = parse_json(view[8:end], path)
    header.pop("__metadata__", None)
    source = np.frombuffer(view, dtype=np.uint8)
    tensors = {
        name: _tensor(name, entry, path, (end, file_bytes), source)
        for name, entry in header.items()
    }
    check_no_overlap(tensors.values(), path)
    return SafetensorsFile(path, tensors, view[:end])


def read_indexed(index: Path) -> tuple[SafetensorsFile, ...]:
    """Read all the files that an index names; each keeps the tensors the index gives it."""
    wanted = indexed_names(read_json(index), index)
    parts = []
    for file, names in wanted.items():
        parts.append(keep_named(read_safetensors(index.with_name(file)), names, index))
    return tuple(parts)


def indexed_names(content: Mapping[str, Any], index: Path) -> dict[str, list[str]]:
    """Return the tensors of each file that an index names."""
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index} has no weight_map.", hint="It is not a safetensors index.")
    wanted: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        # A name with a folder in it could lead out of the model's folder.
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
            raise FormatError(
                f"{index}: tensor {name!r} lies in {file!r}, which is not a file name."
            )
        wanted.setdefault(file, []).append(name)
    return dict(sorted(wanted.items()))


def find_safetensors(path: Path) -> Path:
    """Return the index or the one file of a folder or file that holds a model."""
    if path.is_file():
        index = path.with_name(INDEX_NAME)
        return index if "-of-" in path.name and index.is_file() else path
    found = sorted(path.glob("*" + INDEX_SUFFIX)) or sorted(path.glob("*.safetensors"))
    for usual in (path / INDEX_NAME, path / "model.safetensors"):
        if usual in found:
            return usual
    if len(found) == 1:
        return found[0]
    names = ", ".join(file.name for file in found[:4])
    raise FormatError(
        f"{path} holds {f'several safetensors files ({names})' if found else 'no model file'}.",
        hint="Give a .gguf file, a .safetensors file, an index, or a folder with one of them.",
    )


def read_model_files(path: Path) -> tuple[SafetensorsFile, ...]:
    """Read the file or the index at `path` as one model."""
    return read_indexed(path) if path.name.endswith(".json") else (read_safetensors(path),)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object."""
    view = map_file(path)
    if len(view) > MAX_JSON_BYTES:
        raise FormatError(f"{path} has {len(view)} bytes; at most {MAX_JSON_BYTES} are read.")
    return parse_json(view, path)


def keep_named(part: SafetensorsFile, names: list[str], index: Path) -> SafetensorsFile:
    """Return a part with the tensors that the index gives it, all of which must be there."""
    for name in names:
        if name not in part.tensors:
            raise FormatError(f"{part.path} has no tensor {name!r}, which {index.name} puts there.")
    return SafetensorsFile(part.path, {name: part.tensors[name] for name in names}, part.header)


def parse_json(view: memoryview, path: Path) -> dict[str, Any]:
    """Return the one object that JSON text holds."""
    try:
        value = json.loads(
            str(view, "utf-8"), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} does not hold valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {repeated!r} is there twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _tensor(
    name: str, entry: object, path: Path, extent: tuple[int, int], source: np.ndarray[Any, Any]
) -> TensorInfo:
    data_start, file_bytes = extent
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise FormatError(
            f"{path}: the entry of tensor {name!r} lacks dtype, shape or data_offsets."
        )
    quant = _TYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if quant is None:
        raise FormatError(
            f"{path}: tensor {name!r} has type {entry['dtype']}, which is not supported.",
            hint=supported(),
        )
    shape, offsets = _sizes(entry["shape"]), _sizes(entry["data_offsets"])
    if shape is None or offsets is None or len(offsets) != 2:
        raise FormatError(f"{path}: the shape or the offsets of tensor {name!r} are not numbers.")
    begin, end = offsets
    if not begin <= end <= file_bytes - data_start:
        raise FormatError(
            f"{path}: tensor {name!r} spans data bytes {begin} to {end}, but the file has "
            f"{file_bytes - data_start}.",
            hint="The file is truncated or corrupt; download it again.",
        )
    if end - begin != (needed := prod(shape) * quant.block_bytes):
        raise FormatError(
            f"{path}: tensor {name!r} of shape {list(shape)} needs {needed} bytes "
            f"and has {end - begin}."
        )
    return TensorInfo(name, shape, quant, path, data_start + begin, source)


def _sizes(value: object) -> tuple[int, ...] | None:
    """Return a list of sizes as a tuple, or None where it is anything else."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return None
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        return None
    return tuple(value)
