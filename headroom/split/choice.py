"""make_run_plan(): the device that an engine runs on, named or found, and the plan for it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from headroom.errors import DeviceError, OptionError, PlanError
from headroom.kernels.cuda.compile import CODE
from headroom.machine.devices import DeviceSpec
from headroom.machine.drivers import gpu_facts, gpu_holders, why_unseen
from headroom.machine.gpus import detect_gpus
from headroom.machine.readiness import (
    GpuFacts,
    Refusal,
    held_by_others,
    refuse_gpu,
    refuse_memory,
)
from headroom.machine.targets import is_local, plan_devices
from headroom.machine.torch_gpus import gpu_memory, read_gpu, read_torch
from headroom.options import Options
from headroom.plan.plan import Plan, make_plan
from headroom.plan.shape import ModelShape
from headroom.split.unused import without_gpu_options, without_plan_options
from headroom.units import GIB, counted, gib, parse_size

log = logging.getLogger(__name__)

# Lines that need no free memory once CUDA has started: its own memory, and the reserve.
NOT_NEEDED = frozenset({"runtime", "reserve"})
NOTHING_LOADED: Mapping[str, int] = MappingProxyType({})  # no other model takes memory
NOTHING_FREED: Mapping[str, int] = MappingProxyType({})  # no other model would be unloaded
NOTICEABLE_BYTES = GIB  # of a GPU, held by other processes; an idle driver usually holds less


def make_run_plan(
    shape: ModelShape,
    options: Options,
    left: Mapping[str, int] = NOTHING_LOADED,
    freed: Mapping[str, int] = NOTHING_FREED,
) -> Plan:
    """Return a plan that this machine can run, or raise an error that says why it cannot.

    Without --device it is a GPU that runs the kernels and holds the model, else the CPU. If only
    an option keeps the model from the GPU, that option is reported; the CPU does not take over.
    `left` is the memory in bytes that other loaded models leave of a device, by its name. `freed`
    is what the plan may count on besides the memory that is free now: that of loaded models which
    would be unloaded first.
    """
    CODE.open(options.home_path)
    options = without_plan_options(options)
    if options.device is not None:
        devices = _devices(options, left, freed)
        check_devices(devices, options)
        return _plan(shape, devices, options, freed)
    on_cpu = replace(options, device="cpu")
    name = choose_device(options)
    if name != "cpu":
        on_gpu = replace(options, device=name)
        try:
            return _plan(shape, _devices(on_gpu, left, freed), on_gpu, freed)
        except (PlanError, DeviceError) as error:
            if isinstance(error, PlanError) and _caused_by_options(shape, error, on_gpu):
                raise
            log.warning("device: cpu, not %s: %s", name, error.message)
    return _plan(shape, _devices(on_cpu, left, freed), on_cpu, freed)


def _devices(
    options: Options, left: Mapping[str, int], freed: Mapping[str, int]
) -> list[DeviceSpec]:
    """Return the devices that the options name, with the memory that a plan may count on."""
    more = _with_host(freed)
    devices = [
        replace(x, available_bytes=min(x.total_bytes, x.available_bytes + more.get(x.name, 0)))
        for x in plan_devices(options)
    ]
    return reduce_memory(devices, left)


def _with_host(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by device, also for the host behind GPUs: its memory is that of the CPU."""
    return {**sizes, **({"host": sizes["cpu"]} if "cpu" in sizes else {})}


def reduce_memory(devices: Sequence[DeviceSpec], left: Mapping[str, int]) -> list[DeviceSpec]:
    """Return the devices with no more memory available than other loaded models leave of it."""
    most = _with_host(left)
    return [
        replace(device, available_bytes=max(0, min(device.available_bytes, most[device.name])))
        if device.name in most
        else device
        for device in devices
    ]


def make_trial_plan(shape: ModelShape, options: Options) -> Plan:
    """Return the plan that a run would have, on this machine or on a device of another one."""
    names = [name.strip() for name in (options.device or "cpu").split(",")]
    if all(name == "cpu" or is_local(name) for name in names):
        return make_run_plan(shape, options)
    devices = plan_devices(options)
    _check_number(devices)
    return _checked_plan(shape, devices, options)


def choose_device(options: Options) -> str:
    """Return the name of the GPU with most memory free if it can run layers, else cpu."""
    if options.dtype == "int8":
        return "cpu"  # only CPUs have 8-bit products
    gpus = detect_gpus()
    for gpu in sorted(gpus, key=lambda gpu: -gpu.available_bytes):
        if refusal := _refuse(gpu, options):
            log.warning("device: not %s: %s %s", gpu.name, refusal.message, refusal.hint)
            continue
        log.info(
            "device: %s, %s, %s of %s free",
            gpu.name,
            gpu.gfx or f"sm_{gpu.sm}",
            gib(gpu.available_bytes),
            gib(gpu.total_bytes),
        )
        return gpu.name
    if not gpus:
        _log_none()
    return "cpu"


def _log_none() -> None:
    """Log that no GPU is found; if torch sees one, log why it is not used."""
    why, hint = why_unseen("cuda:0")
    if (count := read_torch().count) and why:
        seen = counted(count, "GPU")
        log.warning("device: cpu, although torch sees %s: %s %s", seen, why, hint)
    else:
        log.info("device: cpu, since no GPU is found")


