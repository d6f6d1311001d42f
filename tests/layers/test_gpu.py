"""What torch says of a GPU, beside what the driver said."""

from types import SimpleNamespace

import pytest
import torch

from headroom.layers import gpu
from headroom.layers.gpu import gpu_memory, read_gpu, read_torch
from headroom.memory.readiness import GpuFacts, TorchFacts
from headroom.units import GIB

SEEN = TorchFacts(version="2.11", cuda="13.0", count=1)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The one card that torch sees."""
    found = SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(gpu, "try_compiler", lambda index: "no NVRTC")
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
    monkeypatch.setattr(gpu, "triton_missing", lambda: "triton is not installed")
    found = read_gpu(GpuFacts(name="hip:0", total_bytes=GIB), SEEN)
    assert (found.gfx, found.sm, found.compiler) == ("gfx90a", 0, "triton is not installed")


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
    assert gpu_memory("hip:1")[0] == "cuda:1"
