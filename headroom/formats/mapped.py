"""Texts that lie in a mapped file and are decoded only when asked for."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from headroom.errors import FormatError


class MappedStrings(Sequence[str]):
    """Strings that lie in a mapped file one after another, decoded when asked for."""

    def __init__(self, view: memoryview, start: int, ends: "array[int]", where: str) -> None:
        self._view = view
        self._start = start  # offset of the first string's length field
        self._ends = ends  # byte after each string
        self._where = where

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self._decode(i) for i in range(*index.indices(len(self._ends)))]
        return self._decode(range(len(self._ends))[index])

    def __iter__(self) -> Iterator[str]:
        # One copy of all the texts: slices of bytes are much quicker than slices of a map.
        raw = bytes(self._view[self._start : self._ends[-1]]) if self._ends else b""
        begin = 8
        for index, end in enumerate(self._ends):
            try:
                text = raw[begin : end - self._start].decode()
            except UnicodeDecodeError:
                text = self._decode(index)  # raises the error that names the text
            yield text
            begin = end - self._start + 8

    def _decode(self, index: int) -> str:
        before = self._ends[index - 1] if index else self._start
        try:
            return str(self._view[before + 8 : self._ends[index]], "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{self._where}: text {index} is not UTF-8: {error}.") from error


@dataclass(frozen=True, slots=True)
class MappedText:
    """One text that lies in a mapped file."""

    view: memoryview
    where: str

    @property
    def text(self) -> str:
        """The text, decoded."""
        try:
            return str(self.view, "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.where} is not UTF-8 text: {error}.") from error
