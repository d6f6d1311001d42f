"""Where the time of a step goes: by a clock on the CPU, by markers and a profiler on a GPU."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from headroom.bench.figures import BenchSettings, DecodeFigure, Figures, PartFigure, PartTimes
from headroom.bench.workload import ConcurrentRequests, run_steps
from headroom.engine.request import SamplingParams
from headroom.errors import HeadroomError
from headroom.layers.step_timing import (
    MARKER,
    STEP,
    ClockRecorder,
    MarkerRecorder,
    StepTimes,
    recording,
)
from headroom.llm import OpenedModel

PROMPT_ANSWER = 2  # tokens generated after a measured prompt, so that another step ends its last
_MARKED = re.compile(rf"\b{MARKER}(\w+)")
_OVER_LINK = re.compile(r"Memcpy (HtoD|DtoH)")  # the profiler's names of copies to and from a GPU


@dataclass(frozen=True, slots=True)
class KernelTime:
    """When one kernel or copy ran on the GPU, in seconds."""

    name: str
    start: float
    end: float


def measure_parts(opened: OpenedModel, figures: Figures, settings: BenchSettings) -> None:
    """Add to `figures` the parts of some measured steps: decode, verify, and the longest prompt."""
    decodes = figures.decodes
    alone = [figure for figure in decodes if figure.batch == 1]
    chunk = opened.plan.settings.chunk
    # A batch whose prompts take several steps is left out: some answers end before others begin.
    many = [figure for figure in decodes if figure.batch * figure.context <= chunk]
    most = [max(many, key=lambda figure: figure.batch)] if many else []
    for figure in [*alone, *(one for one in most if one not in alone)]:
        times = _parts_of_decode(opened, figure.context, figure.batch, settings)
        # On a GPU the markers take time, so the step time measured without them counts.
        step_s = figure.step_s if opened.on_gpu else times.step_s
        figures.parts.append(PartFigure("decode", figure.batch, figure.context, step_s, times))
    if decodes:
        last = max(decodes, key=lambda figure: (figure.context, figure.batch))
        if last not in [*alone, *most]:
            figures.parts.append(_parts_of_network(opened, last, settings))
    if (verify := figures.verify) is not None:
        times = _parts_of_steps(opened, verify.context, settings, rows=verify.rows)
        step_s = verify.step_s if opened.on_gpu else times.step_s
        figures.parts.append(PartFigure("verify", verify.rows, verify.context, step_s, times))
    for prompt in figures.prompts[-1:]:
        steps = -(-prompt.tokens // opened.plan.settings.chunk)
        times = _parts_of_prompt(opened, prompt.tokens, steps, settings)
        step_s = prompt.seconds / steps if opened.on_gpu else times.step_s
        figures.parts.append(PartFigure("prompt", 1, prompt.tokens, step_s, times))


def _parts_of_decode(
    opened: OpenedModel, context: int, batch: int, settings: BenchSettings
) -> PartTimes:
    count = settings.steps + settings.warm
    answer = partial(_answer, opened, context, batch, count, settings.temperature)
    return _measure(opened, answer, slice(-settings.steps, None))


def _parts_of_network(
    opened: OpenedModel, figure: DecodeFigure, settings: BenchSettings
) -> PartFigure:
    """Return the parts of decode steps without the engine, which would read the prompts again."""
    times = _parts_of_steps(opened, round(figure.mean_context), settings, batch=figure.batch)
    step_s = figure.pipeline_s if opened.on_gpu else times.step_s
    return PartFigure("network", figure.batch, figure.context, step_s, times)


def _parts_of_steps(
    opened: OpenedModel, context: int, settings: BenchSettings, *, batch: int = 1, rows: int = 1
) -> PartTimes:
    # The clock sees a step's end at the start of the next, so one more step is run.
    work = partial(run_steps, opened, context, settings.steps + 1, batch=batch, rows=rows)
    return _measure(opened, work, slice(-settings.steps, None))


def _parts_of_prompt(
    opened: OpenedModel, tokens: int, steps: int, settings: BenchSettings
) -> PartTimes:
    answer = partial(_answer, opened, tokens, 1, PROMPT_ANSWER, settings.temperature)
    return _measure(opened, answer, slice(0, steps))


def _answer(opened: OpenedModel, context: int, batch: int, tokens: int, temperature: float) -> None:
    """Let the engine answer `batch` prompts together, with `tokens` tokens each."""
    params = SamplingParams(
        temperature=temperature, max_tokens=tokens, ignore_eos=True, draft="none"
    )
    requests = ConcurrentRequests(opened.engine, context, batch, params)
    requests.start()
    requests.close(finish=tokens)


def _measure(opened: OpenedModel, work: Callable[[], None], chosen: slice) -> PartTimes:
    """Do some work and return the mean parts of the `chosen` ones of its steps."""
    if not opened.on_gpu:
        clock = ClockRecorder()
        with recording(clock):
            work()
        return clock_times(clock.steps, chosen)
    opened.pipeline.forget_captures()
    try:
        with recording(MarkerRecorder()):
            work()  # captures the steps anew, with markers
            # acc_events only keeps torch from warning about a second profiler cycle.
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
                work()
                torch.cuda.synchronize(opened.torch_device)
    finally:
        opened.pipeline.forget_captures()
    return part_times(_timeline(seen), chosen)


def clock_times(steps: list[StepTimes], chosen: slice) -> PartTimes:
    """Return the mean parts of the `chosen` steps; the last step has no end and is left out."""
    whole = list(itertools.pairwise(steps))[chosen]
    assert whole
    parts: dict[str, float] = {}
    for step, _ in whole:
        for part, seconds in step.parts.items():
            parts[part] = parts.get(part, 0.0) + seconds / len(whole)
    taken = sum(after.started - step.started for step, after in whole) / len(whole)
    return PartTimes(len(whole), taken, parts, {})


def _timeline(seen: profile) -> list[KernelTime]:
    """Return the kernels and copies that ran on the GPU while the profiler recorded."""
    return [
        KernelTime(event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in seen.events()  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA
    ]


def marked(name: str) -> str:
    """Return the part that a marker kernel begins; "" for other kernels, which do the work."""
    found = _MARKED.search(name)
    return found[1] if found else ""


def part_times(timeline: Sequence[KernelTime], chosen: slice) -> PartTimes:
    """Return the mean parts of the `chosen` steps; the last step has no end and is left out.

    Where kernels overlap, the time counts for the earlier one, so that the parts add up to the time
    in which the GPU was busy.
    """
    kernels = sorted(timeline, key=lambda kernel: kernel.start)
    begins = [index for index, kernel in enumerate(kernels) if marked(kernel.name) == STEP]
    whole = list(itertools.pairwise(begins))[chosen]
    if not whole:
        raise HeadroomError(
            f"The profiler saw {len(kernels)} kernels and {len(begins)} starts of steps.",
            hint="Leave out the parts of a step: --no-parts.",
        )
    first, end, count = whole[0][0], whole[-1][1], len(whole)
    by_part: dict[str, dict[str, float]] = {}
    part, done = "other", kernels[first].end
    for kernel in kernels[first:end]:
        if marker := marked(kernel.name):
            part = "other" if marker == STEP else marker
        else:
            own = max(0.0, kernel.end - max(kernel.start, done))
            names = by_part.setdefault(part, {})
            names[kernel.name] = names.get(kernel.name, 0.0) + own
        done = max(done, kernel.end)
    working = [kernel for kernel in kernels[first:end] if not marked(kernel.name)]
    over_link = [kernel for kernel in working if _OVER_LINK.match(kernel.name)]
    return PartTimes(
        steps=count,
        step_s=(kernels[end].start - kernels[first].start) / count,
        parts={part: sum(names.values()) / count for part, names in by_part.items()},
        kernels={
            part: {name: names[name] / count for name in sorted(names, key=lambda x: -names[x])}
            for part, names in by_part.items()
        },
        kernel_s=covered([x for x in working if not _OVER_LINK.match(x.name)]) / count,
        link_s=covered(over_link) / count,
    )


def covered(kernels: Sequence[KernelTime]) -> float:
    """Return the seconds in which at least one kernel ran; `kernels` are sorted by their starts."""
    total, done = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.start, done))
        done = max(done, kernel.end)
    return total
