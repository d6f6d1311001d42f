"""Scratch of a step: one piece of planned memory that the parts of a step use one after another.

Kernels take buffers by `empty` and give them back by leaving a `frame`. All work of a step is in
the order of one stream, so that a buffer may be used again as soon as its frame was left. Outside
of frames, and where no arena is opened, buffers are torch's own.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from math import prod

import torch

from headroom.kernels.cuda.sizes import ALIGNMENT

log = logging.getLogger(__name__)

UNPACK_BYTES = 64 << 20  # of weights unpacked at a time, where no plan says so
MOST_LENT = 4096  # tensors that an arena knows; every size of a step has some two hundred
_NO_FRAME = nullcontext()

_Key = tuple[int, tuple[int, ...], torch.dtype]  # where its memory begins, shape and type


class Arena:
    """Memory lent in frames: what was taken within one is free again after it."""

    def __init__(self, memory: torch.Tensor, unpack_bytes: int = UNPACK_BYTES) -> None:
        self.unpack_bytes = unpack_bytes  # most bytes of weights unpacked at a time
        self.peak_bytes = 0  # most that was ever lent at once, or asked for
        self.frames = 0  # that are open
        self._memory = memory  # uint8
        self._used = 0
        # Layers are alike, and so is what they take: each tensor, with the end of its memory.
        self._lent: dict[_Key, tuple[torch.Tensor, int]] = {}

    def frame(self) -> AbstractContextManager[None]:
        """Take back at the end what was lent within."""
        return _Frame(self)

    def open_frame(self) -> int:
        """Begin a frame; return what its end is to be told."""
        self.frames += 1
        return self._used

    def close_frame(self, before: int) -> None:
        """End the frame that began last."""
        self.frames -= 1
        self._used = before

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a tensor; beyond the plan it is torch's, with a warning."""
        key = self._used, shape, dtype
        lent = self._lent.get(key)
        if lent is not None:
            found, self._used = lent
            return found
        size = prod(shape) * dtype.itemsize
        first, self._used = self._used, self._used + -(-size // ALIGNMENT) * ALIGNMENT
        if self._used > self.peak_bytes:
            if self._used > len(self._memory) >= self.peak_bytes:
                log.warning(
                    "memory: a step needs %d bytes of scratch and %d were planned",
                    self._used,
                    len(self._memory),
                )
            self.peak_bytes = self._used
        if first + size > len(self._memory):
            return torch.empty(shape, dtype=dtype, device=self._memory.device)
        found = self._memory[first : first + size].view(dtype).view(shape)
        if len(self._lent) == MOST_LENT:
            self._lent.clear()
        self._lent[key] = found, self._used
        return found


class _Frame:
    """One frame of an arena; a generator would take longer than what it is around."""

    __slots__ = ("_arena", "_before")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __enter__(self) -> None:
        self._before = self._arena.open_frame()

    def __exit__(self, *failure: object) -> None:
        self._arena.close_frame(self._before)


_CURRENT: ContextVar[Arena | None] = ContextVar("arena", default=None)


def empty(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return memory that is valid until the frame around the call is left."""
    arena = _CURRENT.get()
    if arena is None or not arena.frames:
        return torch.empty(shape, dtype=dtype, device=device)
    return arena.take(shape, dtype)


@contextmanager
def opened(arena: Arena | None) -> Iterator[None]:
    """Let frames lend an arena's memory."""
    token = _CURRENT.set(arena)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def frame() -> AbstractContextManager[None]:
    """Give back at the end what was taken within, where an arena lends it."""
    arena = _CURRENT.get()
    return _NO_FRAME if arena is None else arena.frame()


def unpack_bytes() -> int:
    """Return how many bytes of weights may be unpacked at a time."""
    arena = _CURRENT.get()
    return UNPACK_BYTES if arena is None else arena.unpack_bytes
