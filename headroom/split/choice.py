"""make_run_plan(): the devices that an engine runs on, named or found, and the plan for them."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import MappingProxyType

from headroom.errors import DeviceError, OptionError, PlanError
from headroom.kernels.cuda.compile import CODE
from headroom.machine.devices import DeviceSpec, detect_cpu, physical_name
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
from headroom.options import ROUNDED_TYPES, Options
from headroom.plan.layout import DevicePlan
from headroom.plan.plan import Plan, check_verifies, make_plan
from headroom.plan.settings import FeatureRequest
from headroom.plan.shape import ModelShape
from headroom.split.unused import without_gpu_options, without_plan_options
from headroom.units import GIB, counted, gib, parse_size

log = logging.getLogger(__name__)

# Lines that need no free memory once CUDA has started: its own memory, and the reserve.
NOT_NEEDED = frozenset({"runtime", "reserve"})
NOTHING_LOADED: Mapping[str, int] = MappingProxyType({})  # no other model takes memory
NOTHING_FREED: Mapping[str, int] = MappingProxyType({})  # no other model would be unloaded
NOTICEABLE_BYTES = GIB  # of a GPU, held by other processes; an idle driver usually holds less
MOST_COMBINED = 8  # GPUs, the fastest ones, of which every set is tried


@dataclass(frozen=True, slots=True)
class _PlannedModel:
    """A model to plan, what is kept of its steps, and the memory that it may take."""

    shape: ModelShape
    left: Mapping[str, int] = field(default_factory=dict)  # as in `make_run_plan`
    freed: Mapping[str, int] = field(default_factory=dict)
    features: FeatureRequest | None = None
    draft: ModelShape | None = None  # a model that guesses tokens ahead


def make_run_plan(
    shape: ModelShape,
    options: Options,
    left: Mapping[str, int] = NOTHING_LOADED,
    freed: Mapping[str, int] = NOTHING_FREED,
    features: FeatureRequest | None = None,
    draft: ModelShape | None = None,
) -> Plan:
    """Return a plan that this machine can run, or raise an error that says why it cannot.

    Without --device these are as few GPUs as hold the model, of those that run the kernels, else
    the CPU. If only an option keeps the model from a GPU, that option is reported; the CPU does not
    take over. `left` is the memory in bytes that other loaded models leave of a device, by its
    name. `freed` is what the plan may count on besides the memory that is free now: that of loaded
    models which would be unloaded first. `features` are the layers whose output rows are kept.
    `draft` guesses tokens ahead.
    """
    CODE.open(options.home_path)
    options = without_plan_options(options)
    model = _PlannedModel(shape, left, freed, features, draft)
    if options.device is not None:
        devices = _devices(options, model)
        check_devices(devices, options)
        return _plan(model, devices, options)
    if names := choose_gpus(options):
        try:
            return _plan_on_gpus(model, names, options)
        except (PlanError, DeviceError) as error:
            on_gpus = replace(options, device=",".join(names))
            if isinstance(error, PlanError) and _caused_by_options(model, error, on_gpus):
                raise
            log.warning("device: cpu, not %s: %s", " and ".join(names), error.message)
    on_cpu = replace(options, device="cpu")
    return _plan(model, _devices(on_cpu, model), on_cpu)


def named_devices(plan: Plan) -> str:
    """Return the `--device` that names the devices of a plan for this machine."""
    return ",".join(physical_name(device.name) for device in plan.devices)


def make_worker_plan(
    shape: ModelShape,
    devices: Sequence[DeviceSpec],
    options: Options,
    features: FeatureRequest | None = None,
) -> Plan:
    """Return a plan for the devices of worker processes, in their order.

    `features` are the layers whose output rows are kept and sent to the engine. The plan depends
    on nothing but its arguments, so that each worker can make it again.
    """
    options = replace(without_plan_options(options), device=None, threads=None)
    if not any(device.holds_all for device in devices):
        devices = [*devices, replace(detect_cpu(), name="host", runs_layers=False)]
    return make_plan([shape], devices, options, features)


def _plan_on_gpus(
    model: _PlannedModel,
    names: Sequence[str],  # GPUs that may be used, the preferred one first
    options: Options,
) -> Plan:
    """Return a plan for as few GPUs as hold all weights, or for all of them if none do.

    Single GPUs are tried first, then pairs, and so on; of equally many, the fastest.
    """
    whole = _devices(replace(options, device=",".join(names)), model)
    gpus = {physical_name(x.name): x for x in whole if x.kind != "cpu"}
    passed, tried = list[_PassedOver](), set[tuple[_Likeness, ...]]()
    for chosen in _sets_of(names):
        devices = [x for x in whole if x.kind == "cpu" or physical_name(x.name) in chosen]
        on_gpus = replace(options, device=",".join(chosen))
        room = sum(gpus[name].available_bytes for name in chosen)
        last, alike = len(chosen) == len(names), tuple(_likeness(gpus[x]) for x in chosen)
        if alike in tried and not last:
            continue
        tried.add(alike)
        needed = _least_bytes(model.shape, on_gpus)
        if room < needed and not last:
            reason = f"{gib(needed)} of weights do not fit into {gib(room)}"
            passed.append(_PassedOver(chosen, room, reason))
            continue
        try:
            plan = _plan(model, devices, on_gpus)
        except (PlanError, DeviceError) as error:
            if last:
                raise
            passed.append(_PassedOver(chosen, room, error.message))
            continue
        cold = plan.total_experts - plan.hot_experts
        if not last and cold and options.expert_budget is None:
            reason = f"{cold} of {plan.total_experts} experts would be cold"
            passed.append(_PassedOver(chosen, room, reason))
            continue
        if passed:
            roomiest = max(passed, key=lambda one: one.room_bytes)
            others = " and ".join(roomiest.names)
            log.info("device: %s, since on %s: %s", " and ".join(chosen), others, roomiest.reason)
        return plan
    raise AssertionError("the last plan is returned or raises")


_Likeness = tuple[str, int, str, float, int]


def _likeness(gpu: DeviceSpec) -> _Likeness:
    """Return what a plan depends on; free memory counts in whole GiB."""
    return gpu.kind, gpu.sm, gpu.gfx, gpu.bandwidth, gpu.available_bytes // GIB


@dataclass(frozen=True, slots=True)
class _PassedOver:
    """GPUs that do not hold a model."""

    names: tuple[str, ...]
    room_bytes: int  # of their free memory
    reason: str


def _sets_of(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the sets of GPUs that are worth a plan, small ones first, and last all of them.

    Sets are drawn from the fastest GPUs, as many GPUs have too many sets.
    """
    for count in range(1, len(names)):
        yield from combinations(names[: max(MOST_COMBINED, count)], count)
    yield tuple(names)


