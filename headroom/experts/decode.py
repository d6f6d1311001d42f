"""Cold experts in steps of few rows: the CPU computes them while the GPU computes the hot ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headroom.errors import DeviceError
from headroom.kernels.cuda import handover
from headroom.kernels.cuda.handover import COUNTS, LIMIT_MS, Mailbox, Takers
from headroom.kernels.native.cold import ColdTable, ColdWorker
from headroom.plan.cost_model import DecodeChoice


class ColdStore(Protocol):
    """What is asked of a layer's store; an exchange changes its tensors in place."""

    @property
    def kinds(self) -> Sequence[Any]: ...  # types of an expert's gate, up and down
    @property
    def width(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def host_addresses(self) -> torch.Tensor: ...  # int64 [experts, 3], 0 of hot experts
    @property
    def is_hot(self) -> torch.Tensor: ...  # int32 [experts] on the GPU


class ColdPart(Protocol):
    """What a layer does about its cold picks, in steps of few rows."""

    def before(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """See the picks of normed rows before the GPU's experts run, and take some of them."""

    def after(self, out: torch.Tensor) -> None:
        """Add what was taken to the experts' answers `[rows, hidden]`."""


@dataclass(frozen=True, slots=True)
class ColdCounts:
    """Bytes and times of steps of few rows in layers that ask the CPU."""

    cpu_bytes: int  # read by the CPU
    gpu_bytes: int  # read over the link; an expert that two rows chose counts twice
    hot_s: float  # from a request to the time when the GPU had nothing else to do
    wait_s: float  # of the GPU, from then to the answer
    cold_s: float  # of the CPU, from requests to answers


class ColdCompute:
    """The worker of one GPU and the mailbox between them; layers are added, then it starts."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._layers: list[CpuShared] = []
        self._box: Mailbox | None = None
        self._worker: ColdWorker | None = None

    def add(
        self, store: ColdStore, used: int, activation: str, choice: DecodeChoice
    ) -> "CpuShared":
        """Return the part of a layer, the next one that a step runs."""
        assert self._worker is None
        table = ColdTable(
            store.host_addresses, store.kinds, store.width, store.hidden, used, activation
        )
        left = torch.tensor(choice.in_place, dtype=torch.int32, device=self._device)
        assert len(left) == used + 1
        takers = Takers(store.is_hot, left)
        part = CpuShared(self, len(self._layers), takers, table, store.expert_bytes)
        self._layers.append(part)
        return part

    @property
    def asks(self) -> bool:
        """Whether any layer asks the CPU: only then is there anything to start."""
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
        """Tell whether a layer is the last of a step that may ask the CPU."""
        return index == len(self._layers) - 1

    def begin_step(self) -> None:
        """Wake the worker before a step of few rows is launched, captured or not."""
        assert self._worker is not None
        self._worker.begin_step()

    def failure(self) -> str:
        """Return why no step can be trusted any more; "" while all is well."""
        assert self._worker is not None
        if reason := self._worker.failure:
            return f"the CPU could not compute cold experts: {reason}"
        if self.box.failed:
            return f"the CPU did not answer for cold experts within {LIMIT_MS} ms"
        return ""

    def check(self) -> None:
        """Raise if a step since the start failed."""
        if reason := self.failure():
            raise DeviceError(
                f"A step on {self._device} failed: {reason}.",
                hint="Try --cold gpu, which needs no CPU threads, or fewer --threads.",
            )

    def counts(self) -> ColdCounts:
        """Return what was counted so far; waits for the GPU."""
        assert self._worker is not None
        rows = self.box.counts.cpu().tolist()
        totals = dict(zip(COUNTS, map(sum, zip(*rows, strict=True)), strict=True))
        by_gpu = COUNTS.index("gpu_picks")
        work = self._worker.counts
        return ColdCounts(
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
        """End the thread, before the memory goes that it reads; no step may be under way."""
        if self._worker is not None:
            self._worker.close()

    def __del__(self) -> None:
        # Layers refer to each other in circles, which are taken apart in any order after this.
        self.close()


class CpuShared:
    """Cold picks that the CPU takes, all or all but some that the GPU reads in place."""

    def __init__(
        self,
        owner: ColdCompute,
        index: int,
        takers: Takers,
        table: ColdTable,
        expert_bytes: int,
    ) -> None:
        self._owner, self._index, self._takers = owner, index, takers
        self.table, self.expert_bytes = table, expert_bytes

    def before(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Ask the CPU; the ids of its picks become -1."""
        handover.publish(x, ids, weights, self._takers, self._owner.box, self._index)

    def after(self, out: torch.Tensor) -> None:
        """Wait for the CPU's answers and add them."""
        owner = self._owner
        last = owner.is_last(self._index)
        handover.collect(out, owner.box, self._index, last=last)
