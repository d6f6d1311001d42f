"""HostMemory: large pages of host memory that a GPU may read where they lie."""

import logging
import weakref

import torch

from headroom.kernels.cuda.driver import lock_pages, unlock_pages
from headroom.kernels.native.memory import large_pages
from headroom.machine.cgroups import read_limits
from headroom.machine.devices import pinnable_bytes
from headroom.units import gib

log = logging.getLogger(__name__)


class HostMemory:
    """One piece of host memory, locked in place where that is asked for and allowed.

    Torch's own pinned memory is rounded up to a power of two, which doubles what many models need.
    """

    def __init__(self, size: int, *, pin: bool) -> None:
        self.bytes = large_pages(size)
        self.refused = ""  # why it is not pinned although that was asked for
        self.pinned = False
        if pin and size:
            device = torch.cuda.current_device()
            self.refused = lock_pages(self.bytes.data_ptr(), size, device)
            self.pinned = not self.refused
            if self.pinned:
                # The memory stays until the driver has let go of it; a process that ends needs
                # neither.
                weakref.finalize(self, _give_back, self.bytes, device).atexit = False

    def __len__(self) -> int:
        return len(self.bytes)


def pin_limits() -> str:
    """Say how much memory may be pinned, where that is limited, to be added to a refusal."""
    limit = pinnable_bytes(read_limits())
    return "" if limit is None else f"; the control group allows {gib(limit)}"


def _give_back(memory: torch.Tensor, device: int) -> None:
    if reason := unlock_pages(memory.data_ptr(), device):
        log.warning("memory: %s of host memory stay pinned: %s", gib(memory.nbytes), reason)
