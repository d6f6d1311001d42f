"""A device that runs out of memory or is lost: told once, in words."""

import queue
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.errors import DeviceError
from headroom.formats.checkpoint import open_checkpoint
from headroom.memory.devices import DeviceSpec
from headroom.memory.plan import make_plan
from headroom.models.describe import describe
from headroom.options import Options
from headroom.split.launch import start_pipeline
from headroom.units import GIB
from tests.split.fake_device import FakeModel, device_engine, settings

GPU = DeviceSpec(
    name="cuda:0", kind="cuda", total_bytes=24 * GIB, available_bytes=24 * GIB, link=30e9, sm=90
)


def test_the_end_of_memory_while_loading_is_an_error_with_numbers(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = describe(open_checkpoint(tiny_path))
    plan = make_plan([model.shape], [GPU], Options(context=256, parallel=1))

    def fail(
        config: object, tensors: object, plan: object, count: object, placement: object
    ) -> None:
        count("core_weights", GIB)  # type: ignore[operator]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("headroom.split.launch.load_model", fail)
    monkeypatch.setattr("headroom.split.launch.open_device_memory", lambda name: None)
    monkeypatch.setattr("torch.cuda.device", lambda name: nullcontext())
    monkeypatch.setattr("headroom.split.launch.gpu_memory", lambda name: (GIB // 2, 24 * GIB))
    message = "cuda:0 ran out of memory while loading weights: 1.00 GiB of .* planned were"
    with pytest.raises(DeviceError, match=message) as caught:
        start_pipeline(plan, model)
    assert "512.0 MiB of 24.00 GiB are free" in caught.value.message


def test_a_lost_device_ends_the_engine_and_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stage = device_engine(FakeModel(), settings())
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def fail(batch: object, draws: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(stage, "step", fail)
    monkeypatch.setattr(stage, "lost", lambda: "CUDA error: an illegal memory access")
    engine.submit(
        GenerationRequest(id="a", prompt=(1, 2), params=SamplingParams(), stop_ids=frozenset()),
        events.put,
    )
    last = events.get(timeout=30)
    engine._thread.join(30)
    assert last.finish_reason == "error"
    assert not engine.alive
    assert engine._failure == (
        "The engine stopped after an error: DeviceError: cpu is lost: CUDA error: an illegal "
        "memory access."
    )


def test_memory_of_the_device_is_reported() -> None:
    engine, _ = device_engine(FakeModel(), settings())
    assert engine.stats().memory.device == "cpu"
    engine.close()
