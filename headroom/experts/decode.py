"""The decode path of cold experts: in steps of few rows the CPU computes them for the GPU.

Inside a captured step the GPU publishes rows and cold picks in a mailbox in pinned memory, computes
its own experts, and then waits for the CPU's answers. A C++ thread reads the mailbox and never
takes the interpreter's lock.
"""

import torch

from headroom.errors import DeviceError
from headroom.experts.store import LayerStore
from headroom.experts.telemetry import DecodeCounts
from headroom.kernels.cuda import handover
from headroom.kernels.cuda.handover import COUNTS, LIMIT_MS, Mailbox, Takers
from headroom.kernels.native.cold import ColdTable, ColdWorker
from headroom.plan.cost_model import DecodeChoice


class DecodeWorker:
    """The CPU thread that computes for one GPU, and the mailbox between them.

    Layers are added in the order of a step; then the thread is started.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._layers: list[CpuPicks] = []
        self._box: Mailbox | None = None
        self._worker: ColdWorker | None = None

    def add(
        self, store: LayerStore, used: int, activation: str, choice: DecodeChoice
    ) -> "CpuPicks":
        """Add the next layer of a step, and return its part for the CPU."""
        assert self._worker is None
        table = ColdTable(
            store.host_addresses, store.kinds, store.width, store.hidden, used, activation
        )
        in_place = torch.tensor(choice.in_place, dtype=torch.int32, device=self._device)
        assert len(in_place) == used + 1
        takers = Takers(store.is_hot, in_place)
        part = CpuPicks(self, len(self._layers), takers, table, store.expert_bytes)
        self._layers.append(part)
        return part

    @property
    def has_layers(self) -> bool:
        """Whether any layer asks the CPU; without one, no thread is started."""
        return bool(self._layers)

    def start(self) -> None:
        """Start the thread; no layer is added after this."""
        tables = [layer.table for layer in self._layers]
        self._box = Mailbox.allocate(tables[0].hidden, len(tables), self._device)
        self._worker = ColdWorker(self._box.addresses, tables, handover.MOST_ROWS)

    @property
    def box(self) -> Mailbox:
        """The mailbox of a started worker."""
        assert self._box is not None
        return self._box

    def is_last(self, index: int) -> bool:
        """Return whether a layer is the last one of a step that may ask the CPU."""
        return index == len(self._layers) - 1

    def begin_step(self) -> None:
        """Wake the thread before a decode step is launched, captured or not."""
        assert self._worker is not None
        self._worker.begin_step()

    def failure(self) -> str:
        """Return why the results of steps are wrong from now on; "" if nothing has failed."""
        assert self._worker is not None
        if reason := self._worker.failure:
            return f"the CPU could not compute cold experts: {reason}"
        if self.box.failed:
            return f"the CPU did not answer for cold experts within {LIMIT_MS} ms"
        return ""

    def check(self) -> None:
        """Raise an error if a step since the start has failed."""
        if reason := self.failure():
            raise DeviceError(
                f"A step on {self._device} failed: {reason}.",
                hint="Try --cold gpu, which needs no CPU threads, or fewer --threads.",
            )

    def counts(self) -> DecodeCounts:
        """Return the totals since the start; waits for the GPU."""
        assert self._worker is not None
        rows = self.box.counts.cpu().tolist()
        totals = dict(zip(COUNTS, map(sum, zip(*rows, strict=True)), strict=True))
        by_gpu = COUNTS.index("gpu_picks")
        work = self._worker.counts
        return DecodeCounts(
            cpu_bytes=work.read_bytes,
            gpu_bytes=sum(
                row[by_gpu] * layer.expert_bytes
                for row, layer in zip(rows, self._layers, strict=True)
            ),
            hot_s=totals["hot_ns"] / 1e9,
            wait_s=totals["wait_ns"] / 1e9,
            cold_s=work.busy_ns / 1e9,
        )

    def close(self) -> None:
        """End the thread, before the memory that it reads is freed; no step may be under way."""
        if self._worker is not None:
            self._worker.close()

    def __del__(self) -> None:
        # Layers refer to each other in cycles, which the collector frees in any order.
        self.close()


class CpuPicks:
    """The cold picks of one layer that the CPU computes: all, or those the GPU does not read."""

    def __init__(
        self,
        worker: DecodeWorker,
        index: int,  # among the worker's layers
        takers: Takers,
        table: ColdTable,
        expert_bytes: int,
    ) -> None:
        self._worker, self._index, self._takers = worker, index, takers
        self.table, self.expert_bytes = table, expert_bytes

    def ask(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Ask the CPU for its picks of normed rows, before the GPU's experts run.

        The ids of the CPU's picks become -1, so that the GPU skips them.
        """
        handover.publish(x, ids, weights, self._takers, self._worker.box, self._index)

    def add_answers(self, out: torch.Tensor) -> None:
        """Wait for the CPU's answers and add them to `[rows, hidden]`."""
        last = self._worker.is_last(self._index)
        handover.collect(out, self._worker.box, self._index, last=last)
