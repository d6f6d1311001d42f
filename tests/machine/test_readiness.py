"""Why a GPU is refused: every text, from made-up facts."""

from dataclasses import replace

import pytest

from headroom.machine.readiness import (
    GpuFacts,
    GpuMemory,
    Holder,
    TorchFacts,
    has_kernels_for,
    out_of_memory,
    refuse_gpu,
    refuse_memory,
)
from headroom.units import GIB, MIB

TORCH = TorchFacts(version="2.11.0+cu130", cuda="13.0", count=1, archs=("sm_75", "sm_90"))
ROCM = TorchFacts(version="2.11.0+rocm7.0", hip="7.0", count=1, archs=("gfx90a:xnack-", "gfx1100"))
GPU = GpuFacts(name="cuda:0", product="NVIDIA H200", sm=90, driver="580.65.06")


def test_a_gpu_that_everything_runs_on_is_not_refused() -> None:
    assert refuse_gpu(TORCH, GPU) is None
    assert refuse_gpu(TORCH, GPU, "bf16") is None
    for gfx in ("gfx1100", "gfx90a", ""):
        assert refuse_gpu(ROCM, GpuFacts(name="hip:0", gfx=gfx), "bf16") is None


def test_a_driver_and_torch_may_differ_in_what_they_keep_of_a_card() -> None:
    """Old drivers leave the maker's name out, and torch does not count what ECC takes."""
    alike = {"total_bytes": 141 * GIB, "torch_product": "H200", "torch_bytes": 140 * GIB}
    assert refuse_gpu(TORCH, replace(GPU, **alike)) is None
    amd = GpuFacts(name="hip:0", torch_product="AMD Radeon", torch_bytes=24 * GIB)
    assert refuse_gpu(ROCM, replace(amd, product="gfx1100", total_bytes=25 * GIB)) is None


def test_the_only_card_is_not_refused_for_its_name_or_for_more_memory_than_is_planned_for() -> None:
    only = replace(GPU, listed=1, total_bytes=16 * GIB, torch_product="GRID T4-16Q")
    assert refuse_gpu(TORCH, replace(only, torch_bytes=15 * GIB)) is None
    assert refuse_gpu(TORCH, replace(only, torch_bytes=24 * GIB)) is None
    assert refuse_gpu(TORCH, only) is None
    assert refuse_gpu(replace(TORCH, count=2), only) is not None
    assert refuse_gpu(TORCH, replace(only, listed=2)) is not None


def test_a_part_of_the_only_card_is_taken_where_an_engine_keeps_to_it() -> None:
    name = "NVIDIA H200 MIG 1g.18gb"
    part = replace(GPU, listed=1, total_bytes=140 * GIB, torch_bytes=16 * GIB, torch_product=name)
    refusal = refuse_gpu(TORCH, part)
    assert refusal is not None
    assert refusal.message == (
        "cuda:0 is NVIDIA H200 with 140.00 GiB to the driver, and torch sees a part of it: "
        "NVIDIA H200 MIG 1g.18gb with 16.00 GiB."
    )
    assert refusal.hint == "Plan for the part: --device-memory with a size below 16.00 GiB."
    assert refuse_gpu(TORCH, replace(part, limit_bytes=17 * GIB)) == refusal
    assert refuse_gpu(TORCH, replace(part, limit_bytes=15 * GIB)) is None


