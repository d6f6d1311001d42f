"""Memory for packed weights in large pages, which cause few TLB misses."""

import mmap
from contextlib import suppress

import torch

CHUNK_BYTES = 64 << 20  # allocated from the system at a time
VECTOR_ALIGNMENT = 64
LARGE_PAGE = 2 << 20


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


WEIGHTS = WeightMemory()