def _least_bytes(shape: ModelShape, options: Options) -> int:
    """Return bytes of weights that must lie on GPUs if they hold a model, whatever else does.

    Host memory can hold tables that are only looked up, and the experts beyond a budget.
    """
    held = min(shape.weight_bytes, shape.in_tiles().weight_bytes)
    held -= shape.lookup_bytes + (0 if shape.tied else shape.embed_bytes)
    return held - (0 if options.expert_budget is None else shape.expert_bytes)


def _devices(options: Options, model: _PlannedModel) -> list[DeviceSpec]:
    """Return the devices that the options name, with the memory that a plan may count on."""
    more = _with_host(model.freed)
    devices = [
        replace(x, available_bytes=min(x.total_bytes, x.available_bytes + more.get(x.name, 0)))
        for x in plan_devices(options)
    ]
    return reduce_memory(devices, model.left)


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
    return _checked_plan(_PlannedModel(shape), plan_devices(options), options)


def choose_gpus(options: Options) -> list[str]:
    """Return the names of the GPUs that can run layers, the fastest first; those alike by room."""
    if options.dtype in ROUNDED_TYPES:
        return []  # only CPUs have such products
    gpus, chosen = detect_gpus(), []
    for gpu in sorted(gpus, key=lambda gpu: (-(gpu.bandwidth or 0), -gpu.available_bytes)):
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
        chosen.append(gpu.name)
    if not gpus:
        _log_none()
    return chosen


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
        if device.kind != "cpu" and not is_local(physical_name(device.name)):
            raise OptionError(
                f"--device {device.name} is a device to plan for, not one of this machine.",
                hint="Try headroom plan with it; an engine runs on cpu or cuda:0.",
                param="device",
            )
    for device in stages:
        if device.kind != "cpu" and (refusal := _refuse(device, options)):
            raise DeviceError(refusal.message, hint=refusal.hint, param="device")


