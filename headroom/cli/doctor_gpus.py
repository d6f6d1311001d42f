"""The GPUs of `headroom doctor`: what each one is, which kernels it runs, and why not others."""

from collections.abc import Callable
from functools import partial
from typing import Any

from headroom.machine.devices import DeviceSpec
from headroom.machine.drivers import gpu_facts, why_unseen
from headroom.machine.gpus import detect_gpus
from headroom.machine.precision import device_precision
from headroom.machine.readiness import GpuFacts, TorchFacts, refuse_gpu
from headroom.units import counted, gib

Section = dict[str, Any]  # a part of the report, with the keys of its JSON
NO_AMD = "which have not run on an AMD GPU yet"


def gpus(*, try_all: bool, told: Callable[[str], None]) -> list[Section]:
    """Return every GPU of this machine, and which kernels it runs.

    A Triton kernel is run on each GPU, and with `try_all` CUDA kernels of every family. `told` is
    called with a line about what is being tried.
    """
    found = detect_gpus()
    if not found:
        return []
    from headroom.kernels.cuda.probe import try_kernels
    from headroom.kernels.triton.probe import try_triton  # torch takes seconds
    from headroom.machine.torch_gpus import read_gpu, read_torch

    torch, listed = read_torch(), {gpu.name: gpu for gpu in gpu_facts()}
    rows = []
    for device in found:
        facts = listed.get(device.name, _facts(device))
        row = gpu_row(device, read_gpu(facts, torch), torch)
        if not row["refused"]:
            index = int(device.name.partition(":")[2])
            row["triton"] = try_triton(index)
            if try_all and device.kind == "cuda":
                row["kernels"] = try_kernels(index, partial(_told, told, device.name))
        rows.append(row)
    return rows


def _told(told: Callable[[str], None], device: str, family: str) -> None:
    told(f"{device}: trying {family}")


def _facts(device: DeviceSpec) -> GpuFacts:
    return GpuFacts(name=device.name, sm=device.sm, gfx=device.gfx, total_bytes=device.total_bytes)


def unseen() -> str:
    """Return why no GPU is found; "" if that is not known."""
    from headroom.machine.torch_gpus import read_torch

    (why, hint), count = why_unseen("cuda:0"), read_torch().count
    return f"torch sees {counted(count, 'GPU')}, but {why} {hint}" if count and why else why


def gpu_row(device: DeviceSpec, facts: GpuFacts, torch: TorchFacts) -> Section:
    """Return one GPU, why it is refused (if it is), and which kernel families it could run."""
    precision, refusal = device_precision(device), refuse_gpu(torch, facts)
    refused = "" if refusal is None else f"{refusal.message} {refusal.hint}"
    amd = device.kind == "hip"
    compiler = f"uses Triton kernels, {NO_AMD}" if amd else "NVRTC compiles"
    return {
        "name": device.name,
        "product": facts.product,
        "sm": facts.sm,
        "gfx": device.gfx,
        "total_bytes": device.total_bytes,
        "available_bytes": device.available_bytes,
        "driver": facts.driver,
        "torch_cuda": torch.cuda,
        "torch_hip": torch.hip,
        "compiler": "" if refused else compiler,
        "triton": None,  # why its kernels do not run; None: not tried
        "activation_type": precision.type,
        "refused": refused,
        "kernels": {} if refused or amd else families(facts.sm),
        "slower": "" if refused or amd else _slower(facts.sm),
    }


def families(sm: int) -> dict[str, str]:
    """Return for each kernel family why a GPU does not run it; NOT_TRIED; or "" if it runs."""
    from headroom.kernels.cuda.probe import expect_kernels

    return expect_kernels(sm)


def _slower(sm: int) -> str:
    from headroom.kernels.cuda.probe import slower_on

    return slower_on(sm)


def gpu_texts(rows: list[Section], why_none: str = "") -> dict[str, str]:
    """Return rows of text about the GPUs, or why there are none."""
    told = {row["name"]: _gpu_text(row) for row in rows}
    for row in rows:
        told |= _kernel_texts(row["name"], row["kernels"])
        if row["triton"] is not None:
            told[f"{row['name']} triton"] = row["triton"] or "a kernel runs"
        if row["slower"]:
            told[f"{row['name']} sm_{row['sm']}"] = row["slower"]
    because = f": {why_none.rstrip('.')}" if why_none else ""
    return told or {"none": f"no driver lists one{because}; layers run on the CPU"}


def backend_text(backend: str, operations: list[str], rows: list[Section]) -> str:
    """Return the operations of a backend, or why none of them runs here."""
    if backend in ("cuda", "triton"):
        mine = [row for row in rows if backend == "triton" or row["name"].startswith("cuda")]
        usable = [row for row in mine if not row["refused"]]
        if not usable:
            return "no GPU that runs them" if mine else "no GPU"
        if backend == "triton" and all(row["triton"] for row in usable):
            return f"not here: {usable[0]['triton']}"
        if backend == "cuda":  # most CUDA kernels are parts of fused layers, not single operations
            return f"{', '.join(operations)}; and the families of fused layers, under GPUs"
    return ", ".join(operations) or "none in this version"


def _kernel_texts(name: str, kernels: dict[str, str]) -> dict[str, str]:
    """Return rows of text: how many families run or were not tried, and why others do not run."""
    from headroom.kernels.cuda.probe import NOT_TRIED

    if not kernels:
        return {}
    untried = sum(why == NOT_TRIED for why in kernels.values())
    lacking = {family: why for family, why in kernels.items() if why not in ("", NOT_TRIED)}
    runs = len(kernels) - untried - len(lacking)
    text = f"{runs} of {len(kernels)} families run"
    if untried:
        text += f", {untried} {NOT_TRIED}"
    return {f"{name} kernels": text} | {f"{name} {x}": why for x, why in lacking.items()}


def _gpu_text(row: Section) -> str:
    parts = [row["product"] or row["gfx"] or "unknown"]
    if row["sm"]:
        parts.append(f"sm_{row['sm']}")
    parts.append(f"{gib(row['available_bytes'])} of {gib(row['total_bytes'])} free")
    if row["driver"]:
        parts.append(f"driver {row['driver']}, torch for CUDA {row['torch_cuda'] or 'none'}")
    if row["name"].startswith("hip"):
        parts.append(f"torch for ROCm {row['torch_hip'] or 'none'}")
    parts.append(f"computes in {row['activation_type']}")
    parts.append(f"not usable: {row['refused']}" if row["refused"] else row["compiler"])
    return ", ".join(parts)
