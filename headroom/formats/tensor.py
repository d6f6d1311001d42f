"""TensorInfo: where a tensor's bytes lie and what they mean, read only when asked for."""

import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from headroom.errors import FormatError
from headroom.formats.quants import QuantType

if TYPE_CHECKING:  # plans of known models need this module and no numpy
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A lazy view of one tensor in a mapped file."""

    name: str  # as in the file
    shape: tuple[int, ...]  # rows first; the last dimension is contiguous
    quant: QuantType
    path: Path  # the file that holds it
    offset: int  # of its first byte, from the start of the file
    source: "Bytes" = field(repr=False, compare=False)  # the whole file, mapped

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes in the file."""
        return self.quant.bytes_for(prod(self.shape))

    @property
    def stored_type(self) -> str:
        """What the file stores the tensor as, for people."""
        return self.quant.name

    @property
    def stored_bytes(self) -> int:
        """The bytes of the file that the tensor is read from."""
        return self.nbytes

    def data(self) -> "Bytes":
        """Return the tensor's bytes as a read-only view of the mapped file; copies nothing."""
        found = self.source[self.offset : self.offset + self.nbytes]
        if len(found) != self.nbytes:
            raise FormatError(f"Only the header of {self.path} was read, not {self.name!r}.")
        return found


@dataclass(frozen=True, slots=True)
class ComposedTensor(TensorInfo):
    """A tensor that a file holds in several parts; its bytes are computed whenever they are read.

    `path` and `offset` are those of the first part, `quant` is the type of the computed bytes.
    """

    parts: tuple[TensorInfo, ...]
    method: str  # how the parts store it, such as "fp8"
    compose: Callable[[], "Bytes"] = field(repr=False, compare=False)

    @property
    def stored_type(self) -> str:
        """What the file stores the tensor as, for people."""
        return self.method

    @property
    def stored_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def data(self) -> "Bytes":
        """Return the tensor's bytes, computed from its parts."""
        found = self.compose()
        assert found.nbytes == self.nbytes
        return found


def map_file(path: Path) -> memoryview:
    """Return a file's bytes as a read-only memory map; pages are read when they are used."""
    if not path.exists():
        raise FormatError(f"There is no file {path}.")
    if not path.is_file():
        raise FormatError(f"{path} is not a regular file.")
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError as error:  # mmap refuses an empty file
        raise FormatError(f"{path} is empty.") from error
    except OSError as error:
        raise FormatError(f"Cannot read {path}: {error.strerror}.") from error


def check_no_overlap(tensors: Iterable[TensorInfo], path: Path) -> None:
    """Refuse a file in which two tensors claim the same bytes."""
    placed = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes))
    for before, after in pairwise(placed):
        if before.offset + before.nbytes > after.offset:
            raise FormatError(
                f"{path}: tensors {before.name!r} and {after.name!r} overlap "
                f"at byte {after.offset}."
            )
