"""start_pipeline(): loads a planned model to its devices and opens the pipeline that runs it."""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from headroom.errors import DeviceError, is_out_of_memory
from headroom.experts.cold import ColdExperts
from headroom.experts.exchange import StoreExchanges
from headroom.experts.joined import join_meters, join_stores
from headroom.experts.placement import ExpertPlacement
from headroom.experts.traces.taps import RouterTap
from headroom.families.config import AttentionConfig, ModelConfig
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.native.module import MISSING, MODULE, POOL
from headroom.layers.draws import DeviceSampler
from headroom.layers.features import ModelFeatures, StageFeatures
from headroom.layers.modules import Embedding
from headroom.machine.devices import physical_name, torch_name
from headroom.machine.drivers import gpu_holders
from headroom.machine.readiness import out_of_memory
from headroom.machine.torch_gpus import gpu_memory
from headroom.plan.cost_model import exchange_speeds
from headroom.plan.describe import ModelDescription
from headroom.plan.drafts import DraftDescription
from headroom.plan.layout import DevicePlan
from headroom.plan.lines import NOT_ALLOCATED, Line
from headroom.plan.plan import Plan
from headroom.progress import LoadProgress, ignore_progress
from headroom.split.build import DraftFiles, load_model
from headroom.split.gpu_stage import GpuStage
from headroom.split.memory_check import check_memory, held_already, open_device_memory
from headroom.split.model import Model
from headroom.split.pipeline import LoadTimes, Pipeline, StageMemory
from headroom.split.placing import even_placement, expert_layers
from headroom.split.stage import CpuStage, Stage
from headroom.units import gib

log = logging.getLogger(__name__)

STEPS_AT_ONCE = 2  # steps that the stages of one process work on, if they are on several devices
TIMED_HANDOVERS = 5  # copies that are timed after loading
# The plan's lines that hold tensors of the checkpoint.
WEIGHT_LINES = (
    *("core_weights", "embeddings", "head", "hot_experts", "cold_experts"),
    "draft_weights",
)


def start_pipeline(
    plan: Plan,
    model: ModelDescription,
    progress: LoadProgress = ignore_progress,
    placement: ExpertPlacement | None = None,
    tap: RouterTap | None = None,
    draft: DraftDescription | None = None,
) -> Pipeline:
    """Load the model as the plan says, and return the pipeline that runs it.

    If the plan leaves experts cold, `placement` says which; without one, each layer has its planned
    number of hot experts, evenly spread. `tap` records or replaces the picks of all routers.
    `draft` guesses tokens ahead.
    """
    settings = plan.settings
    set_threads(settings.threads, pin=settings.pin_threads)
    if placement is None and plan.hot_experts < plan.total_experts:
        placement = even_placement(model.shape, plan)
    devices = plan.devices
    memory = {device: StageMemory(lines, Counter()) for device, lines in _host_lines(plan).items()}
    memory |= {device.name: StageMemory(device.allocated, Counter()) for device in devices}
    held_before = {device.name: held_already(device.name) for device in devices}
    loaded: list[Model] = []
    times = LoadTimes()
    told = _Progress(devices, progress, plan.host.lines)
    for device in devices:
        warn_of_slow_kernels(physical_name(device.name))
        open_device_memory(device.name)
        count = _counter_of(device, memory, told)
        # A device without cold experts gets no placement: it holds all experts of its layers.
        own = placement if device.hot_experts < device.total_experts else None
        allocated = memory[device.name].allocated
        embedding = loaded[0].embedding if loaded else None
        files = None
        if draft is not None and device is devices[-1]:
            earlier = tuple(part.features for part in loaded if part.features is not None)
            files = DraftFiles(draft.config, draft.checkpoint.tensors, earlier)
        part, own_times = _load(plan, device, model, own, tap, count, allocated, embedding, files)
        loaded.append(part)
        times = times.plus(own_times)
    told.end()
    _time_handovers(devices, loaded)
    stages, capture_s = _open_stages(plan, model.config, devices, loaded, memory, progress)
    for device in devices:
        check_memory(plan, device, memory[device.name].allocated, held_before[device.name])
    kept_logits = torch.empty(settings.snapshots, model.config.vocab)
    if settings.snapshots:
        _counter_of(devices[-1], memory, told)("snapshots", kept_logits.nbytes)
    request = plan.problem.request.features
    kept = [part.features for part in loaded if part.features is not None]
    colds = [part.cold_experts for part in loaded if part.cold_experts is not None]
    return Pipeline(
        stages,
        model.config.vocab,
        memory,
        experts=_open_exchanges(plan, model, colds),
        meter=join_meters([cold.meter for cold in colds]),
        keepers=[keeper for cold in colds for keeper in cold.keepers],
        refuses_trees=model.config.refuses_trees,
        load_times=replace(times, capture_s=capture_s),
        # What taps record of a step must not mix with the step after.
        depth=STEPS_AT_ONCE if works_at_once(devices) and tap is None else 1,
        pays_to_share=plan.predicted.pays_to_share,
        kept_logits=kept_logits,
        features=None if request is None else ModelFeatures(request, kept),
    )


