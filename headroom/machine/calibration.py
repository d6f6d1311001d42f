"""Calibration: measured speeds and overheads, each with its source and date."""

import json
import logging
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from headroom.errors import FormatError
from headroom.formats.atomic import replace_text
from headroom.machine.devices import DeviceSpec
from headroom.units import GIB, MIB, gib

log = logging.getLogger(__name__)

CALIBRATION_VERSION = 1


@dataclass(frozen=True, slots=True)
class Overhead:
    """Memory that a runtime takes in addition to our own allocations."""

    bytes: int
    source: str  # where the number is from


# Resident memory of a process that imported torch and ran a product and an attention: 237 MiB.
CPU_RUNTIME = Overhead(
    256 * MIB, "Python, torch and its threads; 237 MiB measured 2026-11 with torch 2.13 on x86-64"
)
GPU_GRAPHS = Overhead(
    64 * MIB, "pools of captured graphs (up to 51 MiB measured 2026-11 on an H200)"
)
NO_GRAPHS = Overhead(0, "captured graphs (AMD's GPUs run steps without capturing them)")
# Torch held 187 MiB more than the plan's lines for a tiny model in float32.
GPU_EAGER = Overhead(
    192 * MIB, "torch and cuBLAS without fused layers (187 MiB measured 2026-11 on an H200)"
)


# In addition to what torch holds: 526 MiB when CUDA starts, and 238 to 252 MiB for kernels,
# libraries and graphs. Only an H200 was measured; that a context is smaller on smaller cards is an
# assumption.
_LARGEST_CONTEXT, _CONTEXT_SHARE = 528 * MIB, 64
# Memory of the card on which that was measured.
_MEASURED_SIZES = range(130 * GIB, 145 * GIB)


def gpu_runtime(total_bytes: int, system: str = "CUDA") -> Overhead:
    """Return the memory that the driver of a GPU of this size takes for one process."""
    context = min(_LARGEST_CONTEXT, total_bytes // _CONTEXT_SHARE)
    measured = system == "CUDA" and total_bytes in _MEASURED_SIZES
    how = "up to" if measured else "an estimate from"
    return Overhead(
        256 * MIB + context,
        f"{system}'s context and kernels; {how} 778 MiB measured 2026-11 on an H200",
    )


@dataclass(frozen=True, slots=True)
class Speeds:
    """The measured speeds of one device of this machine."""

    bandwidth: float  # bytes/s of its own memory
    link: float  # bytes/s to host memory
    flops: float  # operations per second at its compute type
    date: str  # of the measurement, as 2026-11-15
    link_read: float = 0.0  # bytes/s of a GPU's kernels that read host memory; 0: not measured
    handover_s: float = 0.0  # seconds of a GPU's request to the CPU and its answer; 0: not measured
    experts: float = 0.0  # bytes/s of a CPU's expert kernels on a GPU's layout; 0: not measured
    expert_flops: float = 0.0  # operations/s of those kernels with several rows per expert; 0: not
    # The measured GPU, as its driver names it: a number such as cuda:0 may mean another card later.
    product: str = ""
    total_bytes: int = 0

    def unlike(self, device: DeviceSpec) -> str:
        """Return why these are not the speeds of a device; "" if they are."""
        total = device.card_bytes or device.total_bytes
        if device.kind == "cpu" or (self.product, self.total_bytes) == (device.product, total):
            return ""
        measured = _card(self.product, self.total_bytes)
        return f"they are of {measured}, and it is {_card(device.product, total)}"


def _card(product: str, total_bytes: int) -> str:
    size = f" with {gib(total_bytes)}" if total_bytes else ""
    return f"{product or 'a GPU without a name'}{size}"


_POSITIVE = ("bandwidth", "flops")  # other speeds may be 0, which means not measured
_TEXTS = ("date", "product")


def speeds_path(home: Path) -> Path:
    """Return where this machine's speeds are kept; a home may be shared by several machines."""
    machine = re.sub(r"[^A-Za-z0-9_.-]+", "-", platform.node()) or "machine"
    return home / "calibration" / f"{machine}.json"


def load_speeds(path: Path) -> dict[str, Speeds]:
    """Return the measured speeds by device name; empty where nothing was measured yet.

    Speeds in a broken file or in one of another version are not used, and a warning says so.
    """
    try:
        return read_speeds(path)
    except FormatError as error:
        log.warning("calibration: speeds are not used: %s %s", error.message, error.hint)
        return {}


def read_speeds(path: Path) -> dict[str, Speeds]:
    """Return the measured speeds by device name, or refuse a broken file."""
    try:
        version, speeds = _parse(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{path} is not a calibration file: {error}.",
            hint="Run headroom calibrate, which writes it anew.",
        ) from error
    if version != CALIBRATION_VERSION:
        raise FormatError(
            f"{path} has version {version} and not {CALIBRATION_VERSION}.",
            hint="Run headroom calibrate, which writes it anew.",
        )
    return speeds


def _parse(text: str) -> tuple[int, dict[str, Speeds]]:
    """Return the version of a file, and the speeds if it is this one."""
    table = json.loads(text)
    if not isinstance(table, dict) or type(table.get("version")) is not int:
        raise ValueError("it has no version")
    if table["version"] != CALIBRATION_VERSION:
        return table["version"], {}
    devices = table.get("devices")
    if not isinstance(devices, dict):
        raise ValueError("it lists no devices")
    return CALIBRATION_VERSION, {name: _read_row(name, row) for name, row in devices.items()}


def _read_row(name: str, row: object) -> Speeds:
    """Return one device's speeds, or raise a ValueError that says what is wrong with them."""
    if not isinstance(row, dict):
        raise ValueError(f"{name} has no speeds")
    known = [setting.name for setting in fields(Speeds)]
    if unknown := sorted(row.keys() - set(known)):
        raise ValueError(f"{name} has {unknown[0]!r}, which is not known")
    for key in known:
        value = row.get(key, "" if key == "product" else 0.0)
        if key in _TEXTS:
            if not isinstance(value, str):
                raise ValueError(f"{name} has no {key}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key} of {name} is not a number")
        elif not math.isfinite(value) or value < 0 or (key in _POSITIVE and value == 0):
            raise ValueError(f"{key} of {name} is {value}; it must be positive")
    filled: dict[str, Any] = {"link": 0.0, **row}
    return Speeds(**filled)


def save_speeds(path: Path, speeds: Mapping[str, Speeds]) -> None:
    """Write measured speeds in one step, so that a reader never sees half a file."""
    table = {
        "version": CALIBRATION_VERSION,
        "devices": {name: asdict(row) for name, row in speeds.items()},
    }
    replace_text(path, json.dumps(table, indent=1, sort_keys=True) + "\n")


def with_speeds(devices: Sequence[DeviceSpec], speeds: Mapping[str, Speeds]) -> list[DeviceSpec]:
    """Return the devices with their measured speeds in place of the listed ones.

    Speeds of another GPU that had the same number are not used, and a warning says so.
    """
    measured = []
    for device in devices:
        found = speeds.get("cpu" if device.kind == "cpu" else device.name)
        if found is not None and (why := found.unlike(device)):
            log.warning(
                "calibration: speeds of %s are not used, since %s: run headroom calibrate",
                device.name,
                why,
            )
        elif found is not None:
            device = replace(
                device,
                bandwidth=found.bandwidth,
                link=found.link or device.link,  # 0: not measured
                flops=found.flops,
                link_read=found.link_read,
                handover_s=found.handover_s,
                experts=found.experts,
                expert_flops=found.expert_flops,
                measured=True,
            )
        measured.append(device)
    return measured
