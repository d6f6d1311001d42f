"""GPUs of this machine, seen through the drivers' own reports; torch is not needed."""

from collections.abc import Sequence
from pathlib import Path

from headroom.errors import OptionError
from headroom.machine.assumed import (
    ASSUMED_GPU_BANDWIDTH,
    ASSUMED_GPU_FLOPS,
    ASSUMED_GPU_LINK,
)
from headroom.machine.catalogue import CATALOGUE
from headroom.machine.devices import DeviceSpec
from headroom.machine.drivers import NvidiaGpu, find_card, nvidia_gpus, why_unseen
from headroom.machine.readiness import GpuMemory


def detect_gpus() -> list[DeviceSpec]:
    """Return the NVIDIA and AMD GPUs of this machine with what is free on them now."""
    return nvidia_specs(nvidia_gpus()) + read_amd(Path("/sys/class/kfd/kfd/topology/nodes"))


def driver_memory(name: str) -> GpuMemory:
    """Return the memory of a GPU as its driver reports it; 0 bytes if the driver does not list it.

    Torch would have to start CUDA first, which fails on a full GPU.
    """
    for device in detect_gpus():
        if device.name == name:
            return GpuMemory(device.available_bytes, device.total_bytes)
    return GpuMemory(0, 0)


def find_gpu(name: str, found: list[DeviceSpec]) -> DeviceSpec:
    """Return the GPU of this machine called `cuda:0` or `hip:1`."""
    for device in found:
        if device.name == name:
            return device
    names = ", ".join([*(device.name for device in found), "cpu"])
    why, hint = why_unseen(name) if name.startswith("cuda") else ("", "")
    raise OptionError(
        f"--device {name} is not seen on this machine: {why}"
        if why
        else f"--device {name} is not on this machine.",
        hint=f"{hint} It has {names}; other machines are named as rtx3060-12gb or 24GiB.".strip(),
        param="device",
    )


def nvidia_specs(gpus: Sequence[NvidiaGpu]) -> list[DeviceSpec]:
    """Return the GPUs of a driver as the planner sees them; a GPU of unknown size is left out."""
    devices = []
    for gpu in gpus:
        if not gpu.total_bytes:
            continue
        card = find_card(gpu.product, gpu.total_bytes)
        devices.append(
            DeviceSpec(
                name=gpu.name,
                kind="cuda",
                total_bytes=gpu.total_bytes,
                available_bytes=gpu.free_bytes,
                bandwidth=card.bandwidth if card else ASSUMED_GPU_BANDWIDTH,
                link=(card.link if card else 0) or ASSUMED_GPU_LINK,
                flops=card.flops if card else ASSUMED_GPU_FLOPS,
                sm=gpu.sm,
                product=gpu.product,
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


def _amd_speeds(gfx: str, total_bytes: int) -> tuple[float, float, float]:
    """Return the speeds of the slowest GPU in the catalogue with this architecture and size."""
    size = round(total_bytes / (1 << 30))
    alike = [entry for entry in CATALOGUE if entry.arch == gfx and entry.gibibytes == size]
    if not alike:
        return ASSUMED_GPU_BANDWIDTH, ASSUMED_GPU_LINK, ASSUMED_GPU_FLOPS
    slowest = min(alike, key=lambda entry: (entry.bandwidth, entry.link, entry.tera))
    return slowest.bandwidth * 1e9, slowest.link * 1e9 or ASSUMED_GPU_LINK, slowest.tera * 1e12


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
