"""A stage whose CPU computes cold experts: its threads are told of steps, its failures end all."""

import queue
from collections.abc import Iterator

import pytest
import torch

from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.errors import DeviceError
from headroom.layers.batch import Span
from headroom.split.gpu_stage import WARM_UPS
from tests.split.test_step_inputs import make, pages
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.stage import NotedStage, TableModel, device_engine, settings


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """Let this machine have the stand-in GPU."""
    with stand_in_gpu(monkeypatch) as made:
        yield made


class FakeCold:
    """Counts steps, and fails when told to."""

    def __init__(self) -> None:
        self.begun, self.reason, self.closed = 0, "", False

    def close(self) -> None:
        """Note it."""
        self.closed = True

    def begin_step(self) -> None:
        """Count one."""
        self.begun += 1

    def failure(self) -> str:
        """What was told."""
        return self.reason

    def check(self) -> None:
        """Raise what was told."""
        if self.reason:
            raise DeviceError(self.reason)


@pytest.mark.parametrize("capturable", [True, False])
def test_threads_are_told_of_steps_of_few_rows_only(capturable: bool) -> None:
    model = TableModel(capturable)
    cold = model.decode_worker = FakeCold()  # type: ignore[assignment]
    stage = NotedStage(model, settings())
    with torch.inference_mode():
        stage.step(make([Span(0, 3, 9, pages(1))]))
        told = 1 + capturable * WARM_UPS  # a new kind of step runs before it is captured
        assert cold.begun == told
        stage.step(make([Span(0, 40, 0, pages(1))]))
    assert cold.begun == told


def test_steps_of_few_rows_that_are_not_captured_are_reported_too() -> None:
    model = TableModel(capturable=False)  # some layers are plain, and others ask the CPU
    cold = model.decode_worker = FakeCold()  # type: ignore[assignment]
    stage = NotedStage(model, settings())
    with torch.inference_mode():
        stage.step(make([Span(0, 3, 9, pages(1))]))
    assert cold.begun == 1


def test_warming_up_a_chunk_of_few_rows_wakes_the_cold_worker() -> None:
    model = TableModel()
    cold = model.decode_worker = FakeCold()  # type: ignore[assignment]
    stage = NotedStage(model, settings(chunk=16))
    stage.capture()
    assert len(model.seen[-1].tokens) == 20
    # Runs before captures, sizes that run once, and the chunk.
    assert cold.begun == WARM_UPS * len(stage.kinds) + 4 + 1


def test_no_long_step_follows_one_that_the_cpu_failed() -> None:
    model = TableModel()
    cold = model.decode_worker = FakeCold()  # type: ignore[assignment]
    stage = NotedStage(model, settings())
    cold.reason = "no answer"
    with torch.inference_mode(), pytest.raises(DeviceError, match="no answer"):
        stage.step(make([Span(0, 40, 0, pages(1))]))


@pytest.mark.parametrize("rows", [3, 40])
def test_logits_of_a_failed_step_are_not_used(rows: int) -> None:
    model = TableModel()
    cold = model.decode_worker = FakeCold()  # type: ignore[assignment]
    stage = NotedStage(model, settings())
    with torch.inference_mode():
        result = stage.step(make([Span(0, rows, 0, pages(1))]))
        cold.reason = "no answer"
        with pytest.raises(DeviceError, match="no answer"):
            result.logits([0])


def test_an_engine_ends_the_thread_before_its_memory_goes() -> None:
    model = TableModel()
    cold = model.decode_worker = FakeCold()  # type: ignore[assignment]
    engine, _ = device_engine(model, settings())
    assert not cold.closed
    engine.close()
    assert cold.closed


def test_no_step_follows_one_that_the_cpu_failed() -> None:
    model = TableModel()
    cold = model.decode_worker = FakeCold()  # type: ignore[assignment]
    stage = NotedStage(model, settings())
    cold.reason = "no answer"
    with torch.inference_mode(), pytest.raises(DeviceError, match="no answer"):
        stage.step(make([Span(0, 3, 9, pages(1))]))
    assert stage.lost() == "no answer"


def test_tokens_of_a_failed_step_are_not_used() -> None:
    model = TableModel()
    cold = model.decode_worker = FakeCold()  # type: ignore[assignment]
    engine, _ = device_engine(model, settings())
    begin = cold.begin_step

    def begin_and_fail() -> None:
        begin()
        cold.reason = "no answer"  # found out while the step runs

    cold.begin_step = begin_and_fail  # type: ignore[method-assign]
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    request = GenerationRequest(
        id="a", prompt=(1, 2), params=SamplingParams(), stop_ids=frozenset()
    )
    engine.submit(request, events.put)
    last = events.get(timeout=30)
    engine._thread.join(30)
    assert last.finish_reason == "error"
    assert not engine.alive
    assert "cuda:0 is lost: no answer" in str(engine._failure)