def works_at_once(devices: Sequence[DevicePlan]) -> bool:
    """Return whether the stages of a process can work at the same time: on different devices."""
    return len({torch_name(device.name) for device in devices}) > 1


def _time_handovers(devices: Sequence[DevicePlan], loaded: Sequence[Model]) -> None:
    """Log how rows go from each device to the next, and how fast, by copies of a full step's."""
    gpus = [torch_name(device.name) for device in devices if device.kind != "cpu"]

    def wait() -> None:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    parts = zip(devices, loaded, strict=True)
    for (before, sender), (after, receiver) in pairwise(parts):
        rows = sender.idle_rows()
        receiver.receive(rows)  # the first copy also sets up the link
        wait()
        started = time.perf_counter()
        for _ in range(TIMED_HANDOVERS):
            receiver.receive(rows)
        wait()
        seconds = (time.perf_counter() - started) / TIMED_HANDOVERS
        log.info(
            "hand-over: %s to %s %s, %s in %.3f ms (%.1f GB/s)",
            *(before.name, after.name, _way_between(before, after), gib(rows.nbytes)),
            *(1e3 * seconds, rows.nbytes / seconds / 1e9),
        )


def _way_between(before: DevicePlan, after: DevicePlan) -> str:
    """Return how torch copies from one device to another, in words."""
    here, there = torch_name(before.name), torch_name(after.name)
    if here == there:
        return "within its memory"
    if "cpu" in (before.kind, after.kind):
        return "over the GPU's link"
    peers = torch.cuda.can_device_access_peer(here, there)
    return "by peer copies" if peers else "through host memory"


@dataclass(frozen=True, slots=True, eq=False)
class OpenedStage:
    """One stage of a plan, loaded, without the others."""

    stage: Stage
    memory: StageMemory  # of its device
    times: LoadTimes
    features: StageFeatures | None  # output rows of some layers; None: nobody asked for any
    cold: ColdExperts | None  # None if no expert is cold
    exchanges: StoreExchanges | None  # of its hot and cold experts; None if nothing exchanges them


def open_stage(
    plan: Plan,
    model: ModelDescription,
    number: int,
    placement: ExpertPlacement | None = None,
    progress: LoadProgress = ignore_progress,
) -> OpenedStage:
    """Load one stage of a plan; the other stages belong to other processes."""
    device = plan.devices[number]
    set_threads(device.settings.threads, pin=device.settings.pin_threads)
    memory = {name: StageMemory(lines, Counter()) for name, lines in _host_lines(plan).items()}
    memory[device.name] = own_memory = StageMemory(device.allocated, Counter())
    held_before = held_already(device.name)
    warn_of_slow_kernels(physical_name(device.name))
    open_device_memory(device.name)
    told = _Progress([device], progress)
    count = _counter_of(device, memory, told)
    own = placement if device.hot_experts < device.total_experts else None
    loaded, times = _load(plan, device, model, own, None, count, own_memory.allocated)
    told.end()
    (stage,), capture_s = _open_stages(plan, model.config, [device], [loaded], memory, progress)
    check_memory(plan, device, own_memory.allocated, held_before)
    times, cold = replace(times, capture_s=capture_s), loaded.cold_experts
    exchanges = None if cold is None else _open_exchanges(plan, model, [cold])
    return OpenedStage(stage, own_memory, times, loaded.features, cold, exchanges)


