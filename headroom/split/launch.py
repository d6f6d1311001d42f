"""start_pipeline(): a planned model becomes weights on devices."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from headroom.layers.config import AttentionConfig
from headroom.layers.threads import set_threads, warn_of_slow_kernels
from headroom.memory.plan import Plan
from headroom.models.describe import ModelDescription
from headroom.models.load import load_model
from headroom.models.model import Model
from headroom.split.device_stage import DeviceStage
from headroom.split.pipeline import Pipeline
from headroom.split.stages import Stage
from headroom.units import gib

log = logging.getLogger(__name__)

WEIGHT_LINES = ("core_weights", "embeddings", "head", "hot_experts")  # that files fill
Progress = Callable[[int, int], None]  # told the bytes of weights that are loaded, and of all


def start_pipeline(
    plan: Plan, model: ModelDescription, progress: Progress = lambda done, total: None
) -> Pipeline:
    """Load the model as the plan says, and tell how far it is."""
    started = time.perf_counter()
    set_threads(plan.settings.threads, pin=plan.settings.pin_threads)
    warn_of_slow_kernels(plan.devices[0].name)
    allocated: Counter[str] = Counter()
    lines, device = plan.devices[0].allocated, plan.devices[0].name
    total = sum(lines.get(line, 0) for line in WEIGHT_LINES)

    def count(line: str, size_bytes: int) -> None:
        allocated[line] += size_bytes
        if line in WEIGHT_LINES:
            progress(min(sum(allocated[line] for line in WEIGHT_LINES), total), total)

    progress(0, total)
    loaded = load_model(model.config, model.checkpoint.tensors, plan, count)
    progress(total, total)
    _log_load(device, sum(allocated[line] for line in WEIGHT_LINES), time.perf_counter() - started)
    return Pipeline(_stage(device, loaded, plan, model), model.config.vocab, allocated)


def _log_load(device: str, size_bytes: int, seconds: float) -> None:
    speed = size_bytes / seconds / 1e9
    log.info("load: %s on %s in %.1f s (%.1f GB/s)", gib(size_bytes), device, seconds, speed)


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
