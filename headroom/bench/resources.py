"""Facts about a run's device: memory bandwidth, memory in use, names and versions."""

import platform
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headroom.kernels.native.measure import read_bandwidth
from headroom.kernels.native.module import MODULE
from headroom.llm import OpenedModel
from headroom.machine.devices import detect_cpu, physical_name, torch_name
from headroom.machine.measure import copy_bandwidth, measure_cpu, measure_link
from headroom.plan.plan import Plan
from headroom.units import counted

_STATUS, _CPUS = Path("/proc/self/status"), Path("/proc/cpuinfo")
_READS = 3  # measurements of the CPU's read bandwidth; the fastest counts


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The bandwidth of a device's memory, measured in this run."""

    bytes_per_s: float
    how: str  # how it was measured, in words


def measure_bandwidth(opened: OpenedModel) -> Bandwidth:
    """Return the memory bandwidth of the model's device, the limit of its decode speed."""
    if opened.on_gpu:
        device = torch.device(opened.torch_device)
        return Bandwidth(copy_bandwidth(device), "copies within the GPU, read and written")
    threads = opened.plan.settings.threads
    if MODULE is None:
        speeds = measure_cpu(detect_cpu())
        return Bandwidth(speeds.bandwidth, "products of one row in torch")
    speed = max(read_bandwidth() for _ in range(_READS)) * 1e9
    return Bandwidth(speed, f"reads of memory by {counted(threads, 'thread')}")


def cold_bandwidths(opened: OpenedModel) -> dict[str, float]:
    """Return the bytes per second of each path to cold experts; empty if no expert is cold.

    "gpu": kernels that read host memory, "stream": copies from it, "cpu": reads by all threads.
    """
    if opened.pipeline.store is None or not opened.on_gpu:
        return {}
    link = measure_link(torch.device(opened.torch_device))
    host = 1e9 * max(read_bandwidth() for _ in range(_READS)) if MODULE is not None else 0.0
    return {"gpu": link.read, "stream": link.copy, "cpu": host}


def start_counting(plan: Plan) -> None:
    """Reset torch's peak memory; to be called before a model is loaded."""
    for device in plan.devices:
        if device.kind != "cpu":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(torch_name(device.name))


def lift_limit(gpu: str) -> None:
    """Let the profiler take memory beyond `--device-memory`, which limits the model."""
    torch.cuda.set_per_process_memory_fraction(1.0, gpu)


def memory_use(opened: OpenedModel) -> dict[str, Any]:
    """Return the memory of the device that was used, and the bytes that were planned."""
    planned: Counter[str] = Counter()  # by the plan's line, of all stages on the device
    for stage in opened.plan.devices:
        if opened.in_workers or physical_name(stage.name) == physical_name(opened.device):
            planned.update(
                {line.name: line.bytes for line in stage.lines if line.name != "reserve"}
            )
    found: dict[str, Any] = {"lines": planned, "loaded": dict(opened.pipeline.allocated)}
    if opened.in_workers:
        memory = opened.pipeline.memory()
        found |= {
            "planned_bytes": sum(device.planned_bytes for device in memory),
            "peak_bytes": sum(device.used_bytes for device in memory),
            "peak_is": "what the workers have allocated",
        }
    elif opened.on_gpu:
        free, total = torch.cuda.mem_get_info(opened.torch_device)
        found |= {
            # Torch allocates all lines but "runtime", which is the driver's.
            "planned_bytes": sum(planned.values()) - planned.get("runtime", 0),
            "peak_bytes": torch.cuda.max_memory_allocated(opened.torch_device),
            "peak_is": "allocated by torch, loading included",
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(opened.torch_device),
            "device_used_bytes": total - free,
            "planned_with_runtime_bytes": sum(planned.values()),
        }
    else:
        found |= {
            "planned_bytes": sum(planned.values()),
            "peak_bytes": _status("RssAnon"),
            "peak_is": "memory of its own after the last figure; pages never written to are not in",
            "peak_resident_bytes": _status("VmHWM"),  # with the mapped pages of the model's file
        }
    found["share"] = found["peak_bytes"] / found["planned_bytes"]
    return found


def _status(name: str) -> int:
    """Return a size of this process in bytes; 0 if the system does not report it."""
    if not _STATUS.is_file():
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _cpu_name() -> str:
    text = _CPUS.read_text() if _CPUS.is_file() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or "a CPU"


def device_facts(opened: OpenedModel) -> dict[str, Any]:
    """Return the names of the device and the versions of its software."""
    facts: dict[str, Any] = {
        "name": opened.device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    if opened.on_gpu:
        facts["model"] = torch.cuda.get_device_name(opened.torch_device)
        facts["cuda"], facts["hip"] = torch.version.cuda, torch.version.hip
        major, minor = torch.cuda.get_device_capability(opened.torch_device)
        facts["capability"] = f"{major}.{minor}"
    else:
        cpu = detect_cpu()
        facts |= {"model": _cpu_name(), "cores": cpu.cores, "threads": opened.plan.settings.threads}
        facts["kernels"] = opened.plan.settings.kernels
    return facts
