"""start_pipeline(): loads a planned model to its device and opens the pipeline that runs it."""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from headroom.errors import DeviceError, is_out_of_memory
from headroom.experts.exchange import StoreExchanges
from headroom.experts.placement import ExpertPlacement
from headroom.experts.taps import RouterTap
from headroom.families.config import AttentionConfig, ModelConfig
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.native.module import MISSING, MODULE, POOL
from headroom.layers.draws import DeviceSampler
from headroom.machine.devices import torch_name
from headroom.machine.drivers import gpu_holders
from headroom.machine.readiness import out_of_memory
from headroom.machine.torch_gpus import gpu_memory
from headroom.plan.cost_model import exchange_speeds
from headroom.plan.describe import ModelDescription
from headroom.plan.layout import DevicePlan
from headroom.plan.lines import NOT_ALLOCATED
from headroom.plan.plan import Plan
from headroom.plan.settings import PlanSettings
from headroom.progress import LoadProgress, ignore_progress
from headroom.split.build import load_model
from headroom.split.gpu_stage import GpuStage
from headroom.split.memory_check import check_memory, held_already, open_device_memory
from headroom.split.model import Model
from headroom.split.pipeline import LoadTimes, Pipeline
from headroom.split.placing import even_placement, expert_layers
from headroom.split.stage import CpuStage, Stage
from headroom.units import gib

log = logging.getLogger(__name__)

# The plan's lines that hold tensors of the checkpoint.
WEIGHT_LINES = ("core_weights", "embeddings", "head", "hot_experts", "cold_experts")


def start_pipeline(
    plan: Plan,
    model: ModelDescription,
    progress: LoadProgress = ignore_progress,
    placement: ExpertPlacement | None = None,
    tap: RouterTap | None = None,
) -> Pipeline:
    """Load the model as the plan says, and return the pipeline that runs it.

    If the plan leaves experts cold, `placement` says which; without one, each layer has its planned
    number of hot experts, evenly spread. `tap` records or replaces the picks of all routers.
    """
    device, settings = plan.devices[0], plan.settings  # the engine runs one stage
    set_threads(settings.threads, pin=settings.pin_threads)
    warn_of_slow_kernels(device.name)
    if placement is None and device.hot_experts < device.total_experts:
        placement = even_placement(model.shape, plan)
    allocated: Counter[str] = Counter()  # bytes by the plan's line
    held_before = held_already(device.name)
    open_device_memory(device.name)
    loaded, times = _load(plan, device, model, placement, tap, allocated, progress)
    stage: Stage
    if device.kind == "cpu":
        stage = CpuStage(device.name, loaded)
    else:
        with explain_out_of_memory(device, allocated, "capturing steps"):
            gpu_stage = _open_gpu_stage(device, settings, model.config, loaded, allocated)
            times = replace(times, capture_s=_capture(gpu_stage, settings.parallel, progress))
        stage = gpu_stage
    check_memory(plan, device, allocated, held_before)
    exchanges, meter, shares, policies = None, None, None, None
    if (cold := loaded.cold_experts) is not None:
        meter, shares, policies = cold.meter, cold.shares, cold.policies
        # Without cold experts in host memory there are none to exchange; a cache does it by itself.
        if cold.store.cold_bytes and not cold.store.is_cached:
            layers = expert_layers(model.shape, plan)
            exchanges = StoreExchanges(
                cold.store,
                layers,
                same_bits=cold.same_bits,
                speeds=exchange_speeds(plan.cold_speeds, settings.cold, cold.store.pinned),
            )
    return Pipeline(
        stage,
        model.config.vocab,
        allocated,
        planned={**_host_lines(plan), device.name: device.allocated},
        experts=exchanges,
        meter=meter,
        shares=shares,
        policies=policies,
        refuses_trees=model.config.refuses_trees,
        load_times=times,
    )


def _host_lines(plan: Plan) -> dict[str, dict[str, int]]:
    """Return what the engine allocates of the host memory behind a GPU, by line."""
    lines = {line.name: line.bytes for line in plan.host.lines if line.name not in NOT_ALLOCATED}
    return {"cpu": lines} if lines else {}


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
    allocated: Counter[str],
    progress: LoadProgress,
) -> tuple[Model, LoadTimes]:
    """Load a device's layers; count what they allocate and report the progress."""
    planned = device.allocated | {line.name: line.bytes for line in plan.host.lines}
    total = sum(planned.get(line, 0) for line in WEIGHT_LINES)

    def count(line: str, size_bytes: int) -> None:
        allocated[line] += size_bytes
        if line in WEIGHT_LINES:
            progress(min(sum(allocated[line] for line in WEIGHT_LINES), total), total)

    # Layers allocate on torch's current GPU.
    current = nullcontext() if device.kind == "cpu" else torch.cuda.device(torch_name(device.name))
    with explain_out_of_memory(device, allocated, "loading weights"), current:
        progress(0, total)
        started = time.perf_counter()  # after CUDA has started
        tensors = model.checkpoint.tensors
        loaded = load_model(model.config, tensors, plan, device, count, placement, tap)
        times = LoadTimes(
            weights_bytes=sum(allocated[line] for line in WEIGHT_LINES),
            weights_s=time.perf_counter() - started,
        )
        progress(total, total)
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
        others = tuple(who for who in gpu_holders(device.name) if who.pid != os.getpid())
        memory = replace(gpu_memory(device.name), holders=others)
        told = out_of_memory(while_, device.name, planned, held, memory)
        raise DeviceError(told.message, hint=told.hint) from error


def _open_gpu_stage(
    device: DevicePlan,
    settings: PlanSettings,
    config: ModelConfig,
    loaded: Model,
    allocated: Counter[str],
) -> GpuStage:
    """Return the stage of a GPU, before its steps are captured."""
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
    sampler = DeviceSampler.allocate(DECODE_ROWS, config.vocab, device.name)
    allocated["logits"] += sampler.nbytes
    return GpuStage(device.name, loaded, settings, rings, sampler)


def _capture(stage: GpuStage, parallel: int, progress: LoadProgress) -> float:
    """Compile a stage's kernels and capture its steps; return the seconds that this took."""
    started = time.perf_counter()
    stage.capture(lambda done, total: progress(done, total, "capturing"))
    seconds = time.perf_counter() - started
    log.info("capture: steps of up to %d sequences in %.1f s", parallel, seconds)
    return seconds
