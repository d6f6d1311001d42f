"""A GPU that is lost ends the engine and its requests, and says so in words."""

import queue
from collections import Counter
from collections.abc import Iterator

import pytest

from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.split.pipeline import Pipeline, StageMemory
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.stage import VOCAB, TableModel, device_engine, settings


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
        "The engine stopped after an error: cuda:0 is lost: CUDA error: an illegal "
        "memory access was encountered."
    )


def test_memory_of_each_device_is_reported(gpu: StandInGpu) -> None:
    engine, stage = device_engine(TableModel(), settings())
    memory = {
        "cuda:0": StageMemory({"weights": 7, "kv": 5}, Counter({"weights": 6})),
        "cpu": StageMemory({"cold_experts": 3}, Counter({"cold_experts": 3})),
    }
    on_gpu, on_host = Pipeline([stage], VOCAB, memory).memory()
    assert (on_gpu.device, on_gpu.planned_bytes, on_gpu.used_bytes) == ("cuda:0", 12, 6)
    assert on_gpu.process_bytes == stage.held_bytes()
    assert (on_host.device, on_host.used_bytes, on_host.process_bytes) == ("cpu", 3, None)
    engine.close()
