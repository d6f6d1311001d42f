"""start_pipeline(): a planned model becomes weights on devices."""

import logging
import time
from collections import Counter

from headroom.layers.config import AttentionConfig
from headroom.layers.threads import set_threads, warn_of_slow_kernels
from headroom.memory.plan import Plan
from headroom.models.describe import ModelDescription
from headroom.models.load import load_model
from headroom.models.model import Model
from headroom.split.device_stage import DeviceStage
from headroom.split.memory_check import check_memory, open_device_memory
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

    device = plan.devices[0].name
    open_device_memory(device)
    loaded = load_model(model.config, model.checkpoint.tensors, plan, count)
    log.info(
        "load: %d layers on %s, %s in %.1f s",
        len(model.config.layers),
        device,
        gib(sum(allocated.values())),
        time.perf_counter() - started,
    )
    stage = _stage(device, loaded, plan, model)
    check_memory(plan, allocated)
    return Pipeline(stage, model.config.vocab, allocated)


def _stage(device: str, loaded: Model, plan: Plan, model: ModelDescription) -> Stage | DeviceStage:
    if not device.startswith("cuda"):
        return Stage(device, loaded)
    windows = {
        layer.mixer.window
        for layer in model.config.layers
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.window
    }
    settings = plan.settings
    rings = frozenset(settings.window_pages(window) // settings.parallel for window in windows)
    stage = DeviceStage(device, loaded, settings, rings)
    started = time.perf_counter()
    stage.capture()
    log.info(
        "capture: steps of up to %d rows in %.1f s",
        settings.parallel,
        time.perf_counter() - started,
    )
    return stage
