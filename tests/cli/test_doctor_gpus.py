"""GPUs in `headroom doctor`: what people read, from made-up machines."""

from contextlib import nullcontext

import pytest
import torch

from headroom.cli import doctor_gpus
from headroom.cli.doctor_gpus import backend_text, families, gpu_row, gpu_texts
from headroom.errors import KernelError
from headroom.kernels.cuda import probe
from headroom.kernels.triton import probe as triton_probe
from headroom.machine.devices import DeviceSpec
from headroom.machine.readiness import GpuFacts, TorchFacts
from headroom.units import GIB

TORCH = TorchFacts(version="2.11.0+cu130", cuda="13.0", count=1, archs=("sm_75", "sm_90"))


def spec(kind: str, sm: int = 0, gfx: str = "") -> DeviceSpec:
    return DeviceSpec(
        name=f"{kind}:0", kind=kind, total_bytes=24 * GIB, available_bytes=20 * GIB, sm=sm, gfx=gfx
    )  # type: ignore[arg-type]


def test_a_gpu_is_reported_with_memory_driver_and_kernels() -> None:
    facts = GpuFacts(name="cuda:0", product="NVIDIA H200", sm=90, driver="580.65.06")
    told = gpu_texts([gpu_row(spec("cuda", 90), facts, TORCH)])
    assert told["cuda:0"] == (
        "NVIDIA H200, sm_90, 20.00 GiB of 24.00 GiB free, driver 580.65.06, torch for CUDA 13.0, "
        "computes in bf16, NVRTC compiles"
    )
    count = len(families(90))
    untried = f"{count - 1} not tried; see --kernels"
    assert told["cuda:0 kernels"] == f"1 of {count} families run, {untried}"
    assert set(told) == {"cuda:0", "cuda:0 kernels"}
    row = gpu_row(spec("cuda", 90), facts, TORCH)
    told_ops = "embed, matmul; and the families of fused layers, under GPUs"
    assert backend_text("cuda", ["embed", "matmul"], [row]) == told_ops


def test_what_an_older_gpu_computes_differently_is_reported() -> None:
    facts = GpuFacts(name="cuda:0", product="Tesla T4", sm=75, driver="580.65.06")
    told = gpu_texts([gpu_row(spec("cuda", 75), facts, TORCH)])
    count = len(families(75))
    untried = f"{count - 2} not tried; see --kernels"
    assert told["cuda:0 kernels"] == f"1 of {count} families run, {untried}"
    assert told["cuda:0 grouped products in bf16"] == "needs sm_80"
    assert told["cuda:0 sm_75"] == "products and attention compute in f16"


def test_each_family_is_run_or_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    run: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(
        probe, "compile_kernel", lambda source, kernel, defines: compiled.append(source)
    )
    monkeypatch.setattr(probe, "run_trial", lambda family, device: run.append(family))
    tried = probe.try_kernels(0, told.append)
    assert tried == dict.fromkeys(families(75), "") | {"grouped products in bf16": "needs sm_80"}
    assert told == list(tried)
    assert len(compiled) == len(tried) - 1
    assert compiled.count("grouped.cu") == 1
    older = {"grouped products in bf16", "experts of many rows in bf16"}
    assert set(run) == set(tried) - older
    compiled.clear()
    assert probe.try_compiler(0) == probe.Trial()
    assert compiled == ["small.cu"]
    assert [family for family, why in families(90).items() if not why] == ["norms"]


def test_a_family_that_compiles_and_does_not_launch_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(family: str, device: torch.device) -> None:
        if family == "sampler":
            raise KernelError("The CUDA kernel choose could not be started: error 1.")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(probe, "compile_kernel", lambda *given: None)
    monkeypatch.setattr(probe, "run_trial", fail)
    tried = probe.try_kernels(0)
    assert {family for family, why in tried.items() if why} == {"sampler"}
    assert tried["sampler"] == "The CUDA kernel choose could not be started: error 1."


