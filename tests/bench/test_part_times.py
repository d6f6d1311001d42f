"""Parts of a step on a GPU, with a profiler and kernels that are not there."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from headroom.bench import part_times
from headroom.bench.figures import BenchSettings, DecodeFigure, Figures, PromptFigure
from headroom.bench.opening import Opened, open_model, read_model
from headroom.bench.traffic import Traffic
from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf
from headroom.layers.batch import Batch
from headroom.options import Options
from headroom.split.results import StepResult

SETTINGS = BenchSettings(
    prompts=(16,), contexts=(8,), batches=(1,), tokens=2, rounds=1, warm=1, steps=2
)


class FakeGpu:
    """A timeline on which every marker is followed by one microsecond of work."""

    def __init__(self) -> None:
        self.kernels: list[Any] = []
        self.forgotten = 0

    def compile_kernel(self, source: str, name: str) -> Any:
        def launch(grid: Any, block: Any, args: Any) -> None:
            for kernel in (name, "work of " + name.split("_")[-1]):
                start = 2.0 * len(self.kernels)
                times = SimpleNamespace(start=start, end=start + 1)
                kind = DeviceType.CUDA
                self.kernels.append(
                    SimpleNamespace(name=kernel, time_range=times, device_type=kind)
                )

        return launch

    def forget_captures(self) -> None:
        self.forgotten += 1

    def profile(self, activities: Any, acc_events: bool) -> Any:
        assert acc_events  # or torch warns
        return FakeProfile(self)


@dataclass
class FakeProfile:
    """Sees the kernels that start while it is open, and a call of the host."""

    gpu: FakeGpu
    first: int = 0
    last: int = 0

    def __enter__(self) -> "FakeProfile":
        self.first = len(self.gpu.kernels)
        return self

    def __exit__(self, *error: object) -> None:
        self.last = len(self.gpu.kernels)

    def events(self) -> list[Any]:
        times = SimpleNamespace(start=0.0, end=1e9)
        host = SimpleNamespace(name="launch", time_range=times, device_type=DeviceType.CPU)
        return [host, *self.gpu.kernels[self.first : self.last]]


@dataclass(frozen=True, slots=True, eq=False)
class OnFakeGpu(Opened):
    """A model of the CPU that says it is elsewhere."""

    @property
    def on_gpu(self) -> bool:
        return True


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def opened(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnFakeGpu]:
    path = tmp_path / "m.gguf"
    write_gguf(Source(find_recipe("qwen35", "tiny", 4), 0), path, "q8_0")
    options = Options(model=str(path), threads=1, context=128, parallel=2, chunk=64)
    real = open_model(read_model(path), options)
    monkeypatch.setattr("headroom.layers.step_timing.compile_kernel", gpu.compile_kernel)
    monkeypatch.setattr(part_times, "profile", gpu.profile)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr(type(real.pipeline), "forget_captures", lambda self: gpu.forget_captures())
    yield OnFakeGpu(real.engine, real.pipeline, real.plan, real.shape, real.loading)
    real.engine.close()


def test_kernels_of_profiled_steps_are_sorted_by_markers(opened: OnFakeGpu, gpu: FakeGpu) -> None:
    figures = Figures(prompts=[PromptFigure(tokens=16, seconds=1.0, operations=1.0)])
    part_times.measure_parts(opened, figures, SETTINGS)
    (part,) = figures.parts
    times = part.times
    assert times.parts["recurrent"] == pytest.approx(3e-6)  # three such layers
    assert times.parts["attention"] == pytest.approx(1e-6)
    assert times.parts["dense"] == pytest.approx(4e-6)
    assert "launch" not in str(times.kernels)  # the host's own
    assert set(times.parts) == {
        "recurrent", "attention", "dense", "head", "sampling", "other",
    }  # fmt: skip
    assert part.step_s == 1.0  # undisturbed by markers
    assert part.gaps_s == pytest.approx(1 - times.busy_s)
    assert gpu.forgotten == 2  # steps with markers are captured, and thrown away


def test_a_batch_after_prompts_of_several_steps_has_the_parts_of_the_network(
    opened: OnFakeGpu, gpu: FakeGpu
) -> None:
    figure = DecodeFigure(
        batch=2, context=80, mean_context=90.4, step_s=2.0, pipeline_s=1.5,
        traffic=Traffic(weights=1.0, experts=0.0, rows=0.0, cache=0.0, state=0.0),
    )  # fmt: skip
    shorter = replace(figure, context=70)
    figures = Figures(decodes=[shorter, figure])
    ran: list[tuple[int, list[int]]] = []
    step = opened.pipeline.step

    def note(batch: Batch, draws: Any = ()) -> StepResult:
        ran.append((len(batch.tokens), [span.start for span in batch.spans]))
        return step(batch, draws)

    opened.pipeline.step = note  # type: ignore[method-assign]
    part_times.measure_parts(opened, figures, SETTINGS)
    (part,) = figures.parts
    assert (part.what, part.batch, part.context, part.step_s) == ("network", 2, 80, 1.5)
    assert ran == [(2, [90, 90])] * 6  # once to be captured and once looked at, no prompt
    assert part.times.steps == 2
    assert part.times.parts["recurrent"] == pytest.approx(3e-6)
    assert gpu.forgotten == 2