def _open_exchanges(
    plan: Plan, model: ModelDescription, colds: Sequence[ColdExperts]
) -> StoreExchanges | None:
    """Return what exchanges hot and cold experts; None if nothing does."""
    store = join_stores([cold.store for cold in colds])
    # Without cold experts in host memory there are none to exchange; a cache does it by itself.
    if store is None or not store.cold_bytes or store.is_cached:
        return None
    return StoreExchanges(
        store,
        expert_layers(model.shape, plan),
        same_bits=all(cold.same_bits for cold in colds),
        speeds=exchange_speeds(plan.cold_speeds, plan.settings.cold, store.pinned),
    )


def _open_stages(
    plan: Plan,
    config: ModelConfig,
    devices: Sequence[DevicePlan],  # of these stages: all of the plan, or one
    loaded: Sequence[Model],
    memory: Mapping[str, StageMemory],
    progress: LoadProgress,
) -> tuple[list[Stage], float]:
    """Return the stages, and the seconds in which the steps of GPUs were captured."""
    stages: list[Stage] = []
    capture_s, last, sampler = 0.0, plan.devices[-1], None
    if last.kind != "cpu" and last in devices:
        with explain_out_of_memory(last, memory[last.name].allocated, "capturing steps"):
            sampler = DeviceSampler.allocate(DECODE_ROWS, config.vocab, last.name)
        memory[last.name].allocated["logits"] += sampler.nbytes
    for device, model in zip(devices, loaded, strict=True):
        if device.kind == "cpu":
            stages.append(CpuStage(device.name, model))
            continue
        allocated = memory[device.name].allocated
        with explain_out_of_memory(device, allocated, "capturing steps"):
            stage = _open_gpu_stage(device, config, model, sampler, ends=device is last)
            capture_s += _capture(stage, device.settings.parallel, progress)
        stages.append(stage)
    return stages, capture_s


def _host_lines(plan: Plan) -> dict[str, dict[str, int]]:
    """Return what the engine allocates of the host memory behind GPUs, by line."""
    lines = {line.name: line.bytes for line in plan.host.lines if line.name not in NOT_ALLOCATED}
    return {"cpu": lines} if lines else {}


class _Progress:
    """Tells how many bytes of all weights are loaded."""

    def __init__(
        self, devices: Sequence[DevicePlan], progress: LoadProgress, host: Sequence[Line] = ()
    ) -> None:
        lines = [line for device in devices for line in device.lines]
        lines += host
        self._total = sum(line.bytes for line in lines if line.name in WEIGHT_LINES)
        self._progress, self._done = progress, 0

    def add(self, size_bytes: int) -> None:
        """Count some bytes of weights."""
        self._done += size_bytes
        self._progress(min(self._done, self._total), self._total)

    def end(self) -> None:
        """Tell that everything is loaded."""
        self._progress(self._total, self._total)


def _counter_of(
    device: DevicePlan, memory: Mapping[str, StageMemory], progress: _Progress
) -> Callable[[str, int], None]:
    """Return what counts an allocation of one stage: in its own lines, or in those of the host."""
    own, host = memory[device.name], memory.get("cpu")

    def count(line: str, size_bytes: int) -> None:
        hosted = host is not None and line not in own.planned and line in host.planned
        place = host if hosted else own
        assert place is not None
        place.allocated[line] += size_bytes
        if line in WEIGHT_LINES:
            progress.add(size_bytes)

    return count


def set_threads(threads: int, *, pin: bool = False) -> None:
    """Give torch and the C++ kernels the same number of threads; they never work at once.

    `pin` keeps each thread of the C++ kernels on one of the cores that this process may use.
    """
    torch.set_num_threads(threads)
    POOL.set(threads, pin=pin)


