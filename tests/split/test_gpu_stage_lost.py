"""A GPU that is lost ends the engine and its requests, and says so in words."""

import queue
from collections.abc import Iterator

import pytest

from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.stage import TableModel, device_engine, settings


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    with stand_in_gpu(monkeypatch) as made:
        yield made


def test_a_lost_device_ends_the_engine_and_its_requests(gpu: StandInGpu) -> None:
    engine, _ = device_engine(TableModel(), settings())
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def lose(event: TokenEvent) -> None:
        gpu.queues.lost = "CUDA error: an illegal memory access was encountered\nCompile with"
        events.put(event)

    params = SamplingParams(ignore_eos=True, max_tokens=50)
    request = GenerationRequest(id="a", prompt=(1, 2), params=params, stop_ids=frozenset())
    engine.submit(request, lose)
    found = [events.get(timeout=30), events.get(timeout=30)]
    engine._thread.join(30)
    assert [event.finish_reason for event in found] == [None, "error"]
    assert not engine.alive
    assert engine._failure == (
        "The engine stopped after an error: DeviceError: cuda:0 is lost: CUDA error: an illegal "
        "memory access was encountered."
    )


def test_memory_of_the_device_is_reported(gpu: StandInGpu) -> None:
    engine, _ = device_engine(TableModel(), settings())
    assert engine.stats().memory.device == "cuda:0"
    engine.close()
