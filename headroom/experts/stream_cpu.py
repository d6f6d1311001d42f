"""CpuSide: what a CPU computes of the cold experts of a step of many rows, beside the GPU.

Nothing here runs on torch's own threads: they spin for a while after every operation, on the cores
that the C++ kernels' threads need.
"""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from headroom.experts.copies import KeptHost
from headroom.kernels.native.experts import PanelTable, experts_into, scratch_bytes


@dataclass(frozen=True, slots=True, eq=False)
class CpuExperts:
    """One layer's experts in host memory."""

    table: PanelTable
    activation: str


class CpuSide:
    """Computes in a thread of its own; layers use it one after another.

    The memory of its answers serves the next layer, too: who asks again must have waited for the
    device since it was told to read them.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "cold-prompts")  # starts when it is asked
        self._answers = KeptHost()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def ask(
        self,
        x: torch.Tensor,  # float32 [rows, hidden]
        picks: tuple[torch.Tensor, torch.Tensor],  # ids and weights; negative ids: none
        experts: CpuExperts,
    ) -> Future[tuple[torch.Tensor, float]]:
        """Let the sums of rows be computed; they come with the seconds that it took."""
        if not threading.main_thread().is_alive():  # executors take nothing then; others may go on
            done: Future[tuple[torch.Tensor, float]] = Future()
            done.set_result(self._compute(x, picks, experts))
            return done
        return self._thread.submit(self._compute, x, picks, experts)

    def _compute(
        self, x: torch.Tensor, picks: tuple[torch.Tensor, torch.Tensor], experts: CpuExperts
    ) -> tuple[torch.Tensor, float]:
        began = time.perf_counter()
        needed = scratch_bytes(picks[0], experts.table)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        (out,) = self._answers.like([x])
        experts_into(out, x, picks, experts.table, experts.activation, "f32", self._scratch)
        return out, time.perf_counter() - began