def warn_of_slow_kernels(device: str) -> None:
    """Warn if the layers of a CPU run on the reference kernels, which are exact but slow."""
    if device == "cpu" and MODULE is None:
        log.warning("kernels: the C++ module is %s; running on slow reference kernels", MISSING)


def _load(
    plan: Plan,
    device: DevicePlan,
    model: ModelDescription,
    placement: ExpertPlacement | None,
    tap: RouterTap | None,
    count: Callable[[str, int], None],
    allocated: Mapping[str, int],  # what `count` has counted on the device
    embedding: Embedding | None = None,  # of the first stage
    draft: DraftFiles | None = None,
) -> tuple[Model, LoadTimes]:
    """Load a device's layers; log how long that took."""
    loaded_bytes = 0

    def count_weights(line: str, size_bytes: int) -> None:
        nonlocal loaded_bytes
        count(line, size_bytes)
        loaded_bytes += size_bytes if line in WEIGHT_LINES else 0

    # Layers allocate on torch's current GPU.
    current = nullcontext() if device.kind == "cpu" else torch.cuda.device(torch_name(device.name))
    with explain_out_of_memory(device, allocated, "loading weights"), current:
        count("core_weights", 0)  # shows that the load has begun
        started = time.perf_counter()  # after CUDA has started
        tensors = model.checkpoint.tensors
        loaded = load_model(
            *(model.config, tensors, plan, device, count_weights, placement, tap, embedding),
            draft=draft,
        )
        times = LoadTimes(loaded_bytes, time.perf_counter() - started)
    size, speed = gib(times.weights_bytes), times.bytes_per_s / 1e9
    log.info("load: %s on %s in %.1f s (%.1f GB/s)", size, device.name, times.weights_s, speed)
    return loaded, times


@contextmanager
def explain_out_of_memory(
    device: DevicePlan, allocated: Mapping[str, int], while_: str
) -> Iterator[None]:
    """Turn a GPU's out-of-memory error into one that says what was planned and what is free."""
    try:
        yield
    except Exception as error:
        if device.kind == "cpu" or not is_out_of_memory(error):
            raise
        lines = device.allocated
        planned, held = sum(lines.values()), sum(allocated.get(line, 0) for line in lines)
        name = physical_name(device.name)
        others = tuple(who for who in gpu_holders(name) if who.pid != os.getpid())
        memory = replace(gpu_memory(name), holders=others)
        told = out_of_memory(while_, device.name, planned, held, memory)
        raise DeviceError(told.message, hint=told.hint) from error


def _open_gpu_stage(
    device: DevicePlan,
    config: ModelConfig,
    loaded: Model,
    sampler: DeviceSampler | None,  # of the last stage; None: that is a CPU
    *,
    ends: bool,  # this is the last stage
) -> GpuStage:
    """Return the stage of a GPU, before its steps are captured."""
    settings = device.settings
    if device.kind == "hip":
        log.warning(
            "kernels: %s runs Triton's kernels and plain ones, which have run on no AMD GPU yet: "
            "compare answers with those of --device cpu; steps are not captured, and slow",
            device.name,
        )
    elif not loaded.capturable:
        log.warning(
            "kernels: not all layers of this model have fused kernels that compute in %s; its "
            "steps are not captured, and slow",
            settings.compute_type,
        )
    windows = {
        layer.mixer.window
        for layer in config.layers
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.window
    }
    rings = frozenset(settings.window_pages(window) // settings.parallel for window in windows)
    if ends:
        return GpuStage(device.name, loaded, settings, rings, sampler)
    drawn = None
    if sampler is not None and str(sampler.tokens.device) == torch_name(device.name):
        drawn = sampler.tokens  # on the same GPU, so that they need no copy
    return GpuStage(device.name, loaded, settings, rings, None, drawn)


def _capture(stage: GpuStage, parallel: int, progress: LoadProgress) -> float:
    """Compile a stage's kernels and capture its steps; return the seconds that this took."""
    started = time.perf_counter()
    stage.capture(lambda done, total: progress(done, total, "capturing"))
    seconds = time.perf_counter() - started
    log.info("capture: steps of up to %d sequences in %.1f s", parallel, seconds)
    return seconds
