"""GGUF: a mapped, lazy reader of versions 2 and 3, split files included."""

import re
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headroom.errors import FormatError
from headroom.formats.mapped import MappedStrings, MappedText
from headroom.formats.quants import quant_of
from headroom.formats.tensor import TensorInfo, check_no_overlap, map_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1024  # of a key or a tensor's name; real ones have less than a hundred
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_STRINGS = 1 << 24  # in one array; the largest vocabularies have 2^18
MAX_NESTING = 4  # arrays within arrays
MAX_NESTED_ARRAYS = 65536  # in one file; each costs an object, so a small file must not hold many
MAX_DIMENSION = (1 << 63) - 1

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBER_FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_NUMBERS = {kind: struct.Struct("<" + code) for kind, code in _NUMBER_FORMATS.items()}
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]
_LEAST_BYTES = {kind: number.size for kind, number in _NUMBERS.items()} | {_STRING: 8, _ARRAY: 12}
_KEY_BYTES = 8 + 1 + 4 + 1  # the least that a key and its value take
_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8  # the least that a tensor's entry takes
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufValues(Mapping[str, object]):
    """The keys of a GGUF file: numbers, texts, and arrays that stay in the map until used."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self._raw = raw

    def without_prefix(self, prefix: str) -> "GgufValues":
        """Return the values with `prefix` removed from the keys that begin with it."""
        renamed = {key.removeprefix(prefix): value for key, value in self._raw.items()}
        if len(renamed) != len(self._raw):
            raise FormatError(f"Two keys differ only by the prefix {prefix!r}.")
        return GgufValues(renamed)

    def __getitem__(self, key: str) -> object:
        value = self._raw[key]
        return value.text if isinstance(value, MappedText) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One GGUF file's header: its keys and where its tensors lie."""

    path: Path
    version: int
    values: GgufValues
    tensors: Mapping[str, TensorInfo]  # by their names in the file
    header: memoryview  # the bytes before the data section