def test_families_that_a_gpu_cannot_run_are_reported_with_the_reason() -> None:
    facts = GpuFacts(name="cuda:0", product="NVIDIA H200", sm=90)
    row = gpu_row(spec("cuda", 90), facts, TORCH)
    row["kernels"] = dict.fromkeys(row["kernels"], "")  # as if all were compiled
    count = len(row["kernels"])
    assert gpu_texts([row])["cuda:0 kernels"] == f"{count} of {count} families run"
    row["kernels"]["sampler"] = "sampler.cu does not compile for sm_90"
    told = gpu_texts([row])
    assert told["cuda:0 kernels"] == f"{count - 1} of {count} families run"
    assert told["cuda:0 sampler"] == "sampler.cu does not compile for sm_90"


def test_a_refused_gpu_says_why_and_lists_no_kernels() -> None:
    facts = GpuFacts(name="cuda:0", product="Tesla P40", sm=61)
    row = gpu_row(spec("cuda", 61), facts, TORCH)
    assert gpu_texts([row])["cuda:0"].endswith(
        "not usable: cuda:0 (Tesla P40) is sm_61; the kernels need sm_75, and bf16 sm_80. "
        "Choose --device cpu."
    )
    assert row["kernels"] == {}
    amd = gpu_row(spec("hip", gfx="gfx1100"), GpuFacts(name="hip:0"), TORCH)
    assert amd["refused"] == (
        "torch 2.11.0+cu130 is built for CUDA 13.0, without ROCm. "
        "Install a ROCm build of torch, or choose --device cpu."
    )
    assert backend_text("triton", ["matmul"], [amd]) == "no GPU that runs them"
    assert backend_text("cuda", ["matmul"], [amd]) == "no GPU"


def test_an_amd_gpu_is_reported_with_its_rocm_and_that_nobody_has_run_it() -> None:
    rocm = TorchFacts(version="2.11.0+rocm7.0", hip="7.0", count=1, archs=("gfx1100",))
    facts = GpuFacts(name="hip:0", product="AMD Radeon RX 7900 XTX", gfx="gfx1100")
    row = gpu_row(spec("hip", gfx="gfx1100"), facts, rocm)
    assert gpu_texts([row]) == {
        "hip:0": "AMD Radeon RX 7900 XTX, 20.00 GiB of 24.00 GiB free, torch for ROCm 7.0, "
        "computes in bf16, uses Triton kernels, which have not run on an AMD GPU yet"
    }
    row["triton"] = "no compiler"
    assert gpu_texts([row])["hip:0 triton"] == "no compiler"
    assert backend_text("triton", ["matmul"], [row]) == "not here: no compiler"
    row["triton"] = ""
    assert gpu_texts([row])["hip:0 triton"] == "a kernel runs"
    assert backend_text("triton", ["matmul", "rope"], [row]) == "matmul, rope"


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_machine_without_gpus_lists_none_of_their_operations(backend: str) -> None:
    assert backend_text(backend, ["matmul"], []) == "no GPU"
    assert backend_text("native", ["matmul"], []) == "matmul"


def test_a_triton_that_fails_or_is_wrong_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> torch.Tensor:
        raise ValueError("no ptxas\nand more")

    made = torch.full
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "full", lambda shape, value, device: made(shape, value))
    monkeypatch.setattr(triton_probe, "MISSING", "")
    for norm, told in (
        (lambda x, weight, eps: weight.expand(2, -1), ""),
        (lambda x, weight, eps: x, "its norm of equal values is wrong by 1"),
        (fail, "ValueError: no ptxas"),
    ):
        monkeypatch.setattr(triton_probe, "rms_norm", norm)
        assert triton_probe.try_triton(0) == told
    monkeypatch.setattr(triton_probe, "MISSING", "triton is not installed")
    assert triton_probe.try_triton(0) == "triton is not installed"


def test_a_machine_without_gpus_says_so() -> None:
    assert gpu_texts([]) == {"none": "no driver lists one; layers run on the CPU"}
    told = gpu_texts([], "there is no nvidia-smi.")
    assert told == {"none": "no driver lists one: there is no nvidia-smi; layers run on the CPU"}


def test_gpus_that_only_torch_sees_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_gpus, "why_unseen", lambda name: ("there is no smi.", "Get it."))
    assert doctor_gpus.unseen() == "there is no smi."
    monkeypatch.setattr("headroom.machine.torch_gpus.read_torch", lambda: TORCH)
    assert doctor_gpus.unseen() == "torch sees 1 GPU, but there is no smi. Get it."
