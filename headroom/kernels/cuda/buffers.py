"""Buffers that kernels take as scratch, declared as plain numbers without torch.

Each operation declares its buffers in `<operation>_scratch.py` beside its launcher. The launcher
takes them from the arena of a step (scratch.py), and the planner counts the same declarations with
`ScratchCount`. Both follow one rule: what was taken within a frame is free after it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import prod

ALIGNMENT = 256  # bytes; every buffer of a step's scratch begins at a multiple
ITEM_BYTES = {"u8": 1, "bf16": 2, "f16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}


@dataclass(frozen=True, slots=True)
class Buffer:
    """The shape and type of a tensor that an operation takes."""

    shape: tuple[int, ...]
    dtype: str  # of ITEM_BYTES

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor's values."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Buffers:
    """The named buffers of one operation, in the order in which they are taken."""

    def __iter__(self) -> Iterator[Buffer]:
        for field in fields(self):
            buffer = getattr(self, field.name)
            if buffer is not None:
                yield buffer

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        return sum(buffer.nbytes for buffer in self)


def floats(*shape: int) -> Buffer:
    """Return a float32 buffer."""
    return Buffer(shape, "f32")


def aligned(size_bytes: int) -> int:
    """Return the bytes that a buffer occupies in the arena."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class ScratchCount:
    """Counts buffers as the arena lends them, without any memory behind them."""

    def __init__(self) -> None:
        self.peak_bytes = 0  # most that was taken at once
        self.used_bytes = 0  # taken in the frames that are open

    def take(self, *taken: Buffer | Buffers) -> None:
        """Count buffers until the frame around the call ends."""
        for one in taken:
            for buffer in (one,) if isinstance(one, Buffer) else one:
                self.used_bytes += aligned(buffer.nbytes)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def largest(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return which of `sizes` to count, if frames that follow each other differ in a size only.

        The largest is enough for the peak. A subclass that lists all buffers returns all sizes.
        """
        return (max(sizes),)

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Free at its end what was taken within."""
        before = self.used_bytes
        yield
        self.used_bytes = before


class PeakCount(ScratchCount):
    """Counts buffers, and keeps those that are taken when most of the scratch is."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[str, Buffer]] = []  # at the peak; a name, or "" if it has none
        self._open: list[tuple[str, Buffer]] = []  # taken in the frames that are open

    def take(self, *taken: Buffer | Buffers) -> None:
        """Count buffers until the frame around the call ends."""
        for one in taken:
            if isinstance(one, Buffer):
                self._open.append(("", one))
            else:
                names = (field.name for field in fields(one) if getattr(one, field.name))
                self._open += zip(names, one, strict=True)
        before = self.peak_bytes
        super().take(*taken)
        if self.peak_bytes > before:
            self.held = list(self._open)

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Free at its end what was taken within."""
        open_before = len(self._open)
        with super().frame():
            yield
        del self._open[open_before:]
