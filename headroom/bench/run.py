"""One whole run: plan, load, measure, and put a peer beside it."""

import gc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from headroom.bench.expert_use import ExpertReport, find_residency
from headroom.bench.figures import BenchSettings
from headroom.bench.opening import Opened, Say, open_model, read_model
from headroom.bench.part_times import PROMPT_ANSWER, measure_parts
from headroom.bench.peer import LlamaBench, PeerRun, unlike_note
from headroom.bench.peer_setup import PeerSetup, check_comparable, setup_peer
from headroom.bench.report import Report
from headroom.bench.resources import (
    cold_bandwidths,
    device_facts,
    lift_limit,
    measure_bandwidth,
    memory_use,
    start_counting,
)
from headroom.bench.speeds import SpeedBench
from headroom.errors import HeadroomError, PlanError
from headroom.options import Options
from headroom.plan.plan import Plan
from headroom.plan.settings import PAGE_SIZE
from headroom.plan.shape import ModelShape
from headroom.split.choice import make_run_plan

CPU_CHUNK = 512


def run_bench(
    path: Path,
    options: Options,
    settings: BenchSettings,
    *,
    peer: LlamaBench | None = None,
    say: Say = lambda text: None,
) -> Report:
    """Measure a model; `say` is told what is being done."""
    if peer is not None:
        check_comparable(path)
    model = read_model(path)
    options, plan = fitting(on_device(options, model.shape), settings, model.shape)
    # The peer runs while our model is not in memory, before it and after.
    if peer is not None:
        setup = setup_peer(plan, model.shape, options)
        say("llama-bench, first time")
        first = peer.run(path, setup, settings)
    say("loading")
    start_counting(plan.devices[0].name)
    opened = open_model(model, options, say)
    try:
        report = _measure(path, opened, settings, say)
    finally:
        opened.engine.close()
    del opened
    if peer is None:
        return report
    _free()
    say("llama-bench, second time")
    return _compared(report, peer, setup, first)


def _compared(report: Report, peer: LlamaBench, setup: PeerSetup, first: PeerRun) -> Report:
    """Run the peer again; our figures stay if it fails this time."""
    runs, left_out = [first], report.figures.left_out
    try:
        runs.append(peer.run(report.path, setup, report.settings))
    except HeadroomError as error:
        left_out.append(f"llama-bench, second time: {error}")
    left_out += dict.fromkeys(text for run in runs for text in run.left_out)
    notes = list(setup.notes)
    if unlike := unlike_note(first, report.plan.devices[0].name):
        notes.append(unlike)
    return replace(report, peer=tuple(runs), peer_notes=tuple(notes))


def on_device(options: Options, shape: ModelShape) -> Options:
    """Return options that name a device: where none is given, the one that a run would choose."""
    if options.device is not None:
        return options
    return replace(options, device=make_run_plan(shape, options).devices[0].name)


def fitting(options: Options, settings: BenchSettings, shape: ModelShape) -> tuple[Options, Plan]:
    """Return options with a plan that fits, for as many of the sequences as fit together.

    Where even one does not fit, or their number is given, the error is that of all of them.
    """
    full = filled(options, settings, shape)
    assert full.parallel is not None
    try:
        return full, make_run_plan(shape, full)
    except PlanError:
        if options.parallel is not None:
            raise
        for fewer in sorted({x for x in settings.batches if x < full.parallel}, reverse=True):
            smaller = filled(replace(options, parallel=fewer), settings, shape)
            with suppress(PlanError):
                return smaller, make_run_plan(shape, smaller)
        raise


def filled(options: Options, settings: BenchSettings, shape: ModelShape) -> Options:
    """Return options that hold all that is to be measured, as far as the model allows."""
    gpu = (options.device or "cpu") != "cpu"
    chunk = options.chunk or (max(CPU_CHUNK, *settings.prompts) if gpu else CPU_CHUNK)
    decodes = "decode" in settings.only
    parallel = options.parallel or (max(settings.batches) if decodes else 1)
    batches = tuple(batch for batch in settings.batches if batch <= parallel) or (parallel,)
    contexts = settings.contexts if decodes else ()
    prompts = settings.prompts if "prompts" in settings.only else ()
    needed = max(
        *(tokens + PROMPT_ANSWER for tokens in prompts),
        *(context + settings.room(context, batches, chunk) for context in contexts),
        PAGE_SIZE,
    )
    whole_pages = -(-needed // PAGE_SIZE) * PAGE_SIZE
    context = options.context or min(whole_pages, shape.context_limit)
    return replace(options, chunk=chunk, parallel=parallel, context=context)


def _measure(path: Path, opened: Opened, settings: BenchSettings, say: Say) -> Report:
    say("prompts and answers")
    figures = SpeedBench(opened, settings).run()
    memory = memory_use(opened)  # before the profiler takes some
    lift_limit(opened.device)
    upkeep = opened.engine.upkeep  # no request runs now
    totals = None if upkeep is None else upkeep.read()
    if "parts" in settings.only:
        say("parts of a step")
        try:
            measure_parts(opened, figures, settings)
        except (HeadroomError, RuntimeError) as error:  # of the profiler: other figures are there
            figures.left_out.append(f"parts: {error}")
    say("bandwidth")
    residency = find_residency(opened)
    experts = None
    if residency is not None and totals is not None:
        experts = ExpertReport(residency, totals, cold_bandwidths(opened))
    return Report(
        path=path,
        settings=settings,
        plan=opened.plan,
        device=device_facts(opened),
        loading=opened.loading,
        figures=figures,
        bandwidth=measure_bandwidth(opened),
        memory=memory,
        experts=experts,
    )


def _free() -> None:
    """Give back what a closed model held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