class HeaderCutError(Exception):
    """The header continues beyond the bytes that were read, but not beyond the end of the file."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(needed_bytes)
        self.needed_bytes = needed_bytes  # from the start of the file, at least


class _Cursor:
    """Reads the header in order; refuses a value that reaches beyond the end of the file."""

    def __init__(self, view: memoryview, path: Path, file_bytes: int) -> None:
        self.view = view  # the file's first bytes, or all of them
        self.path = path
        self.file_bytes = file_bytes
        self.position = 0
        self.nested_arrays = 0

    @property
    def left(self) -> int:
        """Bytes between the cursor and the end of the file."""
        return self.file_bytes - self.position

    def skip(self, size: int, what: str) -> int:
        """Skip `size` bytes and return where they start."""
        start = self.position
        if size > self.left:
            raise self.error(f"{what} takes {size} bytes, but {self.left} are left in the file")
        if start + size > len(self.view):
            raise HeaderCutError(start + size)
        self.position += size
        return start

    def number(self, kind: struct.Struct, what: str) -> int | float | bool:
        """Read one number."""
        value: int | float | bool = kind.unpack_from(self.view, self.skip(kind.size, what))[0]
        return value

    def u32(self, what: str) -> int:
        """Read a 32-bit count or type."""
        return int(self.number(_U32, what))

    def u64(self, what: str) -> int:
        """Read a 64-bit count, length or offset."""
        return int(self.number(_U64, what))

    def count(self, each_bytes: int, what: str, limit: int | None = None) -> int:
        """Read how many entries follow, and refuse more than the file has bytes for."""
        value, left = self.u64(what), self.left
        if limit is not None and value > limit:
            raise self.error(f"{what} is {value}, at most {limit} are read")
        if value * each_bytes > left:
            raise self.error(f"{what} is {value}, more than the {left} bytes that follow can hold")
        return value

    def text(self, what: str) -> MappedText:
        """Skip a text and return its bytes, not decoded."""
        size = self.u64(f"the length of {what}")
        start = self.skip(size, what)
        return MappedText(self.view[start : start + size], f"{self.path}: {what}")

    def name(self, what: str) -> str:
        """Read the name of a key or tensor."""
        found = self.text(what)
        if not 0 < len(found.view) <= MAX_NAME_BYTES:
            raise self.error(f"{what} has {len(found.view)} bytes, not 1 to {MAX_NAME_BYTES}")
        return found.text

    def value(self, kind: int, what: str) -> object:
        """Read a key's value, of the type with the number `kind`."""
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self.array(what, depth=1)
        if kind not in _NUMBERS:
            raise self.error(f"{what} has the unknown type {kind}")
        return self.number(_NUMBERS[kind], what)

    def array(self, what: str, depth: int) -> Sequence[object]:
        """Skip an array and return a view of it; its numbers and texts stay in the mapped file."""
        kind = self.u32(f"the element type of {what}")
        if kind not in _LEAST_BYTES:
            raise self.error(f"{what} is an array of the unknown type {kind}")
        limit = MAX_STRINGS if kind == _STRING else None
        count = self.count(_LEAST_BYTES[kind], f"the length of {what}", limit)
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            return self._arrays(count, what, depth + 1)
        start = self.skip(count * _LEAST_BYTES[kind], what)
        view = self.view[start : self.position]
        if kind == _BOOL and count and np.frombuffer(view, dtype=np.uint8).max() > 1:
            raise self.error(f"{what} holds booleans that are neither 0 nor 1")
        code: Any = _NUMBER_FORMATS[kind]
        return view.cast(code)

    def _arrays(self, count: int, what: str, depth: int) -> Sequence[object]:
        self.nested_arrays += count
        if depth > MAX_NESTING:
            raise self.error(f"{what} nests arrays deeper than {MAX_NESTING}")
        if self.nested_arrays > MAX_NESTED_ARRAYS:
            raise self.error(f"{what} brings the arrays within arrays above {MAX_NESTED_ARRAYS}")
        return [self.array(what, depth) for _ in range(count)]

    def _strings(self, count: int, what: str) -> MappedStrings:
        # The one hot loop of opening a file: a vocabulary and its merges are 500,000 texts.
        view, unpack, start = self.view, _U64.unpack_from, self.position
        position, ends = start, array("Q")
        append = ends.append
        try:
            for _ in range(count):
                position += 8 + unpack(view, position)[0]
                append(position)
        except (struct.error, OverflowError):
            position += 8  # counts the length field that is cut off
        if position > self.file_bytes:
            raise self.error(f"text {max(0, len(ends) - 1)} of {what} ends outside the file")
        if position > len(view):
            raise HeaderCutError(position)
        self.position = position
        return MappedStrings(view, start, ends, f"{self.path}: {what}")

    def error(self, message: str) -> FormatError:
        """Return the error that says what is wrong and where."""
        return FormatError(
            f"{self.path}: {message} (at byte {self.position}).",
            hint="The file is truncated or corrupt; download it again.",
        )


def read_gguf(path: Path) -> GgufFile:
    """Read the header of one GGUF file; tensors stay on disk until their bytes are used."""
    view = map_file(path)
    return parse_gguf(view, path, len(view))


def parse_gguf(view: memoryview, path: Path, file_bytes: int) -> GgufFile:
    """Read a header from a file's first bytes; raise HeaderCutError if they are too few."""
    cursor = _Cursor(view, path, file_bytes)
    version = _read_version(cursor)
    tensor_count = cursor.count(_TENSOR_BYTES, "the number of tensors", MAX_TENSORS)
    key_count = cursor.count(_KEY_BYTES, "the number of keys", MAX_KEYS)
    raw = _read_values(cursor, key_count)
    tensors = _read_tensors(cursor, tensor_count, _alignment(cursor, raw))
    header = cursor.view[: cursor.position]
    return GgufFile(path, version, GgufValues(raw), tensors, header)


def read_split_gguf(path: Path) -> tuple[GgufFile, ...]:
    """Read a GGUF file and, when it is the first part of a split one, all the other parts."""
    first = read_gguf(path)
    count = _split_number(first, "split.count", 1)
    if count <= 1:
        return (first,)
    name = PART_NAME.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise FormatError(
            f"{path} is one of {count} parts, but is not named as one.",
            hint=f"Name the parts like model-00001-of-{count:05d}.gguf.",
        )
    paths = [path.with_name(part) for part in part_names(name)]
    if path != paths[0]:
        raise FormatError(f"{path} is not the first of {count} parts.", hint=f"Open {paths[0]}.")
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise FormatError(
            f"{path} has {count} parts and {len(missing)} are missing: {', '.join(missing[:3])}.",
            hint=f"Put all parts into {path.parent}.",
        )
    parts = (first, *(read_gguf(part) for part in paths[1:]))
    check_parts(parts)
    return parts


