"""What one process takes of a GPU, its CUDA context included, whatever others hold."""

from collections.abc import Callable

import torch

from headroom.machine.gpus import detect_gpus

GPU = "cuda:0"


def free_by_driver() -> int | None:
    """Bytes that are free as the driver's own report says, which starts no CUDA in this process."""
    return next((gpu.available_bytes for gpu in detect_gpus() if gpu.name == GPU), None)


def free_by_torch() -> int:
    """Return the bytes that are free as CUDA reports it in this process."""
    return torch.cuda.mem_get_info(GPU)[0]


class Usage:
    """Counts GPU memory from its creation, before CUDA starts; nothing else may use the GPU.

    Without the driver's report it counts from CUDA's start, and leaves out what that takes.
    """

    def __init__(
        self,
        by_driver: Callable[[], int | None] = free_by_driver,
        by_torch: Callable[[], int] = free_by_torch,
    ) -> None:
        before = by_driver()
        self.whole = before is not None  # whether CUDA's start counts
        self._driver, self._torch = by_driver, by_torch
        self._before = by_torch() if before is None else before

    def taken(self) -> int:
        """Bytes that this process has taken so far."""
        now = self._driver() if self.whole else self._torch()
        assert now is not None
        return self._before - now
