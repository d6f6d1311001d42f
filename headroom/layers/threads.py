"""How many CPU threads the layers' kernels use."""

import logging

import torch

from headroom.kernels.native.module import MISSING, MODULE, POOL

log = logging.getLogger(__name__)


def warn_of_slow_kernels(device: str) -> None:
    """Say so where a CPU has only the reference kernels, which are right and slow."""
    if device == "cpu" and MODULE is None:
        log.warning("kernels: the C++ module is %s; running on slow reference kernels", MISSING)


def set_threads(threads: int, *, pin: bool = False) -> None:
    """Give torch and the C++ kernels the same number of threads; they never work at once.

    `pin` keeps each thread of the C++ kernels on one of the cores that this process may use.
    """
    torch.set_num_threads(threads)
    POOL.set(threads, pin=pin)