def _refuse(device: DeviceSpec, options: Options) -> Refusal | None:
    """Return why a GPU of this machine cannot run layers."""
    torch = read_torch()
    found = [gpu for gpu in gpu_facts() if gpu.name == physical_name(device.name)]
    known = found[0] if found else _facts(device)
    if options.device_memory is not None:
        limit = parse_size(options.device_memory, "device_memory")
        known = replace(known, limit_bytes=limit)
    return refuse_gpu(torch, read_gpu(known, torch), options.dtype)


def _facts(device: DeviceSpec) -> GpuFacts:
    """Return what is known of a GPU that NVIDIA's driver does not list."""
    total = device.card_bytes or device.total_bytes
    return GpuFacts(name=device.name, sm=device.sm, gfx=device.gfx, total_bytes=total)


def _plan(model: _PlannedModel, devices: list[DeviceSpec], options: Options) -> Plan:
    try:
        plan = _checked_plan(model, devices, options)
    except PlanError as error:
        if (told := _blame(model, devices, options)) is None:
            raise
        message, hint = f"{error.message} {told.message}", f"{told.hint} {error.hint}"
        raise PlanError(message, hint=hint, param=error.param) from error
    _check_free_memory(plan, model.freed)
    return plan


def _check_free_memory(plan: Plan, freed: Mapping[str, int]) -> None:
    """Refuse a plan that needs more of a GPU than is free now."""
    needed: Counter[str] = Counter()
    for device in plan.devices:
        if device.kind != "cpu":  # several stages may share a GPU
            own = sum(line.bytes for line in device.lines if line.name not in NOT_NEEDED)
            needed[physical_name(device.name)] += own
    for name, size in needed.items():
        memory = gpu_memory(name)
        more = sum(own for device, own in freed.items() if physical_name(device) == name)
        memory = replace(memory, free_bytes=memory.free_bytes + more)
        if size > memory.free_bytes:
            memory = replace(memory, holders=tuple(gpu_holders(name)))
        if refusal := refuse_memory(name, size, memory):
            raise DeviceError(refusal.message, hint=refusal.hint, param="device")


def _checked_plan(model: _PlannedModel, devices: list[DeviceSpec], options: Options) -> Plan:
    if model.draft is not None:
        check_verifies(devices)
    shapes = [shape for shape in (model.shape, model.draft) if shape is not None]
    plan = make_plan(shapes, devices, options, model.features)
    for device in plan.devices:
        if device.hot_experts < device.total_experts:
            _check_cold(device, options)
    return plan


def _blame(model: _PlannedModel, devices: list[DeviceSpec], options: Options) -> Refusal | None:
    """Return an error that names the processes without which the plan would fit; else None."""
    gpus = [device for device in devices if device.kind != "cpu"]
    held = {gpu.name: gpu.total_bytes - gpu.available_bytes for gpu in gpus}
    if not any(size > NOTICEABLE_BYTES for size in held.values()):
        return None
    freed = [
        replace(device, available_bytes=device.total_bytes) if device.name in held else device
        for device in devices
    ]
    try:
        _checked_plan(model, freed, options)
    except PlanError:
        return None
    name = max(held, key=lambda name: held[name])
    return held_by_others(name, held[name], gpu_holders(physical_name(name)))


def _caused_by_options(model: _PlannedModel, error: PlanError, options: Options) -> bool:
    """Return whether the model would fit the GPU without the options about its memory."""
    if error.param is not None:
        return True
    plain = without_gpu_options(options)
    try:
        _checked_plan(model, plan_devices(plain), plain)
    except PlanError:
        return False
    return True


def _check_cold(device: DevicePlan, options: Options) -> None:
    """Refuse cold experts of a device that no kernel of this machine would compute."""
    if device.kind == "hip":
        cold = device.total_experts - device.hot_experts
        raise PlanError(
            f"{device.name} would leave {cold} of {device.total_experts} experts cold, which only "
            "CUDA's driver and kernels deal with: AMD GPUs run no cold experts.",
            hint="Choose a smaller --context or a smaller file, or --device cpu.",
        )
    by_cpu = options.cold == "cpu" or (options.no_pin and options.cold == "auto")
    speeds = device.cold_speeds
    if by_cpu and device.settings.uses_arena and speeds is not None and not speeds.cpu:
        asked = "--cold cpu" if options.cold == "cpu" else "--no-pin"
        raise OptionError(
            f"{asked} leaves cold experts to the CPU, whose C++ kernels were not built here.",
            hint="Leave it out: the GPU reads cold experts in pinned memory. See headroom doctor.",
            param="cold" if options.cold == "cpu" else "no_pin",
        )
