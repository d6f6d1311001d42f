"""Targets: the devices that a plan is made for, of this machine or of another one."""

import re
from collections import Counter
from dataclasses import replace

from headroom.errors import OptionError
from headroom.machine.assumed import (
    ASSUMED_GPU_BANDWIDTH,
    ASSUMED_GPU_FLOPS,
    ASSUMED_GPU_LINK,
)
from headroom.machine.calibration import load_speeds, speeds_path, with_speeds
from headroom.machine.catalogue import find_device
from headroom.machine.devices import DeviceSpec, detect_cpu
from headroom.machine.gpus import detect_gpus, find_gpu
from headroom.options import Options
from headroom.units import gib, parse_size

_LOCAL = re.compile(r"(cuda|hip):\d+")  # names of this machine's GPUs


def plan_devices(options: Options) -> list[DeviceSpec]:
    """Return the devices that the options name, in their order, and the host memory behind them.

    A device is `cpu`, a GPU of this machine (`cuda:0`, `hip:0`), a catalogue name or a size;
    several are separated by commas. The default is this machine's CPU. A device of this machine
    that is named n times runs n stages, and each has an nth of its memory.
    """
    names = _names(options)
    host = _host(options.ram)
    devices = [host if name == "cpu" else parse_device(name) for name in names]
    if options.device_memory is not None:
        devices = [_limited(device, options.device_memory) for device in devices]
    if not (any(device.kind == "cpu" for device in devices) or all(x.unified for x in devices)):
        devices.append(replace(host, name="host", runs_layers=False))
    devices = _with_own_speeds(devices, options)
    if options.threads is not None:
        threads = options.threads
        devices = [x.with_threads(threads) if x.kind == "cpu" else x for x in devices]
    return _numbered(devices)


def is_this_machine(options: Options) -> bool:
    """Return whether a plan is for this machine: its real GPUs and its real memory."""
    names = _names(options)
    return options.ram is None and all(name == "cpu" or is_local(name) for name in names)


def _names(options: Options) -> list[str]:
    return [name.strip() for name in (options.device or "cpu").split(",")]


def _with_own_speeds(devices: list[DeviceSpec], options: Options) -> list[DeviceSpec]:
    """Return the devices with speeds measured on this machine, unless one belongs to another."""
    gpus = [device for device in devices if device.kind != "cpu"]
    if not all(is_local(device.name) for device in gpus):
        return devices
    return with_speeds(devices, load_speeds(speeds_path(options.home_path)))


def is_local(name: str) -> bool:
    """Return whether a name means a GPU of this machine."""
    return _LOCAL.fullmatch(name) is not None


def parse_device(text: str) -> DeviceSpec:
    """Return the GPU that a name or a size stands for."""
    if is_local(text):
        return find_gpu(text, detect_gpus())
    if re.match(r"[\d.\-]", text):
        return _unknown_gpu(text)
    return find_device(text)


def _unknown_gpu(text: str) -> DeviceSpec:
    """Return a GPU of which only the size is known."""
    total = parse_size(text, "device")
    if total <= 0:
        raise OptionError(f"--device {text} has no memory.", hint="Write 24GiB.", param="device")
    return DeviceSpec(
        name=gib(total).replace(" ", ""),
        kind="cuda",
        total_bytes=total,
        available_bytes=total,
        bandwidth=ASSUMED_GPU_BANDWIDTH,
        link=ASSUMED_GPU_LINK,
        flops=ASSUMED_GPU_FLOPS,
        sm=80,  # the oldest one that computes in bf16
    )


def _limited(device: DeviceSpec, text: str) -> DeviceSpec:
    """Return a GPU with its memory reduced to what an engine may take."""
    limit = parse_size(text, "device_memory")
    if limit <= 0:
        raise OptionError(
            f"--device-memory is {text!r}.", hint="Write 12GiB.", param="device_memory"
        )
    if device.kind == "cpu":
        return device
    return replace(
        device,
        total_bytes=min(device.total_bytes, limit),
        card_bytes=device.total_bytes,
        available_bytes=min(device.available_bytes, limit),
    )


def _host(ram: str | None) -> DeviceSpec:
    """Return this machine's CPU, with the memory that the options give instead, if any."""
    here = detect_cpu()
    if ram is None:
        return here
    total = parse_size(ram, "ram")
    if total <= 0:
        raise OptionError(f"--ram is {ram!r}.", hint="Write 64GiB.", param="ram")
    return replace(here, total_bytes=total, available_bytes=total, pinnable_bytes=None)


def _numbered(devices: list[DeviceSpec]) -> list[DeviceSpec]:
    """Number devices that have the same name, so that lines of a plan can be told apart.

    Devices of this machine with one name are one device, whose memory is divided among them.
    """
    counts, seen = Counter(device.name for device in devices), Counter[str]()
    named = []
    for device in devices:
        seen[device.name] += 1
        number, count = seen[device.name], counts[device.name]
        if count > 1 and (device.kind == "cpu" or is_local(device.name)):
            device = replace(
                device,
                total_bytes=device.total_bytes // count,
                available_bytes=device.available_bytes // count,
                driver_bytes=device.driver_bytes // count,
                card_bytes=device.card_bytes // count,
            )
        named.append(device if number == 1 else replace(device, name=f"{device.name}#{number}"))
    return named
