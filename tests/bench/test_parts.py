"""Parts of a step: a timeline's kernels go to the part whose marker came last."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.bench import parts
from headroom.bench.figures import BenchSettings, DecodeFigure, Figures, PromptFigure
from headroom.bench.parts import KernelTime, marked, part_times
from headroom.bench.traffic import Traffic
from headroom.bench.workload import run_steps
from headroom.errors import HeadroomError
from headroom.families.files import open_checkpoint
from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf
from headroom.layers.batch import Batch
from headroom.layers.step_timing import MARKER, STEP_PARTS
from headroom.llm import OpenedModel, open_engine
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.split.stage import StepResult
from tests.stand_in.gpu import StandInGpu, stand_in_gpu

ALL = slice(None)
SETTINGS = BenchSettings(
    prompts=(16,), contexts=(8,), batches=(1,), tokens=2, rounds=1, warm=1, steps=2
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """A GPU whose kernels take a microsecond each, and a profiler that sees them."""
    with stand_in_gpu(monkeypatch, computes=False) as made:
        monkeypatch.setattr(parts, "profile", made.profile)
        yield made


@pytest.fixture
def opened(gpu: StandInGpu, tmp_path: Path) -> Iterator[OpenedModel]:
    """A model of three recurrent layers and one with attention, on the GPU."""
    path = tmp_path / "m.gguf"
    write_gguf(Source(find_recipe("qwen35", "tiny", 4), 0), path, "q8_0")
    options = Options(model=str(path), device="cuda:0", context=128, parallel=2, chunk=64)
    model = open_engine(describe(open_checkpoint(path)), options, measuring=True)
    yield model
    model.engine.close()


def markers_of_next_steps(opened: OpenedModel, gpu: StandInGpu) -> list[str]:
    """Run steps that are measured by nobody; return the markers that they launch."""
    before = len(gpu.queues.timeline)
    run_steps(opened, 8, 2, batch=1, rows=1)
    ran = [kernel.name for kernel in gpu.queues.timeline[before:]]
    assert "recur" in ran
    return [name for name in ran if marked(name)]


def test_kernels_of_profiled_steps_are_sorted_by_markers(
    opened: OpenedModel, gpu: StandInGpu
) -> None:
    figures = Figures(prompts=[PromptFigure(tokens=16, seconds=1.0, operations=1.0)])
    parts.measure_parts(opened, figures, SETTINGS)
    (part,) = figures.parts
    times = part.times
    assert set(times.parts) == {"recurrent", "attention", "dense", "head", "other"}
    # Each kernel takes a microsecond: three recurrent layers, and one with attention.
    assert times.kernels["recurrent"]["recur"] == pytest.approx(3e-6)
    assert times.kernels["attention"]["decode"] == pytest.approx(1e-6)
    assert times.kernels["dense"]["gated"] == pytest.approx(3e-6)
    assert times.kernels["head"]["product"] == pytest.approx(1e-6)
    assert times.kernels["other"]["embed"] == pytest.approx(1e-6)
    for kernel, own in (("recur", "recurrent"), ("decode", "attention"), ("embed", "other")):
        assert [name for name, kernels in times.kernels.items() if kernel in kernels] == [own]
    assert "cudaLaunchKernel" not in str(times.kernels)  # the host's own
    # Between the starts of kernels lie two microseconds, and markers are no work.
    assert times.step_s == pytest.approx(2 * times.busy_s + 2e-6 * markers_of_step(gpu))
    assert part.step_s == 1.0  # undisturbed by markers
    assert part.gaps_s == pytest.approx(1 - times.busy_s)
    assert markers_of_next_steps(opened, gpu) == []  # captured steps with markers are dropped


def markers_of_step(gpu: StandInGpu) -> int:
    """Return the number of markers of the first step with any, counted on the timeline."""
    names = [marked(kernel.name) for kernel in gpu.queues.timeline]
    first = names.index("step")
    second = names.index("step", first + 1)
    return sum(map(bool, names[first:second]))


def test_a_batch_after_prompts_of_several_steps_has_the_parts_of_the_network(
    opened: OpenedModel, gpu: StandInGpu
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
    parts.measure_parts(opened, figures, SETTINGS)
    (part,) = figures.parts
    assert (part.what, part.batch, part.context, part.step_s) == ("network", 2, 80, 1.5)
    assert ran == [(2, [90, 90])] * 6  # once to be captured and once looked at, no prompt
    assert part.times.steps == 2
    assert part.times.kernels["recurrent"]["recur"] == pytest.approx(3e-6)
    assert markers_of_next_steps(opened, gpu) == []


def timeline(*entries: tuple[str, float]) -> list[KernelTime]:
    """Kernels one after another, a second between them; names of parts stand for markers."""
    found, now = [], 0.0
    for name, seconds in entries:
        found.append(KernelTime(name, now, now + seconds))
        now += seconds + 1
    return found


def marker(name: str) -> tuple[str, float]:
    return MARKER + name, 0.25


def test_kernels_belong_to_the_marker_before_them() -> None:
    step = [
        marker("step"), ("embed", 1.0), marker("attention"), ("product", 2.0), ("decode", 3.0),
        marker("other"), ("copy", 0.5), marker("head"), ("product", 4.0),
    ]  # fmt: skip
    times = part_times(timeline(*step, *step, marker("step")), ALL)
    assert times.steps == 2
    assert times.parts == {"other": 1.5, "attention": 5.0, "head": 4.0}
    assert times.kernels["attention"] == {"decode": 3.0, "product": 2.0}
    assert list(times.kernels["attention"]) == ["decode", "product"]  # the longest first
    assert times.step_s == pytest.approx(10.5 + 4 * 0.25 + 9)


def test_markers_are_known_however_their_names_are_written() -> None:
    assert marked(MARKER + "head") == "head"
    assert marked(f"void {MARKER}sampling()") == "sampling"
    assert marked("product") == ""


def test_only_the_chosen_steps_count() -> None:
    prompt = [marker("step"), marker("dense"), ("long", 9.0)]
    decode = [marker("step"), marker("dense"), ("short", 1.0)]
    seen = timeline(*prompt, *decode, *decode, marker("step"), ("half a step", 5.0))
    assert part_times(seen, slice(0, 1)).parts == {"dense": 9.0}
    assert part_times(seen, slice(-2, None)).parts == {"dense": 1.0}


def test_time_that_kernels_share_is_counted_once() -> None:
    kernels = [
        KernelTime(MARKER + "step", 0.0, 0.1),
        KernelTime("first", 1.0, 3.0),
        KernelTime("overlaps", 2.0, 4.0),
        KernelTime("within", 2.5, 3.5),
        KernelTime(MARKER + "step", 5.0, 5.1),
    ]
    times = part_times(kernels[::-1], ALL)
    assert times.kernels == {"other": {"first": 2.0, "overlaps": 1.0, "within": 0.0}}
    assert times.busy_s == 3.0


def test_a_timeline_without_a_whole_step_is_refused() -> None:
    with pytest.raises(HeadroomError, match=r"saw 2 kernels and 1 starts of steps.*--no-parts"):
        part_times(timeline(marker("step"), ("product", 1.0)), ALL)


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(STEP_PARTS), st.floats(0, 10)), max_size=6),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_parts_together_are_all_that_kernels_took(steps: list[list[tuple[str, float]]]) -> None:
    entries = []
    for step in steps:
        entries.append(marker("step"))
        for part, seconds in step:
            entries += [marker(part), (f"kernel of {part}", seconds), marker("other")]
    times = part_times(timeline(*entries, marker("step")), ALL)
    total = sum(seconds for step in steps for _, seconds in step)
    assert times.busy_s * len(steps) == pytest.approx(total)
    assert times.busy_s <= times.step_s
    for part, kernels in times.kernels.items():
        assert sum(kernels.values()) == pytest.approx(times.parts[part])


def test_copies_over_the_link_do_not_keep_a_gpu_busy() -> None:
    kernels = [
        KernelTime(MARKER + "step", 0.0, 0.5),
        KernelTime("Memcpy HtoD (Pinned -> Device)", 1.0, 4.0),
        KernelTime("product", 2.0, 3.0),
        KernelTime("other product", 2.5, 3.5),
        KernelTime("Memcpy DtoD (Device -> Device)", 5.0, 6.0),
        KernelTime(MARKER + "step", 8.0, 8.5),
    ]
    times = part_times(kernels, ALL)
    assert times.kernel_s == 2.5
    assert times.link_s == 3.0
