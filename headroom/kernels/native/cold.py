"""ColdWorker: a C++ thread that computes cold experts for a GPU; see cold.h for the protocol."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.native.module import MODULE, POOL


def worker_threads(cores: int) -> int:
    """Return the number of threads that compute cold experts: one core stays for the engine thread.

    If the threads had to share a core, all of them would wait for the slowest in every layer.
    """
    return max(1, cores - 1)


@dataclass(frozen=True, slots=True, eq=False)
class ColdTable:
    """One layer's experts in tiles in host memory."""

    addresses: torch.Tensor  # int64 [experts, 3]: gate, up, down; 0: not in host memory
    kinds: Sequence[QuantType]  # types of gate, up and down
    width: int  # rows of an expert's gate and up matrices
    hidden: int
    used: int  # picks per row
    activation: str


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """What a worker has done since it was created."""

    requests: int  # one per layer and step with cold picks for the CPU
    picks: int
    experts: int  # each counts once per request, however many rows chose it
    read_bytes: int
    busy_ns: int  # time from seeing a request to answering it
    sleeps: int  # how often the thread went to sleep; only tests read it, to see that it does


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """What a worker has done for one layer since it was created."""

    requests: int
    experts: int
    read_bytes: int
    busy_ns: int


class ColdWorker:
    """The worker thread, which computes with the threads of POOL and sleeps between steps."""

    def __init__(
        self,
        words: Sequence[int],  # addresses of the mailbox's words: request, answer, layer, rows,
        # done, failed, ids, weights, inputs, answers
        tables: Sequence[ColdTable],
        most_rows: int,
    ) -> None:
        layers = []
        for table in tables:
            assert table.addresses.is_contiguous()
            assert table.addresses.dtype == torch.int64
            shapes = [(table.width, table.hidden)] * 2 + [(table.hidden, table.width)]
            like = [
                MODULE.Matrix(0, kind.ggml_id, *shape, tiles=True)
                for kind, shape in zip(table.kinds, shapes, strict=True)
            ]
            sizes = (len(table.addresses), table.used)
            where, gelu = table.addresses.data_ptr(), table.activation == "gelu"
            layers.append(MODULE.ColdLayer(like, where, sizes, gelu))
        self._tables = tuple(tables)  # keeps their memory alive as long as the thread
        self._worker = MODULE.ColdWorker(POOL.ops, words, layers, most_rows)
        self._end: tuple[str, WorkerCounts] | None = None  # failure and counts, once it is closed

    def begin_step(self) -> None:
        """Wake the thread before a step that may send it requests."""
        self._worker.begin_step()

    @property
    def failure(self) -> str:
        """The message of the thread's first exception; "" if there was none."""
        found: str = self._end[0] if self._end is not None else self._worker.failure()
        return found

    @property
    def counts(self) -> WorkerCounts:
        """What the worker has done so far."""
        return self._end[1] if self._end is not None else WorkerCounts(*self._worker.counts())

    def layer_counts(self) -> list[LayerCounts]:
        """Return what the worker has done for each layer so far; not after it was closed."""
        return [LayerCounts(*row) for row in self._worker.layer_counts()]

    def close(self) -> None:
        """End the thread; `failure` and `counts` stay available."""
        if self._end is None:
            self._end = self.failure, self.counts
            self._worker = None