def part_names(name: re.Match[str]) -> list[str]:
    """Return the names of all parts of the split file that a match of PART_NAME belongs to."""
    count = int(name["count"])
    return [f"{name['stem']}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]


def check_parts(parts: Sequence[GgufFile]) -> None:
    """Refuse parts that are not all the parts of one file, in order."""
    for index, part in enumerate(parts):
        number, count = _split_number(part, "split.no"), _split_number(part, "split.count")
        if (number, count) != (index, len(parts)):
            raise FormatError(
                f"{part.path} says it is part {number + 1} of {count}, "
                f"not part {index + 1} of {len(parts)}."
            )
    found = sum(len(part.tensors) for part in parts)
    expected = _split_number(parts[0], "split.tensors.count", found)
    if found != expected:
        raise FormatError(f"{parts[0].path}: the parts hold {found} tensors, not {expected}.")


def _split_number(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.values.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"{file.path}: {key} is {value!r}, not a whole number.")
    return value


def _read_version(cursor: _Cursor) -> int:
    start = cursor.skip(len(MAGIC), "the magic number") if cursor.file_bytes >= 4 else 0
    magic = bytes(cursor.view[start : start + 4])
    if magic != MAGIC:
        raise FormatError(f"{cursor.path} is not a GGUF file: it starts with {magic!r}.")
    version = cursor.u32("the version")
    if version in VERSIONS:
        return version
    if version & 0xFFFF == 0:
        raise FormatError(
            f"{cursor.path} is a big-endian GGUF file.", hint="Only little-endian files are read."
        )
    raise FormatError(
        f"{cursor.path} has GGUF version {version}.", hint="Versions 2 and 3 are read."
    )


def _read_values(cursor: _Cursor, count: int) -> dict[str, object]:
    raw: dict[str, object] = {}
    for index in range(count):
        key = cursor.name(f"the name of key {index}")
        if key in raw:
            raise cursor.error(f"the key {key!r} is there twice")
        raw[key] = cursor.value(cursor.u32(f"the type of key {key!r}"), f"key {key!r}")
    return raw


def _alignment(cursor: _Cursor, raw: Mapping[str, object]) -> int:
    value = raw.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        shown = value if isinstance(value, int | float) else "not a number"
        raise FormatError(f"{cursor.path}: general.alignment is {shown}, not a power of two.")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    entries = [_read_entry(cursor, index) for index in range(count)]
    data_start = -(-cursor.position // alignment) * alignment
    source = np.frombuffer(cursor.view, dtype=np.uint8)
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise FormatError(f"{cursor.path}: the tensor {name!r} is there twice.")
        quant = quant_of(kind, name)
        if offset % alignment:
            raise FormatError(
                f"{cursor.path}: tensor {name!r} has offset {offset}, which is not a multiple of "
                f"the alignment {alignment}."
            )
        info = TensorInfo(name, shape, quant, cursor.path, data_start + offset, source)
        _check_extent(info, cursor.file_bytes)
        tensors[name] = info
    check_no_overlap(tensors.values(), cursor.path)
    return tensors


def _read_entry(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.name(f"the name of tensor {index}")
    dimensions = cursor.u32(f"the number of dimensions of {name!r}")
    if dimensions > MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name!r} has {dimensions} dimensions, at most {MAX_DIMENSIONS}")
    sizes = [cursor.u64(f"a dimension of {name!r}") for _ in range(dimensions)]
    if any(not 0 < size <= MAX_DIMENSION for size in sizes):
        raise cursor.error(f"tensor {name!r} has the dimensions {sizes}")
    kind = cursor.u32(f"the type of {name!r}")
    # The file lists the contiguous dimension first.
    return name, tuple(reversed(sizes)), kind, cursor.u64(f"the offset of {name!r}")


def _check_extent(info: TensorInfo, file_bytes: int) -> None:
    row = info.shape[-1] if info.shape else 1
    if row % info.quant.block:
        raise FormatError(
            f"{info.path}: tensor {info.name!r} has rows of {row} values, which are not whole "
            f"{info.quant} blocks of {info.quant.block}."
        )
    end = info.offset + prod(info.shape) // info.quant.block * info.quant.block_bytes
    if end > file_bytes:
        raise FormatError(
            f"{info.path}: tensor {info.name!r} ends at byte {end}, but the file has {file_bytes}.",
            hint="The file is truncated or corrupt; download it again.",
        )
