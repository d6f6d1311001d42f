"""A device's memory: how torch may allocate it, and whether that kept to the plan."""

import logging
from collections.abc import Mapping

import torch

from headroom.machine.devices import torch_name
from headroom.plan.layout import DevicePlan
from headroom.plan.plan import Plan
from headroom.units import gib, parse_size

log = logging.getLogger(__name__)


def open_device_memory(device: str) -> None:
    """Let torch pack a GPU's allocations closely; call this before the first allocation.

    By default torch rounds each large allocation up to 2 MiB, which adds some hundred MiB for the
    weights of a model that no plan counts. If the user chose another allocator, nothing is changed.
    """
    if device.startswith("cuda") and torch.cuda.memory.get_allocator_backend() == "native":
        # torch 2.11 and later have another function for this, and warn if the older one is used.
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (newer or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def held_already(device: str) -> int:
    """Return the bytes that torch holds of a GPU for other models, and measure its peak anew."""
    torch_device = torch_name(device)
    if not torch_device.startswith("cuda"):
        return 0
    held = torch.cuda.memory_reserved(torch_device)  # 0 before torch has used a GPU
    if held:
        torch.cuda.reset_peak_memory_stats(torch_device)
    return held


def limit_memory(
    plan: Plan,
    device_memory: str | None,
    only: DevicePlan | None = None,  # None: all devices of the plan are this process's
) -> None:
    """Let torch refuse allocations beyond the memory of each GPU that `--device-memory` allows.

    The driver's own memory counts, too: the plan's `runtime` line is subtracted.
    """
    for device in plan.devices if only is None else (only,):
        if device_memory is None or device.kind == "cpu":
            continue
        most = parse_size(device_memory, "device_memory") - _line(device, "runtime")
        torch_device = torch_name(device.name)
        total = torch.cuda.get_device_properties(torch_device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), torch_device)
        log.info("memory: torch may take %s of %s", gib(most), device.name)


def check_memory(
    plan: Plan,
    device: DevicePlan,
    allocated: Mapping[str, int],
    held_before: int = 0,  # bytes that torch held already, by `held_already`
) -> None:
    """Log what a device's stage was planned to allocate and what it did; warn of lines above plan.

    Torch is not stopped at the plan: if a formula is wrong by a little, the memory is usually
    there, and a warning with numbers is of more use than a failed step.
    """
    planned = device.allocated
    on_device = sum(size for line, size in allocated.items() if line in planned)
    log.info("memory: planned %s, allocated %s", gib(sum(planned.values())), gib(on_device))
    on_host = {line.name: line.bytes for line in plan.host.lines}
    for line, size in allocated.items():
        most = planned.get(line, 0) + on_host.get(line, 0)
        if size > most:
            log.warning("memory: %s takes %d bytes, planned were %d", line, size, most)
    torch_device = torch_name(device.name)
    if torch_device.startswith("cuda"):
        most = sum(planned.values()) + _line(device, "graphs")
        peak = torch.cuda.max_memory_reserved(torch_device) - held_before
        warn_above(device.name, peak, most)


def warn_above(device: str, peak: int, planned: int) -> None:
    """Log the most memory that torch has held on a device; warn if it is above the plan."""
    if peak > planned:
        log.warning("memory: %s has held %s, planned were %s", device, gib(peak), gib(planned))
    else:
        log.info("memory: %s has held %s of %s planned", device, gib(peak), gib(planned))


def _line(device: DevicePlan, name: str) -> int:
    return sum(line.bytes for line in device.lines if line.name == name)
