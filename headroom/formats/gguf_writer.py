"""GGUF writer: the header of a version 3 file, and the pieces of its tensors after it."""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from headroom.formats.gguf import DEFAULT_ALIGNMENT, MAGIC
from headroom.formats.quants import QuantType
from headroom.formats.writing import Job

GGUF_VERSION = 3
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 5, 6, 7, 8, 9, 10
_ARRAY_TYPES = {"i": _I32, "f": _F32, "I": _U32}  # by numpy's letters

GgufValue = bool | int | float | str | Sequence[Any] | np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file to be written."""

    name: str
    shape: tuple[int, ...]  # rows first; GGUF lists them the other way round
    quant: QuantType

    @property
    def nbytes(self) -> int:
        """The bytes of its values, without the padding before the next tensor."""
        return self.quant.bytes_for(prod(self.shape))


def gguf_bytes(values: Mapping[str, GgufValue], entries: Sequence[TensorEntry]) -> bytes:
    """Return the bytes before the tensors: the header, padded to the alignment."""
    parts = [struct.pack("<4sIQQ", MAGIC, GGUF_VERSION, len(entries), len(values))]
    for key, value in values.items():
        parts.append(_text(key) + _value(value))
    offset = 0
    for entry in entries:
        shape = tuple(reversed(entry.shape))
        parts.append(
            _text(entry.name)
            + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            + struct.pack("<IQ", entry.quant.ggml_id, offset)
        )
        offset += aligned_size(entry.nbytes)
    header = b"".join(parts)
    return header + bytes(aligned_size(len(header)) - len(header))


def gguf_jobs(
    values: Mapping[str, GgufValue],
    entries: Sequence[TensorEntry],
    jobs_of: Callable[[TensorEntry], Iterable[Job]],
) -> Iterator[Job]:
    """Yield the jobs that write a whole file; `jobs_of` returns the jobs of one tensor."""
    header = gguf_bytes(values, entries)
    yield lambda: header
    for entry in entries:
        yield from jobs_of(entry)
        if missing := aligned_size(entry.nbytes) - entry.nbytes:
            padding = bytes(missing)
            yield lambda padding=padding: padding  # type: ignore[misc]


def aligned_size(size: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: GgufValue) -> bytes:
    """Return a value after its type, which is chosen as other GGUF writers do."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<IQ", _U64, value) if value >> 32 else struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, np.ndarray):
        kind = _ARRAY_TYPES[value.dtype.char]
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + value.tobytes()
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    if value and isinstance(value[0], bool):
        return struct.pack(f"<IIQ{len(value)}?", _ARRAY, _BOOL, len(value), *value)
    return _value(np.asarray(value, np.int32 if _all_whole(value) else np.float32))


def _all_whole(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) for value in values)
