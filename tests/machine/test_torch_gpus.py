"""What torch reports about a GPU beyond the driver, also if it is full or does not start."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headroom.errors import DeviceError, KernelError
from headroom.kernels.cuda import probe
from headroom.machine import torch_gpus
from headroom.machine.readiness import GpuFacts, GpuMemory, Holder, TorchFacts, refuse_gpu
from headroom.machine.torch_gpus import gpu_memory, read_gpu, read_torch
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
    found = SimpleNamespace(name="NVIDIA H200", total_memory=141 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch_gpus, "driver_memory", lambda name: GpuMemory(200 * MIB, 141 * GIB))
    monkeypatch.setattr(torch_gpus, "gpu_holders", lambda name: [HOLDER])


def read(name: str = "cuda:1") -> GpuFacts:
    return torch_gpus.read_gpu(GpuFacts(name=name), TORCH)


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
        torch_gpus.gpu_memory("cuda:1")
    assert str(refused.value) == (
        "cuda:1 does not start: CUDA error: unknown error. See headroom doctor."
    )


def test_the_driver_reports_the_memory_of_a_gpu_on_which_cuda_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: (GIB, 2 * GIB))
    assert torch_gpus.gpu_memory("cuda:1") == GpuMemory(GIB, 2 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", failing(FULL))
    assert torch_gpus.gpu_memory("cuda:1") == GpuMemory(200 * MIB, 141 * GIB)


SEEN = TorchFacts(version="2.11", cuda="13.0", count=1)
ROCM = TorchFacts(version="2.11", hip="7.0", count=1)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The one card that torch sees."""
    found = SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch_gpus, "try_compiler", lambda index: probe.Trial("no NVRTC"))
    return found


def test_both_views_of_a_card_are_kept(card: SimpleNamespace) -> None:
    told = GpuFacts(name="cuda:0", product="Tesla T4", sm=75, total_bytes=16 * GIB)
    found = read_gpu(told, SEEN)
    assert (found.product, found.total_bytes) == ("Tesla T4", 16 * GIB)
    assert (found.torch_product, found.torch_bytes) == ("NVIDIA H200", 140 * GIB)
    assert (found.sm, found.compiler) == (90, "no NVRTC")
    assert read_gpu(GpuFacts(name="cuda:0"), SEEN).product == "NVIDIA H200"
    assert read_gpu(GpuFacts(name="cuda:1"), SEEN) == GpuFacts(name="cuda:1")


def test_an_amd_card_has_a_gfx_name_and_no_compiler_of_cudas(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.gcnArchName = "gfx90a:sramecc+:xnack-"
    monkeypatch.setattr(torch_gpus, "triton_missing", lambda: "triton is not installed")
    found = read_gpu(GpuFacts(name="hip:0", total_bytes=GIB), ROCM)
    assert (found.gfx, found.sm, found.compiler) == ("gfx90a", 0, "triton is not installed")


def test_a_torch_for_one_maker_is_not_asked_about_a_card_of_the_other(
    card: SimpleNamespace,
) -> None:
    for name, torch_facts in (("hip:0", SEEN), ("cuda:0", ROCM)):
        known = GpuFacts(name=name, total_bytes=GIB)
        assert read_gpu(known, torch_facts) == known


def test_a_torch_for_rocm_is_started_in_cudas_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert read_torch() == TorchFacts(version=torch.__version__)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name, answer in (("init", None), ("device_count", 2), ("get_arch_list", ["gfx1100"])):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    found = read_torch()
    assert (found.hip, found.count, found.archs) == ("7.0", 2, ("gfx1100",))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: (name, 0))
    assert gpu_memory("hip:1").free_bytes == "cuda:1"
