"""start_pipeline(): a planned model becomes weights on devices."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch

from headroom.errors import DeviceError
from headroom.layers.config import AttentionConfig
from headroom.layers.device_rows import FEW_ROWS
from headroom.layers.draws import DeviceSampler
from headroom.layers.gpu import gpu_memory
from headroom.layers.threads import set_threads, warn_of_slow_kernels
from headroom.memory.layout import DevicePlan
from headroom.memory.plan import Plan
from headroom.memory.readiness import out_of_memory
from headroom.models.describe import ModelDescription
from headroom.models.load import load_model
from headroom.models.model import Model
from headroom.split.device_stage import DeviceStage
from headroom.split.pipeline import Pipeline
from headroom.split.stages import Stage
from headroom.units import gib

log = logging.getLogger(__name__)


def start_pipeline(plan: Plan, model: ModelDescription) -> Pipeline:
    """Load the model as the plan says."""
    started = time.perf_counter()
    set_threads(plan.settings.threads, pin=plan.settings.pin_threads)
    warn_of_slow_kernels(plan.devices[0].name)
    allocated: Counter[str] = Counter()

    def count(line: str, size_bytes: int) -> None:
        allocated[line] += size_bytes

    device = plan.devices[0]
    # Weights go to the current GPU, whatever its number.
    current = torch.cuda.device(device.name) if device.kind == "cuda" else nullcontext()
    with current, memory_told(device, allocated, "loading weights"):
        loaded = load_model(model.config, model.checkpoint.tensors, plan, count)
    log.info(
        "load: %d layers on %s, %s in %.1f s",
        len(model.config.layers),
        device.name,
        gib(sum(allocated.values())),
        time.perf_counter() - started,
    )
    if device.kind != "cuda":
        stage: Stage | DeviceStage = Stage(device.name, loaded)
    else:
        with memory_told(device, allocated, "capturing steps"):
            stage = _device_stage(loaded, plan, model, allocated)
    planned = sum(device.allocated.values())
    return Pipeline(stage, model.config.vocab, allocated, planned)


@contextmanager
def memory_told(device: DevicePlan, allocated: Mapping[str, int], while_: str) -> Iterator[None]:
    """Turn a GPU's end of memory into an error that says what was planned and what is free."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        planned, held = sum(device.allocated.values()), sum(allocated.values())
        told = out_of_memory(while_, device.name, planned, held, gpu_memory(device.name))
        raise DeviceError(told.message, hint=told.hint) from error


def _device_stage(
    loaded: Model, plan: Plan, model: ModelDescription, allocated: Counter[str]
) -> DeviceStage:
    """Return the stage of a GPU, its steps captured."""
    device, settings = plan.devices[0].name, plan.settings
    if not loaded.capturable:
        log.warning(
            "kernels: not all layers of this model have fused kernels that compute in %s; its "
            "steps are not captured, and slow",
            settings.dtype,
        )
    windows = {
        layer.mixer.window
        for layer in model.config.layers
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.window
    }
    rings = frozenset(settings.window_pages(window) // settings.parallel for window in windows)
    sampler = DeviceSampler.allocate(FEW_ROWS, model.config.vocab, device)
    allocated["sampler"] += sampler.nbytes
    stage = DeviceStage(device, loaded, settings, rings, sampler)
    started = time.perf_counter()
    stage.capture()
    log.info(
        "capture: steps of up to %d sequences in %.1f s",
        settings.parallel,
        time.perf_counter() - started,
    )
    return stage
