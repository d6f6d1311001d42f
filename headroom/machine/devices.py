"""DeviceSpec: what a device is to the planner; detect_cpu(): what this machine's CPU has."""

import math
import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from headroom.machine.assumed import ASSUMED_CORE_FLOPS, ASSUMED_CPU_BANDWIDTH
from headroom.machine.cgroups import GroupLimits, read_limits
from headroom.machine.cores import physical_cores
from headroom.units import KIB

DeviceKind = Literal["cpu", "cuda", "hip", "metal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device that holds weights and runs layers, or host memory behind other devices."""

    name: str  # "cpu", "cuda:0" or a catalogue name
    kind: DeviceKind
    total_bytes: int
    available_bytes: int  # total, less what others hold
    driver_bytes: int = 0  # an estimate of what an idle driver holds, part of the taken bytes
    product: str = ""  # the driver's name for a GPU of this machine
    card_bytes: int = 0  # memory of the whole card, if `total_bytes` is limited by an option
    bandwidth: float = ASSUMED_CPU_BANDWIDTH  # bytes/s of its own memory
    link: float = 0.0  # bytes/s between it and host memory; 0 where it is host memory
    flops: float = 0.0  # multiply-adds x2 per second at its compute type; 0 where unknown
    sm: int = 0  # CUDA compute capability, 10 x major + minor
    gfx: str = ""  # HIP architecture name
    cores: int = 0  # CPU cores that this process may use
    native: bool = False  # a CPU whose C++ kernels were built: they read packed weights
    unified: bool = False  # shares its memory with the host
    worker: bool = False  # runs layers in a process of its own, with `cores` threads
    runs_layers: bool = True  # False: only lends its memory to other devices
    # Speeds for cold experts; 0: not measured.
    link_read: float = 0.0  # bytes/s of a GPU's kernels that read host memory
    handover_s: float = 0.0  # seconds of a GPU's request to the CPU inside a step, and its answer
    experts: float = 0.0  # bytes/s of a CPU's expert kernels
    expert_flops: float = 0.0  # operations/s of those kernels with several rows per expert
    measured: bool = False  # whether its speeds were measured or are only listed
    pinnable_bytes: int | None = None  # host memory that may be pinned; None: no limit is known

    def with_threads(self, threads: int) -> "DeviceSpec":
        """Return a CPU of which so many threads compute; all of them read its memory as fast."""
        share = min(1.0, threads / self.cores) if self.cores else 1.0
        return replace(
            self,
            flops=share * self.flops,
            experts=share * self.experts,
            expert_flops=share * self.expert_flops,
        )

    @property
    def holds_all(self) -> bool:
        """Whether the device has no host memory behind it that could hold cold experts."""
        return self.kind == "cpu" or self.unified


def physical_name(name: str) -> str:
    """Return a device's name without the number that tells its stages apart, as in `cuda:0#2`."""
    return name.partition("#")[0]


def torch_name(name: str) -> str:
    """Return what torch calls a device of this machine: AMD's GPUs are cuda to it, too."""
    name = physical_name(name)
    return name.replace("hip", "cuda", 1) if name.startswith("hip") else name


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Host memory as this process may use it."""

    total_bytes: int
    available_bytes: int  # of these, what neither this process nor others hold


def host_room(proc: Path = Path("/proc"), limits: GroupLimits | None = None) -> HostRoom:
    """Return the host memory of this machine or of the control groups, whichever is less."""
    limits = limits or read_limits(proc)
    memory = _read_meminfo(proc / "meminfo")
    total = memory.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = memory.get("MemAvailable", total)
    if limits.memory_bytes is not None and limits.available_bytes is not None:
        total = min(total, limits.memory_bytes)
        available = min(available, limits.available_bytes)
    return HostRoom(total, min(available, total))


def detect_cpu(proc: Path = Path("/proc"), limits: GroupLimits | None = None) -> DeviceSpec:
    """Return the CPU with the memory and the cores that this process may use."""
    limits = limits or read_limits(proc)
    cores, room = usable_cores(limits), host_room(proc, limits)
    return DeviceSpec(
        name="cpu",
        kind="cpu",
        total_bytes=room.total_bytes,
        available_bytes=room.available_bytes,
        flops=cores * ASSUMED_CORE_FLOPS,
        cores=cores,
        native=find_spec("headroom.kernels.native._native") is not None,
        pinnable_bytes=pinnable_bytes(limits),
    )


def pinnable_bytes(limits: GroupLimits) -> int | None:
    """Return how much memory may be pinned for a GPU; None where no group limits it.

    `ulimit -l` is not such a limit: a GPU's driver locks pages itself and does not ask for it.
    """
    return limits.memory_bytes


def usable_cores(limits: GroupLimits) -> int:
    """Return the physical cores by affinity and by the groups' share of time, at least one."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(physical_cores(os.sched_getaffinity(0)))
    else:
        cores = os.cpu_count() or 1
    share = math.inf if limits.cores is None else math.ceil(limits.cores)
    return max(1, int(min(cores, share)))


def _read_meminfo(path: Path) -> dict[str, int]:
    """Return /proc/meminfo in bytes; empty where there is none."""
    try:
        rows = (row.split() for row in path.read_text().splitlines())
        return {row[0].rstrip(":"): int(row[1]) * KIB for row in rows if len(row) > 1}
    except (OSError, ValueError):
        return {}
