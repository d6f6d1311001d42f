"""HostMemory: large pages of host memory, pinned so that a GPU can read them in place."""

import logging
import weakref

import torch

from headroom.kernels.cuda.driver import lock_pages, unlock_pages
from headroom.kernels.native.memory import drop_pages, large_pages, touch_pages
from headroom.machine.cgroups import read_limits
from headroom.machine.devices import pinnable_bytes
from headroom.units import gib

log = logging.getLogger(__name__)


class HostMemory:
    """One allocation of host memory, pinned if that is asked for and the driver allows it.

    Torch rounds its own pinned memory up to a power of two, which doubles what many models need.
    """

    def __init__(self, size: int, *, pin: bool) -> None:
        self.bytes = large_pages(size)
        self.refused = ""  # why the driver did not pin it; "" if it did, or was not asked
        self._unpin: weakref.finalize[..., HostMemory] | None = None
        if pin and size:
            device = torch.cuda.current_device()
            # The driver would touch page after page, in one thread.
            touch_pages(self.bytes)
            self.refused = lock_pages(self.bytes.data_ptr(), size, device)
            if not self.refused:
                # The finalizer keeps the memory until the driver has unpinned it. At the end of
                # the process the system does both.
                self._unpin = weakref.finalize(self, _give_back, self.bytes, device)
                self._unpin.atexit = False

    @property
    def pinned(self) -> bool:
        """Whether the driver has pinned it."""
        return self._unpin is not None and self._unpin.alive

    def __len__(self) -> int:
        return len(self.bytes)

    def drop(self) -> None:
        """Forget what is in it and let the system have its pages until it is used again.

        It is no longer pinned then. No copy may be under way.
        """
        if self._unpin is not None:
            self._unpin()
        drop_pages(self.bytes)


def pin_limits() -> str:
    """Return how much memory may be pinned, as the end of an error message; "" if not limited."""
    limit = pinnable_bytes(read_limits())
    return "" if limit is None else f"; the control group allows {gib(limit)}"


def _give_back(memory: torch.Tensor, device: int) -> None:
    if reason := unlock_pages(memory.data_ptr(), device):
        log.warning("memory: %s of host memory stay pinned: %s", gib(memory.nbytes), reason)
