"""A stage whose CPU computes cold experts: its threads are told of steps, its failures end all."""

import queue
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.errors import DeviceError
from headroom.experts.decode import DecodeWorker
from headroom.kernels.cuda import handover
from headroom.kernels.native.module import MODULE
from headroom.layers.batch import Span
from headroom.split.gpu_stage import WARM_UPS
from tests.experts.cold_layers import decode_store
from tests.split.test_step_inputs import make, pages
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.stage import NotedStage, TableModel, device_engine, settings

pytestmark = pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
NO_ANSWER = "the CPU did not answer for cold experts within 10000 ms"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """Let this machine have the stand-in GPU."""
    with stand_in_gpu(monkeypatch) as made:
        yield made


class NotedWorker(DecodeWorker):
    """A worker that counts the steps of which its thread is told, and notes when that ends."""

    begun, closed = 0, False

    def begin_step(self) -> None:
        self.begun += 1
        super().begin_step()

    def close(self) -> None:
        super().close()
        self.closed = True

    def give_up(self) -> None:
        """Let the GPU have waited in vain, which its kernel writes into the mailbox."""
        self.box.words[handover.WORDS["FAILED"]] = 1


@pytest.fixture
def worker(gpu: StandInGpu) -> Iterator[NotedWorker]:
    """The CPU's thread for a layer whose experts are cold but for two."""
    made = NotedWorker("cuda:0")
    store = decode_store(("q8_0",) * 3, (4, 64, 256), hot=[1, 2])
    on_gpu = replace(store, is_hot=store.is_hot.to("cuda:0"))
    link = torch.zeros(3, dtype=torch.int32, device="cuda:0")
    made.add(on_gpu, 2, "silu", link)  # type: ignore[arg-type]
    made.start()
    yield made
    made.close()


def model_with(worker: NotedWorker, capturable: bool = True) -> TableModel:
    """Return a model that asks the CPU for its cold experts."""
    model = TableModel(capturable)
    model.decode_worker = worker  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("capturable", [True, False])
def test_threads_are_told_of_steps_of_few_rows_only(worker: NotedWorker, capturable: bool) -> None:
    stage = NotedStage(model_with(worker, capturable), settings())
    with torch.inference_mode():
        stage.step(make([Span(0, 3, 9, pages(1))]))
        told = 1 + capturable * WARM_UPS  # a new kind of step runs before it is captured
        assert worker.begun == told
        stage.step(make([Span(0, 40, 0, pages(1))]))
    assert worker.begun == told


def test_steps_of_few_rows_that_are_not_captured_are_reported_too(worker: NotedWorker) -> None:
    # Some layers are plain, and others ask the CPU.
    stage = NotedStage(model_with(worker, capturable=False), settings())
    with torch.inference_mode():
        stage.step(make([Span(0, 3, 9, pages(1))]))
    assert worker.begun == 1


def test_warming_up_a_chunk_of_few_rows_wakes_the_cold_worker(worker: NotedWorker) -> None:
    model = model_with(worker)
    stage = NotedStage(model, settings(chunk=16))
    stage.capture()
    assert len(model.seen[-1].tokens) == 20
    # Runs before captures, sizes that run once, and the chunk.
    assert worker.begun == WARM_UPS * len(stage.kinds) + 4 + 1


def test_no_long_step_follows_one_that_the_cpu_failed(worker: NotedWorker) -> None:
    stage = NotedStage(model_with(worker), settings())
    worker.give_up()
    with torch.inference_mode(), pytest.raises(DeviceError, match=NO_ANSWER):
        stage.step(make([Span(0, 40, 0, pages(1))]))


@pytest.mark.parametrize("rows", [3, 40])
def test_logits_of_a_failed_step_are_not_used(worker: NotedWorker, rows: int) -> None:
    stage = NotedStage(model_with(worker), settings())
    with torch.inference_mode():
        result = stage.step(make([Span(0, rows, 0, pages(1))]))
        worker.give_up()
        with pytest.raises(DeviceError, match=NO_ANSWER):
            result.logits([0])


def test_an_engine_ends_the_thread_before_its_memory_goes(worker: NotedWorker) -> None:
    engine, _ = device_engine(model_with(worker), settings())
    assert not worker.closed
    engine.close()
    assert worker.closed


def test_no_step_follows_one_that_the_cpu_failed(worker: NotedWorker) -> None:
    stage = NotedStage(model_with(worker), settings())
    worker.give_up()
    with torch.inference_mode(), pytest.raises(DeviceError, match=NO_ANSWER):
        stage.step(make([Span(0, 3, 9, pages(1))]))
    assert stage.lost() == NO_ANSWER


def test_tokens_of_a_failed_step_are_not_used(worker: NotedWorker) -> None:
    engine, _ = device_engine(model_with(worker), settings())
    begin = worker.begin_step

    def begin_and_fail() -> None:
        begin()
        worker.give_up()  # found out while the step runs

    worker.begin_step = begin_and_fail  # type: ignore[method-assign]
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    request = GenerationRequest(
        id="a", prompt=(1, 2), params=SamplingParams(), stop_ids=frozenset()
    )
    engine.submit(request, events.put)
    last = events.get(timeout=30)
    engine._thread.join(30)
    assert last.finish_reason == "error"
    assert not engine.alive
    assert f"cuda:0 is lost: {NO_ANSWER}" in str(engine._failure)
    engine.close()
