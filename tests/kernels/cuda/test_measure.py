"""How quick a CPU answers a GPU, measured here with the kernels on the CPU and a real worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from headroom.errors import KernelError
from headroom.kernels.cuda import measure
from headroom.kernels.cuda.handover import WORDS, Mailbox
from headroom.kernels.native.cold import ColdWorker, worker_threads
from headroom.kernels.native.module import MODULE
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = pytest.mark.skipif(
    MODULE is None or COMPILER is None, reason="needs the C++ module and a C++ compiler"
)
ROUNDS = 4


class Event(SimpleNamespace):
    """A moment of a clock that only the test moves."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[ColdWorker]:
    """The workers that were made; capturing a step runs it, and events are 1 ms apart."""
    made: list[ColdWorker] = []
    requests: list[int] = []

    class Seen(ColdWorker):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            made.append(self)

        def close(self) -> None:
            requests.append(self.counts.requests)
            super().close()

    @contextmanager
    def graph(graph: object) -> Iterator[None]:
        made[-1].begin_step()
        yield

    use_kernels(monkeypatch, compile_on_cpu)
    monkeypatch.setattr(measure, "ColdWorker", Seen)
    monkeypatch.setattr(measure, "ROUNDS", ROUNDS)
    monkeypatch.setattr(measure, "_event", lambda: Event(elapsed_time=lambda end: 1.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    made.append(requests)  # type: ignore[arg-type]
    return made


def test_requests_are_measured_beside_steps_without_any(workers: list[ColdWorker]) -> None:
    requests = workers[0]
    assert measure.handover_seconds("cpu") == 1e-7  # both took the same time by the test's clock
    assert requests == [2 * ROUNDS]  # once to warm up and once captured, and none in the others


def test_a_cpu_that_does_not_answer_is_no_measurement(
    workers: list[ColdWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = Mailbox.allocate

    def failed(*given: object) -> Mailbox:
        box = allocate(*given)  # type: ignore[arg-type]
        box.words[WORDS["FAILED"]] = 1
        return box

    monkeypatch.setattr(measure.Mailbox, "allocate", failed)
    with pytest.raises(KernelError, match=r"The CPU did not answer a GPU: in time\."):
        measure.handover_seconds("cpu")


def test_one_core_is_left_to_who_launches_steps() -> None:
    assert [worker_threads(cores) for cores in (1, 2, 16)] == [1, 1, 15]
