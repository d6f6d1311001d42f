"""Why a GPU is refused: every text, from made-up facts."""

from dataclasses import replace

import pytest

from headroom.memory.drivers import gpu_facts, read_gpus, read_holders, visible_rows
from headroom.memory.gpus import detect_gpus
from headroom.memory.readiness import (
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
GPU = GpuFacts(name="cuda:0", product="NVIDIA H200", sm=90, driver="580.65.06")


def test_a_gpu_that_everything_runs_on_is_not_refused() -> None:
    assert refuse_gpu(TORCH, GPU) is None
    assert refuse_gpu(TORCH, GPU, "bf16") is None


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
            "torch sees 1 GPUs, and cuda:3 is not one of them.",
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


def test_too_little_free_memory_is_told_with_who_holds_it() -> None:
    assert refuse_memory("cuda:0", GIB, (GIB, 24 * GIB), []) is None
    holders = [Holder(4711, "python3", 20 * GIB), Holder(12, "Xorg", 300 * MIB)]
    refusal = refuse_memory("cuda:0", 10 * GIB, (3 * GIB, 24 * GIB), holders)
    assert refusal is not None
    assert refusal.message == (
        "cuda:0 has 3.00 GiB of 24.00 GiB free and the plan needs 10.00 GiB; "
        "python3 (pid 4711) 20.00 GiB, Xorg (pid 12) 300.0 MiB hold the rest."
    )
    hidden = refuse_memory("cuda:0", 10 * GIB, (3 * GIB, 24 * GIB), [])
    assert hidden is not None
    assert hidden.message.endswith("who holds the rest is not known.")


def test_the_end_of_memory_is_told_with_planned_allocated_and_free_bytes() -> None:
    alone = GpuMemory(GIB // 4, 12 * GIB, ())
    told = out_of_memory("loading weights", "cuda:0", 9 * GIB, 8 * GIB, alone)
    assert told.message == (
        "cuda:0 ran out of memory while loading weights: 8.00 GiB of 9.00 GiB planned were "
        "allocated, and 256.0 MiB of 12.00 GiB are free; no other process is known to hold any."
    )
    shared = replace(alone, holders=(Holder(4711, "python3", 3 * GIB),))
    told = out_of_memory("loading weights", "cuda:0", 9 * GIB, 8 * GIB, shared)
    assert told.message.endswith("are free; python3 (pid 4711) 3.00 GiB hold memory, too.")


def test_the_drivers_reports_are_read() -> None:
    gpus = (
        "0, NVIDIA H200, 9.0, 580.65.06, GPU-a\n1, Tesla T4, 7.5, 580.65.06, GPU-b\n"
        "No devices were found\n"
    )
    assert read_gpus(gpus)[1] == GpuFacts(
        name="cuda:1", product="Tesla T4", sm=75, driver="580.65.06"
    )
    processes = (
        "GPU-b, 7, /usr/bin/python3, 512\nGPU-a, 9, other, 100\nGPU-b, 8, big, 1024\n"
        "GPU-b, 3, hidden, [N/A]\n"
    )
    assert read_holders("cuda:1", gpus, processes) == [
        Holder(8, "big", 1024 * MIB),
        Holder(7, "python3", 512 * MIB),
    ]
    assert read_holders("cuda:1", "", "") == []


@pytest.mark.parametrize(
    ("visible", "products"),
    [
        (None, ["H200", "T4", "L4"]),
        ("1", ["T4"]),
        ("2, 0", ["L4", "H200"]),
        ("GPU-b", ["T4"]),
        ("GPU-bb9,0", ["T4", "H200"]),
        ("0,7,1", ["H200"]),  # CUDA stops at what it does not know
        ("", []),
        ("-1", []),
        ("MIG-1234", ["H200", "T4", "L4"]),
    ],
)
def test_gpus_are_numbered_as_torch_numbers_those_that_are_visible(
    visible: str | None, products: list[str]
) -> None:
    report = "GPU-aa1, 0, H200, 9.0, 1, x\nGPU-bb9, 1, T4, 7.5, 1, y\nGPU-cc2, 2, L4, 8.9, 1, z\n"
    found = read_gpus(visible_rows(report, visible))
    assert [gpu.product for gpu in found] == products
    assert [gpu.name for gpu in found] == [f"cuda:{index}" for index in range(len(products))]


def test_a_report_without_gpus_has_no_rows() -> None:
    assert visible_rows("No devices were found\n", None) == ""


def test_what_cuda_hides_is_no_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(query: str) -> str:
        asked.append(query)
        rows = ("GPU-a, 0, Hidden, {more}", "GPU-b, 1, Shown, {more}")
        more = "24576, 24000, 8.6" if "memory" in query else "8.6, 580.1, GPU"
        return "\n".join(row.format(more=more) for row in rows)

    monkeypatch.setattr("headroom.memory.drivers.ask_driver", answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (facts,), (device,) = gpu_facts(), detect_gpus()
    assert (facts.name, facts.product) == (device.name, device.product) == ("cuda:0", "Shown")
    assert all(query.startswith("--query-gpu=uuid,index,name,") for query in asked)