@pytest.mark.parametrize(
    ("torch", "gpu", "dtype", "message", "hint"),
    [
        (
            TorchFacts(version="2.13.0+cpu"), {}, None,
            "torch 2.13.0+cpu is built for CPUs alone, without CUDA.",
            "Install a CUDA build of torch, or choose --device cpu.",
        ),
        (
            TorchFacts(version="2.11.0", hip="7.0"), {}, None,
            "torch 2.11.0 is built for ROCm 7.0, without CUDA.",
            "Install a CUDA build of torch, or choose --device cpu.",
        ),
        (
            TORCH, {"name": "hip:0"}, None,
            "torch 2.11.0+cu130 is built for CUDA 13.0, without ROCm.",
            "Install a ROCm build of torch, or choose --device cpu.",
        ),
        (
            ROCM, {"name": "hip:1"}, None,
            "torch sees 1 GPU, and hip:1 is not one of them.",
            "HIP_VISIBLE_DEVICES may hide it; torch counts what is left from hip:0 on.",
        ),
        (
            replace(ROCM, problem="No HIP GPUs are available", count=0),
            {"name": "hip:0", "driver": ""}, None,
            "torch 2.11.0+rocm7.0 (ROCm 7.0) does not start on hip:0, which the driver lists: No "
            "HIP GPUs are available.",
            "After an update of the driver a restart may be due; HIP_VISIBLE_DEVICES or a "
            "container may hide the GPU.",
        ),
        (
            ROCM, {"name": "hip:0", "gfx": "gfx906"}, None,
            "torch 2.11.0+rocm7.0 has no kernels for gfx906 of hip:0, only for gfx90a:xnack-, "
            "gfx1100.",
            "Install a torch that was built for it, or choose --device cpu.",
        ),
        (
            ROCM, {"name": "hip:0", "compiler": "triton is not installed"}, None,
            "Kernels cannot be compiled for hip:0: triton is not installed.",
            "Triton comes with ROCm builds of torch, or choose --device cpu.",
        ),
        (
            ROCM,
            {"name": "hip:0", "product": "", "total_bytes": 24 * GIB, "torch_bytes": 16 * GIB,
             "torch_product": "AMD Radeon RX 6800"}, None,
            "hip:0 is a card with 24.00 GiB to the driver and AMD Radeon RX 6800 with 16.00 GiB to "
            "torch: they count this machine's GPUs differently, or one sees a part of a card.",
            "Unset HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES.",
        ),
        (
            TORCH,
            {"product": "NVIDIA GeForce RTX 3090", "total_bytes": 24 * GIB, "torch_bytes": 12 * GIB,
             "torch_product": "NVIDIA GeForce RTX 3060"}, None,
            "cuda:0 is NVIDIA GeForce RTX 3090 with 24.00 GiB to the driver and NVIDIA GeForce RTX "
            "3060 with 12.00 GiB to torch: they count this machine's GPUs differently, or one sees "
            "a part of a card.",
            "Set CUDA_DEVICE_ORDER=PCI_BUS_ID: both count alike then.",
        ),
        (
            replace(TORCH, version="2.7.1+cu128", cuda="12.8"), {}, None,
            "torch 2.7.1+cu128 is too old for a GPU: the kernels need 2.8 or later, whose "
            "products of 16-bit numbers are summed in float32.",
            "Install torch 2.8 or later, or choose --device cpu.",
        ),
        (
            replace(TORCH, problem="The NVIDIA driver is too old.", count=0),
            {"driver": "470.57.02"}, None,
            "The NVIDIA driver 470.57.02 is too old for CUDA 13.0, which torch 2.11.0+cu130 was "
            "built for: it needs 580 or later.",
            "Update the driver, or install a torch built for an older CUDA.",
        ),
        (
            replace(TORCH, problem="No CUDA GPUs are available.", count=0), {}, None,
            "torch 2.11.0+cu130 (CUDA 13.0) does not start on cuda:0, which the driver 580.65.06 "
            "lists: No CUDA GPUs are available.",
            "After an update of the driver a restart may be due; CUDA_VISIBLE_DEVICES or a "
            "container may hide the GPU.",
        ),
        (
            TORCH, {"name": "cuda:3"}, None,
            "torch sees 1 GPU, and cuda:3 is not one of them.",
            "CUDA_VISIBLE_DEVICES may hide it; torch counts what is left from cuda:0 on.",
        ),
        (
            TORCH, {"name": "cuda:10"}, None,
            "torch sees 1 GPU, and cuda:10 is not one of them.",
            "CUDA_VISIBLE_DEVICES may hide it; torch counts what is left from cuda:0 on.",
        ),
        (
            TORCH, {"product": "Tesla P40", "sm": 61}, None,
            "cuda:0 (Tesla P40) is sm_61; the kernels need sm_75, and bf16 sm_80.",
            "Choose --device cpu.",
        ),
        (
            TORCH, {"product": "Tesla T4", "sm": 75}, "bf16",
            "cuda:0 (Tesla T4) is sm_75; products in bf16 need sm_80.",
            "Leave --dtype out, or choose f16 or f32.",
        ),
        (
            TORCH, {"product": "RTX 5090", "sm": 120}, None,
            "torch 2.11.0+cu130 has no kernels for sm_120 of cuda:0 (RTX 5090), only for "
            "sm_75, sm_90.",
            "Install a torch that was built for it, or choose --device cpu.",
        ),
        (
            TORCH, {"compiler": "libnvrtc.so.13 is missing."}, None,
            "Kernels cannot be compiled for cuda:0: libnvrtc.so.13 is missing.",
            "NVRTC comes with CUDA builds of torch; see headroom doctor --kernels.",
        ),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_wrong_and_what_to_try(
    torch: TorchFacts, gpu: dict[str, object], dtype: str | None, message: str, hint: str
) -> None:
    refusal = refuse_gpu(torch, replace(GPU, **gpu), dtype)  # type: ignore[arg-type]
    assert refusal is not None
    assert (refusal.message, refusal.hint) == (message, hint)


@pytest.mark.parametrize("version", ["2.8.0", "2.10.0a0+git1", "3.0", "unknown"])
def test_a_torch_that_is_new_enough_or_says_no_version_is_taken(version: str) -> None:
    assert refuse_gpu(replace(TORCH, version=version), GPU) is None


def test_machine_code_runs_in_its_generation_and_portable_code_on_all_later_ones() -> None:
    assert has_kernels_for(["sm_80"], 86)
    assert not has_kernels_for(["sm_86"], 80)
    assert not has_kernels_for(["sm_80"], 90)
    assert has_kernels_for(["sm_80", "compute_80"], 90)
    assert has_kernels_for(["sm_90a"], 90)
    assert not has_kernels_for(["gfx1100"], 90)


def test_too_little_free_memory_is_reported_with_who_holds_it() -> None:
    assert refuse_memory("cuda:0", GIB, GpuMemory(GIB, 24 * GIB)) is None
    holders = (Holder(4711, "python3", 20 * GIB), Holder(12, "Xorg", 300 * MIB))
    refusal = refuse_memory("cuda:0", 10 * GIB, GpuMemory(3 * GIB, 24 * GIB, holders))
    assert refusal is not None
    assert refusal.message == (
        "cuda:0 has 3.00 GiB of 24.00 GiB free and the plan needs 10.00 GiB; "
        "python3 (pid 4711) 20.00 GiB, Xorg (pid 12) 300.0 MiB hold the rest."
    )
    hidden = refuse_memory("cuda:0", 10 * GIB, GpuMemory(3 * GIB, 24 * GIB))
    assert hidden is not None
    assert hidden.message.endswith("who holds the rest is not known.")


def test_the_end_of_memory_is_reported_with_planned_allocated_and_free_bytes() -> None:
    alone = GpuMemory(GIB // 4, 12 * GIB)
    told = out_of_memory("loading weights", "cuda:0", 9 * GIB, 8 * GIB, alone)
    assert told.message == (
        "cuda:0 ran out of memory while loading weights: 8.00 GiB of 9.00 GiB planned were "
        "allocated, and 256.0 MiB of 12.00 GiB are free; no other process is known to hold any."
    )
    shared = replace(alone, holders=(Holder(4711, "python3", 3 * GIB),))
    told = out_of_memory("loading weights", "cuda:0", 9 * GIB, 8 * GIB, shared)
    assert told.message.endswith("are free; python3 (pid 4711) 3.00 GiB hold memory, too.")
