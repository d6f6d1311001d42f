"""Memory for packed weights in large pages, which cause few TLB misses."""

import ctypes
import errno
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial

import torch

CHUNK_BYTES = 64 << 20  # allocated from the system at a time
VECTOR_ALIGNMENT = 64
LARGE_PAGE = 2 << 20
TOUCH_BYTES = 32 << 20  # of memory that one thread has mapped at a time
MOST_TOUCHING = 16  # threads
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later
_DONT_NEED = 4  # MADV_DONTNEED
_SMALL_PAGE = 4096


class WeightMemory:
    """Hands out pieces of large chunks; a chunk is freed with the last tensor that uses it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes of uninitialised memory, aligned for vectors."""
        start = -(-self._used // VECTOR_ALIGNMENT) * VECTOR_ALIGNMENT
        if start + size > len(self._chunk):
            self._chunk, start = large_pages(max(size, CHUNK_BYTES)), 0
        self._used = start + size
        return self._chunk[start : self._used]


def large_pages(size: int) -> torch.Tensor:
    """Return newly mapped memory, in large pages if the system has them."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without large pages gives small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % LARGE_PAGE
    return whole[first : first + size]


def touch_pages(memory: torch.Tensor) -> None:
    """Let the system give all pages of memory that `large_pages` has mapped, in several threads.

    Who touches a page first waits until it is zeroed, at some GB/s for one thread. Memory that the
    system refuses is left to its first user.
    """
    threads = min(MOST_TOUCHING, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "touch") as pool:
        for _ in pool.map(partial(_touch, memory), range(0, len(memory), TOUCH_BYTES)):
            pass


def _touch(memory: torch.Tensor, start: int) -> None:
    part = memory[start : start + TOUCH_BYTES]
    libc = _libc()  # calls do not hold the interpreter lock
    if libc is not None:
        address, size = ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(len(part))
        if libc.madvise(address, size, _POPULATE_WRITE) == 0 or ctypes.get_errno() != errno.EINVAL:
            return
    part.numpy()[::_SMALL_PAGE] = 0  # an older Linux, or another system


def drop_pages(memory: torch.Tensor) -> bool:
    """Give the pages of memory that `large_pages` has mapped back to the system.

    The memory can be used again, and has zeros then. Return False if the system takes none.
    """
    first = -memory.data_ptr() % _SMALL_PAGE
    size = (len(memory) - first) // _SMALL_PAGE * _SMALL_PAGE
    libc = _libc()
    if libc is None or size <= 0:
        return False
    address = ctypes.c_void_p(memory.data_ptr() + first)
    return bool(libc.madvise(address, ctypes.c_size_t(size), _DONT_NEED) == 0)


@cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library if it can be asked for pages; else None."""
    if sys.platform != "linux":
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc if libc.madvise else None
    except (OSError, AttributeError):
        return None


WEIGHTS = WeightMemory()
