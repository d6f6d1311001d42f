"""A device that runs out of memory or is lost: told once, in words."""

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.errors import DeviceError, KernelError
from headroom.families.files import open_checkpoint
from headroom.machine.devices import DeviceSpec
from headroom.machine.readiness import Holder
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import make_plan
from headroom.split import launch
from headroom.units import GIB
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.stage import TableModel, device_engine, settings

GPU = DeviceSpec(
    name="cuda:0", kind="cuda", total_bytes=24 * GIB, available_bytes=24 * GIB, link=30e9, sm=90
)


ENDS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    KernelError("Kernels could not be loaded: out of memory."),
    RuntimeError("CUDA error: out of memory"),  # pinned memory, or a graph
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
PHASES = {"loading weights": "load_model", "capturing steps": "_open_gpu_stage"}


@pytest.fixture
def start(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Start a model on a GPU that is not there, of whose memory others hold some."""
    model = describe(open_checkpoint(tiny_path))
    plan = make_plan([model.shape], [GPU], Options(context=256, parallel=1))

    def load(
        config: object, tensors: object, plan: object, device: object, count: Any, *_: object
    ) -> object:
        count("core_weights", GIB)
        return object()

    holders = [Holder(4711, "python3", 3 * GIB), Holder(os.getpid(), "headroom", GIB)]
    monkeypatch.setattr(launch, "load_model", load)
    monkeypatch.setattr(launch, "open_device_memory", lambda name: None)
    monkeypatch.setattr("torch.cuda.device", lambda name: nullcontext())
    monkeypatch.setattr(launch, "gpu_memory", lambda name: (GIB // 2, 24 * GIB))
    monkeypatch.setattr(launch, "gpu_holders", lambda name: holders)
    return lambda: launch.start_pipeline(plan, model)


def failing(error: Exception) -> Callable[..., object]:
    def fail(*given: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", ENDS, ids=str)
@pytest.mark.parametrize("while_", PHASES)
def test_the_end_of_memory_at_start_is_an_error_with_numbers(
    start: Callable[[], object], monkeypatch: pytest.MonkeyPatch, while_: str, error: Exception
) -> None:
    monkeypatch.setattr(launch, PHASES[while_], failing(error))
    allocated = {"loading weights": "0 B", "capturing steps": "1.00 GiB"}[while_]
    message = f"cuda:0 ran out of memory while {while_}: {allocated} of .* planned were"
    with pytest.raises(DeviceError, match=message) as caught:
        start()
    assert caught.value.message.endswith(
        "512.0 MiB of 24.00 GiB are free; python3 (pid 4711) 3.00 GiB hold memory, too."
    )
    assert caught.value.hint.startswith("Choose a smaller --context, --parallel or --chunk")


@pytest.mark.parametrize(("kind", "wanted"), [("hip", DeviceError), ("cpu", RuntimeError)])
def test_the_end_of_memory_is_told_of_the_gpus_of_any_maker(
    monkeypatch: pytest.MonkeyPatch, kind: str, wanted: type[Exception]
) -> None:
    monkeypatch.setattr(launch, "gpu_memory", lambda name: (GIB // 2, 24 * GIB))
    monkeypatch.setattr(launch, "gpu_holders", lambda name: [])
    device = MagicMock(kind=kind, allocated={"kv": GIB})
    device.name = f"{kind}:0"
    with (
        pytest.raises(wanted, match="out of memory"),
        launch.explain_out_of_memory(device, {}, "x"),
    ):
        raise RuntimeError("HIP error: out of memory")


def test_a_gpu_that_has_no_room_to_start_is_told_alike(
    start: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = MagicMock()
    entered.__enter__.side_effect = ENDS[2]
    monkeypatch.setattr("torch.cuda.device", lambda name: entered)
    with pytest.raises(DeviceError, match="ran out of memory while loading weights"):
        start()


@pytest.mark.parametrize("while_", PHASES)
def test_other_errors_at_start_stay_what_they_are(
    start: Callable[[], object], monkeypatch: pytest.MonkeyPatch, while_: str
) -> None:
    monkeypatch.setattr(launch, PHASES[while_], failing(KernelError("There is no kernel x.")))
    with pytest.raises(KernelError, match=r"There is no kernel x\."):
        start()


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
