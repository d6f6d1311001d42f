"""What is known of a GPU that has no memory left, or does not start."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headroom.errors import DeviceError, KernelError
from headroom.kernels.cuda import probe
from headroom.layers import gpu
from headroom.memory.readiness import GpuFacts, GpuMemory, Holder, TorchFacts, refuse_gpu
from headroom.units import GIB, MIB

TORCH = TorchFacts(version="2.11.0+cu130", cuda="13.0", count=2, archs=("sm_90",))
HOLDER = Holder(4711, "python3", 140 * GIB)
FULL = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*given: object) -> None:
        raise error

    return fail


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two H200, of which others hold nearly all."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(gpu, "driver_memory", lambda name: (200 * MIB, 141 * GIB))
    monkeypatch.setattr(gpu, "gpu_holders", lambda name: [HOLDER])


def read(name: str = "cuda:1") -> GpuFacts:
    return gpu.read_gpu(GpuFacts(name=name), TORCH)


@pytest.mark.parametrize("way", ["its context", "a kernel"])
def test_a_full_gpu_is_refused_with_numbers_and_who_holds_them(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "its context":
        monkeypatch.setattr(torch.cuda, "device", failing(FULL))
    else:
        error = KernelError("Kernels could not be loaded: out of memory.")
        monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
        monkeypatch.setattr(probe, "compile_kernel", failing(error))
    facts = read()
    assert facts.full == GpuMemory(200 * MIB, 141 * GIB, (HOLDER,))
    refusal = refuse_gpu(TORCH, facts)
    assert refusal is not None
    assert refusal.message == (
        "cuda:1 has 200.0 MiB of 141.00 GiB free, too little to start CUDA and load a kernel; "
        "python3 (pid 4711) 140.00 GiB hold the rest."
    )
    assert refusal.hint == "End what holds it, or choose another --device."


def test_a_gpu_that_does_not_start_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: unknown error\nCompile with TORCH_USE_CUDA_DSA")
    monkeypatch.setattr(torch.cuda, "device", failing(error))
    facts = read()
    assert (facts.compiler, facts.full) == ("CUDA error: unknown error", None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", failing(error))
    with pytest.raises(DeviceError) as refused:
        gpu.gpu_memory("cuda:1")
    assert str(refused.value) == (
        "cuda:1 does not start: CUDA error: unknown error. See headroom doctor."
    )


def test_the_driver_tells_the_memory_of_a_gpu_on_which_cuda_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: (GIB, 2 * GIB))
    assert gpu.gpu_memory("cuda:1") == (GIB, 2 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", failing(FULL))
    assert gpu.gpu_memory("cuda:1") == (200 * MIB, 141 * GIB)
