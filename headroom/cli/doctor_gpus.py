"""The GPUs of `headroom doctor`: what each one is, and which kernels it runs or why not."""

from typing import Any

from headroom.memory.devices import DeviceSpec
from headroom.memory.drivers import gpu_facts
from headroom.memory.gpus import detect_gpus
from headroom.memory.precision import device_precision
from headroom.memory.readiness import GpuFacts, TorchFacts, refuse_gpu
from headroom.units import gib

Section = dict[str, Any]


def gpus(*, compile_all: bool) -> list[Section]:
    """Return every GPU of this machine with what it can run; compile a kernel, or all families'."""
    found = detect_gpus()
    if not found:
        return []
    from headroom.layers.gpu import read_gpu, read_torch, try_kernels  # torch takes seconds

    torch, listed = read_torch(), {gpu.name: gpu for gpu in gpu_facts()}
    rows = []
    for device in found:
        facts = listed.get(device.name, GpuFacts(name=device.name, sm=device.sm))
        if device.kind == "cuda":
            facts = read_gpu(facts, torch)
        row = gpu_row(device, facts, torch)
        if compile_all and not row["refused"]:
            row["kernels"] = try_kernels(int(device.name.partition(":")[2]))
        rows.append(row)
    return rows


def gpu_row(device: DeviceSpec, facts: GpuFacts, torch: TorchFacts) -> Section:
    """Return one GPU, why it is refused where it is, and which kernel families it could run."""
    precision = device_precision(device)
    if device.kind == "cuda":
        refusal = refuse_gpu(torch, facts)
        refused = "" if refusal is None else refusal.message
    else:
        refused = "The kernels for AMD GPUs are not wired to the engine."
    return {
        "name": device.name,
        "product": facts.product,
        "sm": facts.sm,
        "gfx": device.gfx,
        "total_bytes": device.total_bytes,
        "available_bytes": device.available_bytes,
        "driver": facts.driver,
        "torch_cuda": torch.cuda,
        "compiler": "" if refused else "NVRTC compiles",
        "activation_type": precision.activation,
        "refused": refused,
        "kernels": {} if refused else families(facts.sm),
        "slower": "" if refused else _slower(facts.sm),
    }


def families(sm: int) -> dict[str, str]:
    """Return each kernel family with why a GPU does not run it or is not known to, else ""."""
    from headroom.kernels.cuda.probe import expect_kernels

    return expect_kernels(sm)


def _slower(sm: int) -> str:
    from headroom.kernels.cuda.probe import slower_on

    return slower_on(sm)


def gpu_texts(rows: list[Section]) -> dict[str, str]:
    """Return the GPUs as people read them."""
    told = {row["name"]: _gpu_text(row) for row in rows}
    for row in rows:
        told |= _kernel_texts(row["name"], row["kernels"])
        if row["slower"]:
            told[f"{row['name']} sm_{row['sm']}"] = row["slower"]
    return told or {"none": "no driver lists one; layers run on the CPU"}


def _kernel_texts(name: str, kernels: dict[str, str]) -> dict[str, str]:
    """Return how many families run, how many were not tried, and why others do not."""
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
    parts.append(f"computes in {row['activation_type']}")
    parts.append(f"not usable: {row['refused']}" if row["refused"] else row["compiler"])
    return ", ".join(parts)
