"""Part times: where the steps of a loaded model spend their time."""

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from headroom.bench.crowd import Crowd
from headroom.bench.figures import BenchSettings, DecodeFigure, Figures, PartFigure
from headroom.bench.opening import Opened
from headroom.bench.steps import run_steps
from headroom.bench.timeline import KernelTime, PartTimes, part_times
from headroom.engine.request import SamplingParams
from headroom.layers.step_timing import ClockRecorder, MarkerRecorder, StepTimes, recording

PROMPT_ANSWER = 2  # tokens after a prompt that is looked into: its last step has an end then


def measure_parts(opened: Opened, figures: Figures, settings: BenchSettings) -> None:
    """Add the parts of some of the steps that were measured: one of each kind."""
    decodes = figures.decodes
    alone = [figure for figure in decodes if figure.batch == 1]
    chunk = opened.plan.settings.chunk
    # Of prompts that take several steps, some answers would end before others begin.
    many = [figure for figure in decodes if figure.batch * figure.context <= chunk]
    most = [max(many, key=lambda figure: figure.batch)] if many else []
    for figure in [*alone, *(one for one in most if one not in alone)]:
        times = _parts_of_decode(opened, figure.context, figure.batch, settings)
        # A clock's own steps; on a GPU the markers took time, so the undisturbed step counts.
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
    opened: Opened, context: int, batch: int, settings: BenchSettings
) -> PartTimes:
    count = settings.steps + settings.warm
    answer = partial(_answer, opened, context, batch, count, settings.temperature)
    return _measure(opened, answer, slice(-settings.steps, None))


def _parts_of_network(opened: Opened, figure: DecodeFigure, settings: BenchSettings) -> PartFigure:
    """Return the parts of decoding without the engine, whose prompts would take long once more."""
    times = _parts_of_steps(opened, round(figure.mean_context), settings, batch=figure.batch)
    step_s = figure.pipeline_s if opened.on_gpu else times.step_s
    return PartFigure("network", figure.batch, figure.context, step_s, times)


def _parts_of_steps(
    opened: Opened, context: int, settings: BenchSettings, *, batch: int = 1, rows: int = 1
) -> PartTimes:
    # A clock counts whole steps, and the last one has no end.
    work = partial(run_steps, opened, context, settings.steps + 1, batch=batch, rows=rows)
    return _measure(opened, work, slice(-settings.steps, None))


def _parts_of_prompt(opened: Opened, tokens: int, steps: int, settings: BenchSettings) -> PartTimes:
    answer = partial(_answer, opened, tokens, 1, PROMPT_ANSWER, settings.temperature)
    return _measure(opened, answer, slice(0, steps))


def _answer(opened: Opened, context: int, batch: int, tokens: int, temperature: float) -> None:
    """Let the engine answer prompts together, with so many tokens each."""
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    crowd = Crowd(opened.engine, context, batch, params)
    crowd.start()
    crowd.close(finish=tokens)


def _measure(opened: Opened, work: Callable[[], None], chosen: slice) -> PartTimes:
    """Do some work and return the parts of some of its steps."""
    if not opened.on_gpu:
        clock = ClockRecorder()
        with recording(clock):
            work()
        return clock_times(clock.steps, chosen)
    opened.pipeline.forget_captures()
    try:
        with recording(MarkerRecorder()):
            work()  # captures steps with their markers
            # Without acc_events torch warns that a second cycle, which there is none of, forgets.
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
                work()
                torch.cuda.synchronize(opened.place)
    finally:
        opened.pipeline.forget_captures()
    return part_times(_timeline(seen), chosen)


def clock_times(steps: list[StepTimes], chosen: slice) -> PartTimes:
    """Return the mean of some whole steps; the last one has no end."""
    whole = list(itertools.pairwise(steps))[chosen]
    assert whole
    parts: dict[str, float] = {}
    for step, _ in whole:
        for part, seconds in step.parts.items():
            parts[part] = parts.get(part, 0.0) + seconds / len(whole)
    taken = sum(after.started - step.started for step, after in whole) / len(whole)
    return PartTimes(len(whole), taken, parts, {})


def _timeline(seen: profile) -> list[KernelTime]:
    """Return what ran on the GPU while the profiler looked."""
    return [
        KernelTime(event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in seen.events()  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA
    ]
