"""Part times: where the steps of a loaded model spend their time."""

import itertools

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from headroom.bench.crowd import Crowd
from headroom.bench.figures import BenchSettings, Figures, PartFigure
from headroom.bench.opening import Opened
from headroom.bench.timeline import KernelTime, PartTimes, part_times
from headroom.engine.request import SamplingParams
from headroom.layers.parts import ClockRecorder, MarkerRecorder, StepTimes, recording

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
        times = _measure(opened, figure.context, figure.batch, settings)
        # A clock's own steps; on a GPU the markers took time, so the undisturbed step counts.
        step_s = figure.step_s if opened.on_gpu else times.step_s
        figures.parts.append(PartFigure("decode", figure.batch, figure.context, step_s, times))
    for prompt in figures.prompts[-1:]:
        steps = -(-prompt.tokens // opened.plan.settings.chunk)
        times = _measure(opened, prompt.tokens, 1, settings, prompt_steps=steps)
        step_s = prompt.seconds / steps if opened.on_gpu else times.step_s
        figures.parts.append(PartFigure("prompt", 1, prompt.tokens, step_s, times))


def _measure(
    opened: Opened, context: int, batch: int, settings: BenchSettings, prompt_steps: int = 0
) -> PartTimes:
    """Run prompts and a few tokens; return the parts of decode steps, or of the prompt's steps."""
    count = PROMPT_ANSWER if prompt_steps else settings.steps + settings.warm
    params = SamplingParams(temperature=settings.temperature, max_tokens=count, ignore_eos=True)
    chosen = slice(0, prompt_steps) if prompt_steps else slice(-settings.steps, None)

    def answer() -> None:
        crowd = Crowd(opened.engine, context, batch, params)
        crowd.start()
        crowd.close(finish=count)

    if not opened.on_gpu:
        clock = ClockRecorder()
        with recording(clock):
            answer()
        return clock_times(clock.steps, chosen)
    opened.pipeline.forget_captures()
    try:
        with recording(MarkerRecorder()):
            answer()  # captures steps with their markers
            # Without acc_events torch warns that a second cycle, which there is none of, forgets.
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
                answer()
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
