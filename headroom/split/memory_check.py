"""Memory of a device against its plan: how torch is told to take it, and what was taken."""

import logging
from collections.abc import Mapping

import torch

from headroom.machine.devices import torch_name
from headroom.plan.plan import Plan
from headroom.units import gib, parse_size

log = logging.getLogger(__name__)


def open_device_memory(device: str) -> None:
    """Let torch pack a GPU's allocations closely; to be called before the first of them.

    By default each large one is rounded up to 2 MiB, which for the weights of a model comes to
    some hundred MiB that no plan counts. Another allocator, which a user may choose, is left alone.
    """
    if device.startswith("cuda") and torch.cuda.memory.get_allocator_backend() == "native":
        # torch 2.11 and later have another name for it, and warn of the older one.
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (newer or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def limit_memory(plan: Plan, device_memory: str | None) -> None:
    """Let torch refuse what would take more of a GPU than `--device-memory` says.

    What the driver takes beside torch counts, too: as much as the plan has for it.
    """
    device = plan.devices[0]
    if device_memory is None or device.kind == "cpu":
        return
    most = parse_size(device_memory, "device_memory") - _line(plan, "runtime")
    place = torch_name(device.name)
    total = torch.cuda.get_device_properties(place).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), place)
    log.info("memory: torch may take %s of %s", gib(most), device.name)


def check_memory(plan: Plan, allocated: Mapping[str, int]) -> None:
    """Say what was planned and what was allocated, and warn of every line that is above its plan.

    There is no limit that stops torch at the plan: where a formula is wrong by a little the
    memory is mostly there, and a warning with numbers is of more use than a failed step.
    """
    device = plan.devices[0]
    planned = device.allocated
    here = sum(size for line, size in allocated.items() if line in planned)
    log.info("memory: planned %s, allocated %s", gib(sum(planned.values())), gib(here))
    on_host = {line.name: line.bytes for line in plan.host.lines}
    for line, size in allocated.items():
        most = planned.get(line, on_host.get(line, 0))
        if size > most:
            log.warning("memory: %s takes %d bytes, planned were %d", line, size, most)
    place = torch_name(device.name)
    if place.startswith("cuda"):
        most = sum(planned.values()) + _line(plan, "graphs")
        warn_above(device.name, torch.cuda.max_memory_reserved(place), most)


def warn_above(device: str, peak: int, planned: int) -> None:
    """Say how much of its planned memory a device has held at most."""
    if peak > planned:
        log.warning("memory: %s has held %s, planned were %s", device, gib(peak), gib(planned))
    else:
        log.info("memory: %s has held %s of %s planned", device, gib(peak), gib(planned))


def _line(plan: Plan, name: str) -> int:
    return sum(line.bytes for line in plan.devices[0].lines if line.name == name)