def check_devices(devices: list[DeviceSpec], options: Options) -> None:
    """Refuse devices that a plan can be made for but that cannot run layers here."""
    stages = [device for device in devices if device.runs_layers]
    for device in stages:
        if device.kind != "cpu" and not is_local(device.name):
            raise OptionError(
                f"--device {device.name} is a device to plan for, not one of this machine.",
                hint="Try headroom plan with it; an engine runs on cpu or cuda:0.",
                param="device",
            )
    _check_number(devices)
    if stages[0].kind != "cpu" and (refusal := _refuse(stages[0], options)):
        raise DeviceError(refusal.message, hint=refusal.hint, param="device")


def _check_number(devices: list[DeviceSpec]) -> None:
    """Refuse more than one device for layers."""
    if (number := sum(device.runs_layers for device in devices)) > 1:
        raise OptionError(
            f"--device names {number} devices, and an engine runs on one.",
            hint="Name one of them; headroom plan shows how layers would be split.",
            param="device",
        )


def _refuse(device: DeviceSpec, options: Options) -> Refusal | None:
    """Return why a GPU of this machine cannot run layers."""
    torch = read_torch()
    found = [gpu for gpu in gpu_facts() if gpu.name == device.name]
    known = found[0] if found else _facts(device)
    if options.device_memory is not None:
        limit = parse_size(options.device_memory, "device_memory")
        known = replace(known, limit_bytes=limit)
    return refuse_gpu(torch, read_gpu(known, torch), options.dtype)


def _facts(device: DeviceSpec) -> GpuFacts:
    """Return what is known of a GPU that NVIDIA's driver does not list."""
    total = device.card_bytes or device.total_bytes
    return GpuFacts(name=device.name, sm=device.sm, gfx=device.gfx, total_bytes=total)


def _plan(
    shape: ModelShape,
    devices: list[DeviceSpec],
    options: Options,
    freed: Mapping[str, int] = NOTHING_FREED,
) -> Plan:
    try:
        plan = _checked_plan(shape, devices, options)
    except PlanError as error:
        if (told := _blame(shape, devices, options)) is None:
            raise
        message, hint = f"{error.message} {told.message}", f"{told.hint} {error.hint}"
        raise PlanError(message, hint=hint, param=error.param) from error
    device = plan.devices[0]
    if device.kind != "cpu":
        needed = sum(line.bytes for line in device.lines if line.name not in NOT_NEEDED)
        memory = gpu_memory(device.name)
        memory = replace(memory, free_bytes=memory.free_bytes + freed.get(device.name, 0))
        if needed > memory.free_bytes:
            memory = replace(memory, holders=tuple(gpu_holders(device.name)))
        if refusal := refuse_memory(device.name, needed, memory):
            raise DeviceError(refusal.message, hint=refusal.hint, param="device")
    return plan


def _checked_plan(shape: ModelShape, devices: list[DeviceSpec], options: Options) -> Plan:
    plan = make_plan([shape], devices, options)
    if plan.devices[0].hot_experts < plan.devices[0].total_experts:
        _check_cold(plan, options)
    return plan


def _blame(shape: ModelShape, devices: list[DeviceSpec], options: Options) -> Refusal | None:
    """Return an error that names the processes without which the plan would fit; else None."""
    gpu, *others = devices
    held = gpu.total_bytes - gpu.available_bytes
    if gpu.kind == "cpu" or held <= NOTICEABLE_BYTES:
        return None
    try:
        _checked_plan(shape, [replace(gpu, available_bytes=gpu.total_bytes), *others], options)
    except PlanError:
        return None
    return held_by_others(gpu.name, held, gpu_holders(gpu.name))


def _caused_by_options(shape: ModelShape, error: PlanError, options: Options) -> bool:
    """Return whether the model would fit the GPU without the options about its memory."""
    if error.param is not None:
        return True
    plain = without_gpu_options(options)
    try:
        _checked_plan(shape, plan_devices(plain), plain)
    except PlanError:
        return False
    return True


def _check_cold(plan: Plan, options: Options) -> None:
    """Refuse cold experts that no kernel of this machine would compute."""
    device = plan.devices[0]
    if device.kind == "hip":
        cold = device.total_experts - device.hot_experts
        raise PlanError(
            f"{device.name} would leave {cold} of {device.total_experts} experts cold, which only "
            "CUDA's driver and kernels deal with: AMD GPUs run no cold experts.",
            hint="Choose a smaller --context or a smaller file, or --device cpu.",
        )
    by_cpu = options.cold == "cpu" or (options.no_pin and options.cold == "auto")
    speeds = plan.cold_speeds
    if by_cpu and plan.settings.uses_arena and speeds is not None and not speeds.cpu:
        asked = "--cold cpu" if options.cold == "cpu" else "--no-pin"
        raise OptionError(
            f"{asked} leaves cold experts to the CPU, whose C++ kernels were not built here.",
            hint="Leave it out: the GPU reads cold experts in pinned memory. See headroom doctor.",
            param="cold" if options.cold == "cpu" else "no_pin",
        )
