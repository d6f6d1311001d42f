"""The decode path of cold experts: in steps of few rows a layer's picks are resolved on the GPU.

Inside a captured step a kernel divides the experts that are not in GPU memory between the link and
the CPU. It publishes the rows and the picks for the CPU in a mailbox in pinned memory. The GPU then
computes its own experts, and waits for the CPU's answers. A C++ thread reads the mailbox and never
takes the interpreter's lock.
"""

from dataclasses import replace

import torch

from headroom.errors import DeviceError
from headroom.experts.cache import RULES
from headroom.experts.layer_store import LayerStore
from headroom.experts.telemetry import DecodeCounts
from headroom.kernels.cuda import expert_cache, handover
from headroom.kernels.cuda.expert_cache import CpuRequest, LayerTable
from headroom.kernels.cuda.handover import COUNTS, LIMIT_MS, WORDS, Mailbox
from headroom.kernels.cuda.route import RouterLogits
from headroom.kernels.native.cold import ColdTable, ColdWorker, LayerCounts
from headroom.kernels.ops import Picks


class DecodeWorker:
    """The CPU thread that computes for one GPU, and the mailbox between them.

    Layers are added in the order of a step; then the thread is started.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._layers: list[CpuPart] = []
        self._box: Mailbox | None = None
        self._worker: ColdWorker | None = None

    def add(
        self,
        store: LayerStore,
        used: int,
        activation: str,
        link: torch.Tensor,  # int32 on the GPU: of n misses of a step, how many cross the link
    ) -> "CpuPart":
        """Add the next layer of a step, and return its part for the CPU."""
        assert self._worker is None
        table = ColdTable(
            store.host_addresses, store.kinds, store.width, store.hidden, used, activation
        )
        assert len(link) > used
        part = CpuPart(self, len(self._layers), table, store.expert_bytes, link)
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

    @property
    def steps(self) -> int:
        """The number of decode steps that the GPU has finished, modulo 2^32."""
        return int(self.box.words[WORDS["DONE"]]) & 0xFFFFFFFF

    def layer_counts(self) -> list[LayerCounts]:
        """Return what the thread has done for each layer since it was started."""
        assert self._worker is not None
        return self._worker.layer_counts()

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
            linked=totals["gpu_picks"],
            by_cpu=work.experts,
        )

    def close(self) -> None:
        """End the thread, before the memory that it reads is freed; no step may be under way."""
        if self._worker is not None:
            self._worker.close()

    def __del__(self) -> None:
        # Layers refer to each other in cycles, which the collector frees in any order.
        self.close()


class CpuPart:
    """The misses of one layer that the CPU computes: those that do not cross the link."""

    def __init__(
        self,
        worker: DecodeWorker,
        index: int,  # among the worker's layers
        table: ColdTable,
        expert_bytes: int,
        link: torch.Tensor,  # int32 on the GPU: of n misses of a step, how many cross the link
    ) -> None:
        self._worker, self._index = worker, index
        self.table, self.expert_bytes, self.link = table, expert_bytes, link

    def request(self, x: torch.Tensor) -> CpuRequest:
        """Return where the CPU is asked for the experts of normed rows."""
        return CpuRequest(x, self._worker.box, self._index)

    def add_answers(self, out: torch.Tensor) -> None:
        """Wait for the CPU's answers and add them to `[rows, hidden]`."""
        last = self._worker.is_last(self._index)
        handover.collect(out, self._worker.box, self._index, last=last)


class DecodeResolver:
    """Resolves one layer's picks in decode steps: which are hits, and who takes the misses."""

    def __init__(self, table: LayerTable, cpu: CpuPart | None = None) -> None:
        self.table = table if cpu is None else replace(table, link=cpu.link)
        self._cpu = cpu

    @property
    def asks_cpu(self) -> bool:
        """Whether the CPU may be asked, which needs the normed rows in float32."""
        return self._cpu is not None

    def resolve(self, x: torch.Tensor | None, picks: Picks | RouterLogits) -> Picks:
        """Return a step's picks with ids of -1 for those of the CPU, which begins to compute.

        This runs before the kernels of the experts. `x` are the normed rows, if the CPU is asked.
        """
        if self._cpu is None:
            return expert_cache.resolve(picks, self.table, RULES, None)
        assert x is not None
        return expert_cache.resolve(picks, self.table, RULES, self._cpu.request(x))

    def add_answers(self, out: torch.Tensor) -> None:
        """Wait for the CPU's answers, if it may be asked, and add them to `[rows, hidden]`."""
        if self._cpu is not None:
            self._cpu.add_answers(out)
