"""A model that is open for measuring: its engine, and what stands behind it."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from headroom.engine.engine import Engine
from headroom.families.files import open_checkpoint
from headroom.machine.devices import torch_name
from headroom.options import Options
from headroom.plan.describe import ModelDescription, describe
from headroom.plan.plan import Plan
from headroom.plan.shape import ModelShape
from headroom.split.choice import make_run_plan
from headroom.split.expert_records import read_records
from headroom.split.launch import Progress, start_pipeline
from headroom.split.memory_check import limit_memory
from headroom.split.pipeline import LoadTimes, Pipeline
from headroom.split.placing import find_placement
from headroom.split.unused import tell_unmeasured
from headroom.split.upkeep import open_upkeep

Say = Callable[[str], None]  # is told what is being done


@dataclass(frozen=True, slots=True)
class Loading:
    """Where the seconds went until a model was ready."""

    total_s: float
    planning_s: float  # with choosing which experts are hot
    times: LoadTimes

    @property
    def other_s(self) -> float:
        """What neither planning nor weights nor captures took: starting CUDA, threads, checks."""
        return self.total_s - self.planning_s - self.times.weights_s - self.times.capture_s

    def as_json(self) -> dict[str, float]:
        """Return it as plain data."""
        return {
            "planning_s": self.planning_s,
            **asdict(self.times),
            "weights_bytes_per_s": self.times.bytes_per_s,
            "other_s": self.other_s,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A loaded model."""

    engine: Engine
    pipeline: Pipeline
    plan: Plan
    shape: ModelShape
    loading: Loading

    @property
    def device(self) -> str:
        """Where it runs: "cpu", "cuda:0" or "hip:0"."""
        return self.plan.devices[0].name

    @property
    def place(self) -> str:
        """The same as torch calls it."""
        return torch_name(self.device)

    @property
    def on_gpu(self) -> bool:
        """Whether its steps run on a GPU, beside the host."""
        return self.device != "cpu"


def read_model(path: Path) -> ModelDescription:
    """Return what a model's headers say."""
    return describe(open_checkpoint(path))


def open_model(model: ModelDescription, options: Options, say: Say = lambda text: None) -> Opened:
    """Plan and load a model as every command does; `say` is told how far that is."""
    started = time.perf_counter()
    tell_unmeasured(options)
    plan = make_run_plan(model.shape, options)
    # Random prompts are no sign of what people ask: choices are counted and not saved.
    records = read_records(model, options, measuring=True)
    placement = find_placement(
        model.shape, plan, options, model.checkpoint.identity, records.file.counts
    )
    limit_memory(plan, options.device_memory)
    planned = time.perf_counter()
    pipeline = start_pipeline(plan, model, _percent(say), placement)
    upkeep = open_upkeep(pipeline, records)
    engine = Engine(pipeline, plan.settings, options.queue, upkeep)
    total_s = time.perf_counter() - started
    loading = Loading(total_s, planned - started, pipeline.load_times)
    return Opened(engine, pipeline, plan, model.shape, loading)


def _percent(say: Say) -> Progress:
    """Return what says how much of the weights is loaded, and when what follows them begins."""

    def show(done: int, total: int) -> None:
        loaded = f"loading, {100 * done // max(total, 1)} %"
        say(loaded if done < total else "starting: kernels are compiled, steps captured")

    return show
