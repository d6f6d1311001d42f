"""HostMemory: large pages of host memory that a GPU may read where they lie."""

import logging
import weakref

import torch

from headroom.kernels.native.memory import large_pages
from headroom.units import gib

log = logging.getLogger(__name__)

REGISTER_FLAGS = 3  # for all GPUs, and at addresses that kernels can read


class HostMemory:
    """One piece of host memory, locked in place where that is asked for and allowed.

    Torch's own pinned memory is rounded up to a power of two, which doubles what many models need.
    """

    def __init__(self, size: int, *, pin: bool) -> None:
        self.bytes = large_pages(size)
        self.refused = ""  # why it is not pinned although that was asked for
        self.pinned = False
        if pin and size:
            self.refused = register(self.bytes)
            self.pinned = not self.refused
        if self.pinned:
            # The memory stays until the driver has let go of it; a process that ends needs neither.
            weakref.finalize(self, _unregister, self.bytes).atexit = False

    def __len__(self) -> int:
        return len(self.bytes)


def register(memory: torch.Tensor) -> str:
    """Lock memory in place for GPUs; return why that was refused, "" if it was not."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, REGISTER_FLAGS))
    return "" if result == 0 else str(cudart.cudaGetErrorString(cudart.cudaError(result)))


def _unregister(memory: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = int(cudart.cudaHostUnregister(memory.data_ptr()))
    if result:
        log.warning("memory: %s of host memory stay pinned (error %d)", gib(memory.nbytes), result)
