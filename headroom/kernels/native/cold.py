"""A thread that computes cold experts for a GPU, told what to do through shared memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.native.module import MODULE, POOL


def worker_threads(cores: int) -> int:
    """Return the threads that compute cold experts: one core is left to who launches steps.

    A thread that must wait for a core makes all others wait, for each layer anew.
    """
    return max(1, cores - 1)


@dataclass(frozen=True, slots=True, eq=False)
class ColdTable:
    """One layer's experts in tiles in host memory."""

    addresses: torch.Tensor  # int64 [experts, 3] in host memory: gate, up, down; 0: not here
    kinds: Sequence[QuantType]
    width: int  # of an expert
    hidden: int
    used: int  # picks of a row
    activation: str


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """What a worker has done since it was made."""

    requests: int  # layers of steps
    picks: int
    experts: int  # each once a request, however many rows chose it
    read_bytes: int
    busy_ns: int  # from a request's coming to its answer
    sleeps: int


class ColdWorker:
    """The thread, and the pool's threads that help it; it sleeps between steps."""

    def __init__(
        self,
        words: Sequence[int],  # addresses: request, answer, layer, rows, done, failed, ids,
        # weights, inputs, answers
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
        self._tables = tuple(tables)  # their memory is read as long as the thread lives
        self._worker = MODULE.ColdWorker(POOL.ops, words, layers, most_rows)
        self._end: tuple[str, WorkerCounts] | None = None  # what there was to tell when it ended

    def begin_step(self) -> None:
        """Wake the thread: a step is about to run that may ask it."""
        self._worker.begin_step()

    @property
    def failure(self) -> str:
        """What went wrong; "" while nothing did."""
        found: str = self._end[0] if self._end is not None else self._worker.failure()
        return found

    @property
    def counts(self) -> WorkerCounts:
        """What was done so far."""
        return self._end[1] if self._end is not None else WorkerCounts(*self._worker.counts())

    def close(self) -> None:
        """End the thread; what it counted can still be asked."""
        if self._end is None:
            self._end = self.failure, self.counts
            self._worker = None
