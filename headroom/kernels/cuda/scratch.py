"""Scratch of a step: one piece of planned memory that the operations of a step share in turn.

An operation declares its buffers in `<operation>_scratch.py`, takes them with `take`, and gives
them back by leaving a `frame`. All work of a step runs in the order of one stream, so a buffer may
be used again as soon as its frame was left. Outside of frames, and where no arena is open, torch
allocates the buffers.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from headroom.kernels.cuda.buffers import Buffer, aligned

log = logging.getLogger(__name__)

TORCH_DTYPES = {
    "u8": torch.uint8,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i32": torch.int32,
    "f32": torch.float32,
    "i64": torch.int64,
    "f64": torch.float64,
}
_INTEGERS = {"i32", "i64"}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
UNPACK_BYTES = 64 << 20  # of weights unpacked at a time, where no plan says how many
MOST_LENT = 4096  # tensors that an arena remembers; a step of one size takes about two hundred
_NO_FRAME = nullcontext()


def name_of(dtype: torch.dtype) -> str:
    """Return the name by which buffers are declared with a type."""
    return _NAMES[dtype]


class Arena:
    """Planned memory that is lent in frames: what was taken within a frame is free after it."""

    def __init__(self, memory: torch.Tensor, unpack_bytes: int = UNPACK_BYTES) -> None:
        self.unpack_bytes = unpack_bytes  # most bytes of weights unpacked at a time
        self.peak_bytes = 0  # most that was ever taken at once, beyond the memory included
        self.frames = 0  # open frames
        self._memory = memory  # uint8
        self._used = 0
        # Layers take the same buffers, so tensors are reused: by (first byte, buffer), the tensor
        # and the byte after it.
        self._lent: dict[tuple[int, Buffer], tuple[torch.Tensor, int]] = {}

    def frame(self) -> AbstractContextManager[None]:
        """Return a frame that takes back at its end what was lent within."""
        return _Frame(self)

    def open_frame(self) -> int:
        """Begin a frame; return what `close_frame` needs to end it."""
        self.frames += 1
        return self._used

    def close_frame(self, before: int) -> None:
        """End the frame that began last."""
        self.frames -= 1
        self._used = before

    def take(self, buffer: Buffer) -> torch.Tensor:
        """Return a tensor; beyond the planned memory torch allocates it, with one warning."""
        key = self._used, buffer
        lent = self._lent.get(key)
        if lent is not None:
            found, self._used = lent
            return found
        size, dtype = buffer.nbytes, TORCH_DTYPES[buffer.dtype]
        first, self._used = self._used, self._used + aligned(size)
        if self._used > self.peak_bytes:
            if self._used > len(self._memory) >= self.peak_bytes:
                log.warning(
                    "memory: a step needs %d bytes of scratch and %d were planned",
                    self._used,
                    len(self._memory),
                )
            self.peak_bytes = self._used
        if first + size > len(self._memory):
            return torch.empty(buffer.shape, dtype=dtype, device=self._memory.device)
        found = self._memory[first : first + size].view(dtype).view(buffer.shape)
        if len(self._lent) == MOST_LENT:
            self._lent.clear()
        self._lent[key] = found, self._used
        return found


class _Frame:
    """One frame of an arena; a generator as context manager would take longer than a launch."""

    __slots__ = ("_arena", "_before")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __enter__(self) -> None:
        self._before = self._arena.open_frame()

    def __exit__(self, *failure: object) -> None:
        self._arena.close_frame(self._before)


_CURRENT: ContextVar[Arena | None] = ContextVar("arena", default=None)
_ZEROED: ContextVar[bool] = ContextVar("zeroed", default=False)


def take(buffer: Buffer, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor that is valid until the frame around the call is left."""
    arena = _CURRENT.get()
    if arena is None or not arena.frames:
        found = torch.empty(buffer.shape, dtype=TORCH_DTYPES[buffer.dtype], device=device)
    else:
        found = arena.take(buffer)
    return found.zero_() if _ZEROED.get() and buffer.dtype in _INTEGERS else found


def empty_integers(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor of integers that torch allocates; zeros if `zeroed`."""
    found = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
    return found.zero_() if _ZEROED.get() else found


@contextmanager
def zeroed() -> Iterator[None]:
    """Fill buffers of integers with zeros within the block.

    They are row numbers and counts that kernels write and operations of torch read. If the kernels
    do not run, what was in the memory before would be used as an index.
    """
    token = _ZEROED.set(True)
    try:
        yield
    finally:
        _ZEROED.reset(token)


@contextmanager
def opened(arena: Arena | None) -> Iterator[None]:
    """Let `take` and `frame` lend this arena's memory within the block."""
    token = _CURRENT.set(arena)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def frame() -> AbstractContextManager[None]:
    """Return a frame of the open arena; without an arena, torch frees buffers by itself."""
    arena = _CURRENT.get()
    return _NO_FRAME if arena is None else arena.frame()


def unpack_bytes() -> int:
    """Return how many bytes of weights may be unpacked at a time."""
    arena = _CURRENT.get()
    return UNPACK_BYTES if arena is None else arena.unpack_bytes
