"""GPUs of this machine, seen through the drivers' own reports; torch is not needed."""

from pathlib import Path

from headroom.errors import OptionError
from headroom.memory.catalogue import CATALOGUE, find_device
from headroom.memory.devices import DeviceSpec
from headroom.memory.drivers import ask_gpus, read_sm
from headroom.units import MIB

_QUERY = "index,name,memory.total,memory.free,compute_cap"
# Speeds of a GPU that the catalogue does not know: a mid-range card behind PCIe 4.
UNKNOWN_BANDWIDTH, UNKNOWN_LINK, UNKNOWN_FLOPS = 400e9, 32e9, 30e12


def detect_gpus() -> list[DeviceSpec]:
    """Return the NVIDIA and AMD GPUs of this machine with what is free on them now."""
    return read_nvidia(ask_gpus(_QUERY)) + read_amd(Path("/sys/class/kfd/kfd/topology/nodes"))


def driver_memory(name: str) -> tuple[int, int]:
    """Return the bytes of a GPU that are free, and all of them, as its driver tells.

    Torch tells it only where CUDA starts, for which a full GPU has no room.
    """
    for device in detect_gpus():
        if device.name == name:
            return device.available_bytes, device.total_bytes
    return 0, 0


def find_gpu(name: str, found: list[DeviceSpec]) -> DeviceSpec:
    """Return the GPU of this machine called `cuda:0` or `hip:1`."""
    for device in found:
        if device.name == name:
            return device
    names = ", ".join([*(device.name for device in found), "cpu"])
    raise OptionError(
        f"--device {name} is not on this machine.",
        hint=f"It has {names}; other machines are named as rtx3060-12gb or 24GiB.",
        param="device",
    )


def read_nvidia(report: str) -> list[DeviceSpec]:
    """Return the GPUs of a driver's report, one row of comma-separated values for each."""
    devices = []
    for row in report.splitlines():
        parts = [part.strip() for part in row.split(",")]
        if len(parts) != 5 or not all(part.isdigit() for part in (parts[0], *parts[2:4])):
            continue
        index, name, total, free, capability = parts
        speeds = _speeds(name, int(total) * MIB)
        devices.append(
            DeviceSpec(
                name=f"cuda:{index}",
                kind="cuda",
                total_bytes=int(total) * MIB,
                available_bytes=min(int(free), int(total)) * MIB,
                bandwidth=speeds[0],
                link=speeds[1],
                flops=speeds[2],
                sm=read_sm(capability),
                product=name,
            )
        )
    return devices


def read_amd(nodes: Path) -> list[DeviceSpec]:
    """Return the GPUs that the kernel driver lists; processors have no architecture there."""
    devices: list[DeviceSpec] = []
    folders = sorted(nodes.glob("*"), key=lambda path: int(path.name)) if nodes.is_dir() else []
    for folder in folders:
        properties = _properties(folder / "properties")
        version = properties.get("gfx_target_version", 0)
        total = sum(
            _properties(bank).get("size_in_bytes", 0)
            for bank in folder.glob("mem_banks/*/properties")
        )
        if version and total:
            speeds = _amd_speeds(gfx_name(version), total)
            devices.append(
                DeviceSpec(
                    name=f"hip:{len(devices)}",
                    kind="hip",
                    total_bytes=total,
                    available_bytes=total - _vram_used(properties.get("drm_render_minor", 0)),
                    bandwidth=speeds[0],
                    link=speeds[1],
                    flops=speeds[2],
                    gfx=gfx_name(version),
                )
            )
    return devices


def gfx_name(version: int) -> str:
    """Return the name of an AMD target version: 110001 is gfx1101, 90010 is gfx90a."""
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}"


def _speeds(name: str, total_bytes: int) -> tuple[float, float, float]:
    """Return bandwidth, link and arithmetic of a GPU that the catalogue may know."""
    size = round(total_bytes / (1 << 30))
    for text in (f"{name}-{size}gb", name):
        try:
            known = find_device(text)
        except OptionError:
            continue
        return known.bandwidth, known.link or UNKNOWN_LINK, known.flops
    return UNKNOWN_BANDWIDTH, UNKNOWN_LINK, UNKNOWN_FLOPS


def _amd_speeds(gfx: str, total_bytes: int) -> tuple[float, float, float]:
    """Return the speeds of the slowest GPU of the catalogue that could be this one."""
    size = round(total_bytes / (1 << 30))
    alike = [entry for entry in CATALOGUE if entry.arch == gfx and entry.gibibytes == size]
    if not alike:
        return UNKNOWN_BANDWIDTH, UNKNOWN_LINK, UNKNOWN_FLOPS
    slowest = min(alike, key=lambda entry: (entry.bandwidth, entry.link, entry.tera))
    return slowest.bandwidth * 1e9, slowest.link * 1e9 or UNKNOWN_LINK, slowest.tera * 1e12


def _properties(path: Path) -> dict[str, int]:
    try:
        rows = [row.split() for row in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _vram_used(minor: int) -> int:
    path = Path(f"/sys/class/drm/renderD{minor}/device/mem_info_vram_used")
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
