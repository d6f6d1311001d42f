"""A GPU that runs out of memory at start: an error with what was planned, held and free."""

import gc
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headroom.errors import DeviceError, KernelError
from headroom.families.files import open_checkpoint
from headroom.machine.devices import detect_cpu
from headroom.machine.readiness import GpuMemory, Holder
from headroom.options import Options
from headroom.plan.describe import ModelDescription, describe
from headroom.plan.plan import Plan, make_plan
from headroom.split import launch
from headroom.units import GIB, gib
from tests.stand_in.gpu import H200, RADEON, Card, StandInGpu, stand_in_gpu
from tests.stand_in.streams import StandInError
from tests.synth_models import write_model

SETTINGS = Options(context=256, parallel=1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """A GPU of which others have taken much since the plan was made."""
    with stand_in_gpu(monkeypatch, replace(H200, free_bytes=GIB // 2), computes=False) as made:
        yield made


@pytest.fixture
def model(tmp_path: Path) -> ModelDescription:
    return describe(open_checkpoint(write_model("llama", "q4_k_m", tmp_path, few_layers=True)))


@pytest.fixture
def plan(model: ModelDescription) -> Plan:
    return make_plan([model.shape], [H200.spec], SETTINGS)


@pytest.fixture(autouse=True)
def holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another process and this one hold memory of the GPU."""
    found = [Holder(4711, "python3", 3 * GIB), Holder(os.getpid(), "headroom", GIB)]
    monkeypatch.setattr(launch, "gpu_holders", lambda name: found)


def bytes_held(gpu: StandInGpu, plan: Plan, model: ModelDescription, share: float) -> int:
    """Start a model where there is room; return what its tensors hold once a share is loaded."""
    gpu.queues.memory_bytes = 24 * GIB
    held: list[int] = []

    def note(done: int, total: int, what: str = "") -> None:
        if done >= share * total:
            held.append(gpu.queues.held_bytes)

    launch.start_pipeline(plan, model, note)
    gc.collect()
    assert 0 <= gpu.queues.held_bytes < held[-1] // 10  # the model is gone
    return held[0]


@pytest.mark.parametrize(
    ("while_", "share"),
    [("loading weights", 0.0), ("loading weights", 0.5), ("capturing steps", 1.0)],
)
def test_the_end_of_memory_at_start_is_an_error_with_numbers(
    gpu: StandInGpu, plan: Plan, model: ModelDescription, while_: str, share: float
) -> None:
    gpu.queues.memory_bytes = bytes_held(gpu, plan, model, share)
    with pytest.raises(DeviceError, match=f"cuda:0 ran out of memory while {while_}: ") as caught:
        launch.start_pipeline(plan, model)
    told = caught.value.message
    numbers = re.search(": (.*) of (.*) planned were allocated, and (.*) of (.*) are free; ", told)
    assert numbers is not None
    allocated, planned, *free = numbers.groups()
    assert planned == gib(sum(plan.devices[0].allocated.values()))
    assert (allocated == "0 B") == (share == 0.0)  # CUDA itself had no room
    assert free == ["512.0 MiB", "24.00 GiB"]
    assert told.endswith("; python3 (pid 4711) 3.00 GiB hold memory, too.")
    assert caught.value.hint.startswith("Choose a smaller --context, --parallel or --chunk")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        KernelError("Kernels could not be loaded: out of memory."),
        RuntimeError("CUDA error: out of memory"),  # pinned memory, or a graph
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("HIP error: out of memory"),
    ],
    ids=str,
)
@pytest.mark.parametrize("card", [H200, RADEON], ids=["cuda", "hip"])
def test_the_end_of_memory_is_told_however_it_is_met(
    model: ModelDescription, monkeypatch: pytest.MonkeyPatch, card: Card, error: Exception
) -> None:
    device = make_plan([model.shape], [card.spec], SETTINGS).devices[0]
    monkeypatch.setattr(launch, "gpu_memory", lambda name: GpuMemory(GIB // 2, 24 * GIB))
    message = f"{device.name} ran out of memory while loading weights: 100 B of .* planned were"
    with (
        pytest.raises(DeviceError, match=message),
        launch.explain_out_of_memory(device, {"core_weights": 100}, "loading weights"),
    ):
        raise error


def test_the_end_of_host_memory_stays_what_it_is(model: ModelDescription) -> None:
    device = make_plan([model.shape], [detect_cpu()], SETTINGS).devices[0]
    with (
        pytest.raises(RuntimeError, match=r"^out of memory$"),
        launch.explain_out_of_memory(device, {}, "loading weights"),
    ):
        raise RuntimeError("out of memory")


def test_other_errors_at_start_stay_what_they_are(
    gpu: StandInGpu, plan: Plan, model: ModelDescription
) -> None:
    gpu.queues.refused_at = 1
    with pytest.raises(StandInError, match="a copy is refused"):
        launch.start_pipeline(plan, model)


def test_each_of_two_models_on_a_gpu_reports_its_own_memory(
    gpu: StandInGpu, plan: Plan, model: ModelDescription
) -> None:
    gpu.queues.memory_bytes = 24 * GIB
    held = [gpu.queues.held_bytes]
    pipelines = []
    for _ in range(2):
        pipelines.append(launch.start_pipeline(plan, model))
        gc.collect()
        held.append(gpu.queues.held_bytes)
    for pipeline, before, after in zip(pipelines, held, held[1:], strict=False):
        (on_gpu,) = [memory for memory in pipeline.memory() if memory.device == "cuda:0"]
        assert on_gpu.planned_bytes == sum(plan.devices[0].allocated.values())
        assert on_gpu.used_bytes == pytest.approx(after - before, rel=0.1)
        assert on_gpu.process_bytes == torch.cuda.memory_reserved("cuda:0")
