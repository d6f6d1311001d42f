"""start_pipeline(): a planned model becomes weights on devices."""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from headroom.errors import DeviceError, is_out_of_memory
from headroom.experts.exchange import StoreSwaps
from headroom.experts.placement import ExpertPlacement
from headroom.families.config import AttentionConfig
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.native.module import MISSING, MODULE, POOL
from headroom.layers.draws import DeviceSampler
from headroom.machine.devices import torch_name
from headroom.machine.drivers import gpu_holders
from headroom.machine.readiness import GpuMemory, out_of_memory
from headroom.machine.torch_gpus import gpu_memory
from headroom.plan.describe import ModelDescription
from headroom.plan.layout import DevicePlan
from headroom.plan.plan import Plan
from headroom.split.build import load_model
from headroom.split.device_stage import DeviceStage
from headroom.split.memory_check import check_memory, open_device_memory
from headroom.split.model import Model
from headroom.split.pipeline import LoadTimes, Pipeline
from headroom.split.placing import even_placement, expert_layers
from headroom.split.stages import Stage
from headroom.units import gib

log = logging.getLogger(__name__)

# That files fill.
WEIGHT_LINES = ("core_weights", "embeddings", "head", "hot_experts", "cold_experts")
Progress = Callable[[int, int], None]  # told the bytes of weights that are loaded, and of all


def start_pipeline(
    plan: Plan,
    model: ModelDescription,
    progress: Progress = lambda done, total: None,
    placement: ExpertPlacement | None = None,
) -> Pipeline:
    """Load the model as the plan says, and tell how far it is.

    Where the plan leaves experts cold, a placement says which; the even one if none is given.
    """
    set_threads(plan.settings.threads, pin=plan.settings.pin_threads)
    warn_of_slow_kernels(plan.devices[0].name)
    allocated: Counter[str] = Counter()
    device = plan.devices[0]
    if placement is None and device.hot_experts < device.total_experts:
        placement = even_placement(model.shape, plan)
    lines = device.allocated | {line.name: line.bytes for line in plan.host.lines}
    total = sum(lines.get(line, 0) for line in WEIGHT_LINES)

    def count(line: str, size_bytes: int) -> None:
        allocated[line] += size_bytes
        if line in WEIGHT_LINES:
            progress(min(sum(allocated[line] for line in WEIGHT_LINES), total), total)

    open_device_memory(device.name)
    # Weights go to the current GPU, whatever its number.
    current = nullcontext() if device.kind == "cpu" else torch.cuda.device(torch_name(device.name))
    with memory_told(device, allocated, "loading weights"), current:
        progress(0, total)
        started = time.perf_counter()  # by now CUDA is
        loaded = load_model(model.config, model.checkpoint.tensors, plan, count, placement)
        times = LoadTimes(
            weights_bytes=sum(allocated[line] for line in WEIGHT_LINES),
            weights_s=time.perf_counter() - started,
        )
        progress(total, total)
    _log_load(device.name, times)
    if device.kind == "cpu":
        stage: Stage | DeviceStage = Stage(device.name, loaded)
    else:
        with memory_told(device, allocated, "capturing steps"):
            stage = _device_stage(loaded, plan, model, allocated)
            times = replace(times, capture_s=_capture(stage, plan.settings.parallel))
    check_memory(plan, allocated)
    planned = sum(device.allocated.values())
    swaps, meter = None, None
    if (hybrid := loaded.hybrid) is not None:
        layers, meter = expert_layers(model.shape, plan), hybrid.meter
        if hybrid.store.cold_bytes:  # else there is nothing to swap with
            swaps = StoreSwaps(hybrid.store, layers, same_bits=hybrid.same_bits)
    config = model.config
    refuses = config.refuses_trees
    pipeline = Pipeline(stage, config.vocab, allocated, planned, swaps, meter, refuses)
    pipeline.load_times = times
    return pipeline


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


def _log_load(device: str, times: LoadTimes) -> None:
    size, speed = gib(times.weights_bytes), times.bytes_per_s / 1e9
    log.info("load: %s on %s in %.1f s (%.1f GB/s)", size, device, times.weights_s, speed)


@contextmanager
def memory_told(device: DevicePlan, allocated: Mapping[str, int], while_: str) -> Iterator[None]:
    """Turn a GPU's end of memory into an error that says what was planned and what is free."""
    try:
        yield
    except Exception as error:
        if device.kind == "cpu" or not is_out_of_memory(error):
            raise
        lines = device.allocated
        planned, held = sum(lines.values()), sum(allocated.get(line, 0) for line in lines)
        others = tuple(who for who in gpu_holders(device.name) if who.pid != os.getpid())
        memory = GpuMemory(*gpu_memory(device.name), others)
        told = out_of_memory(while_, device.name, planned, held, memory)
        raise DeviceError(told.message, hint=told.hint) from error


def _device_stage(
    loaded: Model, plan: Plan, model: ModelDescription, allocated: Counter[str]
) -> DeviceStage:
    """Return the stage of a GPU, its steps not captured yet."""
    device, settings = plan.devices[0].name, plan.settings
    if plan.devices[0].kind == "hip":
        log.warning(
            "kernels: %s runs Triton's kernels and plain ones, which have run on no AMD GPU yet: "
            "compare answers with those of --device cpu; steps are not captured, and slow",
            device,
        )
    elif not loaded.capturable:
        log.warning(
            "kernels: not all layers of this model have fused kernels that compute in %s; its "
            "steps are not captured, and slow",
            settings.compute_type,
        )
    windows = {
        layer.mixer.window
        for layer in model.config.layers
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.window
    }
    rings = frozenset(settings.window_pages(window) // settings.parallel for window in windows)
    sampler = DeviceSampler.allocate(DECODE_ROWS, model.config.vocab, device)
    allocated["logits"] += sampler.nbytes
    return DeviceStage(device, loaded, settings, rings, sampler)


def _capture(stage: DeviceStage, parallel: int) -> float:
    """Compile what a stage's steps need, capture them, and return the seconds that it took."""
    started = time.perf_counter()
    stage.capture()
    seconds = time.perf_counter() - started
    log.info("capture: steps of up to %d sequences in %.1f s", parallel, seconds)
    return seconds
