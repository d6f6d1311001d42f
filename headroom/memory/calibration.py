"""Calibration: speeds and overheads that were measured, with where and when."""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from headroom.errors import FormatError
from headroom.memory.devices import DeviceSpec
from headroom.memory.files import replace_text
from headroom.units import MIB


@dataclass(frozen=True, slots=True)
class Overhead:
    """Memory that a runtime takes beside our own allocations."""

    bytes: int
    source: str  # where the number is from


# Resident memory of a process that imported torch and ran a product and an attention: 237 MiB.
CPU_RUNTIME = Overhead(
    256 * MIB, "Python, torch and its threads; 237 MiB measured 2026-11 with torch 2.13 on x86-64"
)
# What the driver holds of an idle GPU (618 MiB there) is not in: plans count it as others'.
GPU_RUNTIME = Overhead(
    256 * MIB, "driver context and kernels; 173 to 211 MiB measured 2026-11 on an H200"
)
GPU_GRAPHS = Overhead(
    64 * MIB, "pools of captured graphs; up to 51 MiB measured 2026-11 on an H200"
)
# Beside the lines of a tiny model in float32, of which torch held 187 MiB more.
GPU_EAGER = Overhead(
    192 * MIB, "torch and cuBLAS without fused layers; 187 MiB measured 2026-11 on an H200"
)


@dataclass(frozen=True, slots=True)
class Speeds:
    """What one device of this machine was measured to reach."""

    bandwidth: float  # bytes/s of its own memory
    link: float  # bytes/s to host memory
    flops: float  # operations per second at its compute type
    date: str  # of the measurement, as 2026-11-15
    link_read: float = 0.0  # bytes/s of a GPU's kernels that read host memory; 0: not measured
    handover_s: float = 0.0  # a GPU's request of the CPU inside a step, and its answer; 0: not
    experts: float = 0.0  # bytes/s of a CPU's expert kernels on a GPU's layout; 0: not measured


def speeds_path(home: Path) -> Path:
    """Return where this machine's speeds are kept; a home may be shared by several machines."""
    machine = re.sub(r"[^A-Za-z0-9_.-]+", "-", platform.node()) or "machine"
    return home / "calibration" / f"{machine}.json"


def load_speeds(path: Path) -> dict[str, Speeds]:
    """Return the measured speeds by device name; empty where nothing was measured yet."""
    try:
        table = json.loads(path.read_text())
        speeds = {name: Speeds(**row) for name, row in table["devices"].items()}
        if any(min(row.bandwidth, row.flops) <= 0 or _least(row) < 0 for row in speeds.values()):
            raise ValueError("a speed is not positive")
        return speeds
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{path} is not a calibration file: {error}.", hint="Delete it and measure again."
        ) from error


def _least(row: Speeds) -> float:
    return min(row.link, row.link_read, row.handover_s, row.experts)


def save_speeds(path: Path, speeds: Mapping[str, Speeds]) -> None:
    """Keep measured speeds, in one step, so that a reader never sees half a file."""
    table = {"version": 1, "devices": {name: asdict(row) for name, row in speeds.items()}}
    replace_text(path, json.dumps(table, indent=1, sort_keys=True) + "\n")


def with_speeds(devices: Sequence[DeviceSpec], speeds: Mapping[str, Speeds]) -> list[DeviceSpec]:
    """Return the devices with their measured speeds in place of the listed ones."""
    measured = []
    for device in devices:
        found = speeds.get("cpu" if device.kind == "cpu" else device.name)
        if found is not None:
            device = replace(
                device,
                bandwidth=found.bandwidth,
                link=found.link,
                flops=found.flops,
                link_read=found.link_read,
                handover_s=found.handover_s,
                experts=found.experts,
                measured=True,
            )
        measured.append(device)
    return measured
