"""run_bench(): plan and load a model, measure it, and run a peer program for comparison."""

import gc
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from headroom.bench.agent import AgentBench
from headroom.bench.drafts import DraftBench, Imposed
from headroom.bench.expert_use import ExpertReport, find_locations
from headroom.bench.figures import MORE_KINDS, BenchSettings, LoadParts
from headroom.bench.parts import PROMPT_ANSWER, measure_parts
from headroom.bench.peer import (
    LlamaBench,
    PeerRun,
    PeerSetup,
    check_comparable,
    setup_peer,
    unlike_note,
)
from headroom.bench.prefix import PrefixBench
from headroom.bench.report import ImposedRouting, Report
from headroom.bench.resources import (
    cold_bandwidths,
    device_facts,
    lift_limit,
    measure_bandwidth,
    memory_use,
    start_counting,
)
from headroom.bench.schema import SchemaBench
from headroom.bench.speeds import SpeedBench
from headroom.errors import HeadroomError, OptionError, PlanError
from headroom.experts.traces.taps import ImposedTrace, traced_layers
from headroom.experts.traces.trace import RoutingTrace, check_shape, load_trace
from headroom.experts.traces.trace_stats import trace_stats
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.llm import OpenedModel, open_draft, open_engine
from headroom.options import MTP, NGRAM, Options
from headroom.plan.describe import describe
from headroom.plan.plan import Plan
from headroom.plan.settings import PAGE_SIZE
from headroom.plan.shape import ModelShape
from headroom.progress import LoadProgress, LoadStep, StepCounter, StepReport, ignore_steps
from headroom.spec.drafter import check_draft
from headroom.split.choice import make_run_plan
from headroom.text.tokenizer import Tokenizer

CPU_CHUNK = 512  # prompt tokens in one step on a CPU
SERVER_CHUNK = 512  # those of a server; states are kept between such steps of a prompt


def run_bench(
    path: Path,
    options: Options,
    settings: BenchSettings,
    *,
    peer: LlamaBench | None = None,
    routing_trace: Path | None = None,
    report: StepReport = ignore_steps,
) -> Report:
    """Measure a model; `report` is told what is being done.

    The picks of `routing_trace` replace those of the routers.
    """
    if peer is not None:
        check_comparable(path)
    if options.draft == MTP:
        raise OptionError(
            "A benchmark imposes which guesses are right, and so measures no prediction head.",
            hint="Choose --draft ngram.",
            param="draft",
        )
    if options.drafts and "draft" not in settings.only:
        settings = replace(settings, only=(*settings.only, "draft"))
    if "draft" in settings.only:
        options = replace(options, draft=options.draft or NGRAM, draft_always=True)
        check_draft(options)
    elif options.draft is None:
        options = replace(options, draft="none")  # not what guesses by default
    steps = StepCounter(count_steps(settings, peer is not None), report)
    checkpoint = open_checkpoint(path)
    model = describe(checkpoint)
    shape = model.shape
    trace = None if routing_trace is None else load_trace(routing_trace)
    if trace is not None and routing_trace is not None:
        check_shape(trace, traced_layers(shape), routing_trace)
    if options.workers is not None:
        check_with_workers(options, compares=peer is not None, traces=trace is not None)
        options = with_room(options, settings, shape)
    else:
        found = open_draft(options, shape)
        draft = None if found is None else found.shape
        options = with_device(options, shape, draft)
        options, plan = make_fitting_plan(options, settings, shape, draft)
        # The peer runs before our model is loaded and again after it is freed.
        if peer is not None:
            setup = setup_peer(plan, shape, options)
            steps.begin("llama-bench, first time")
            first = peer.run(path, setup, settings)
        start_counting(plan)
    steps.begin("loading")
    started = time.perf_counter()
    tap = None if trace is None else ImposedTrace(trace)
    imposed = Imposed() if "draft" in settings.only else None
    drafter = None if imposed is None else imposed.drafter(network=options.draft_model is not None)
    opened = open_engine(
        model, options, _show_percent(steps), measuring=True, tap=tap, drafter=drafter
    )
    if imposed is not None:
        imposed.network = opened.pipeline.guess
    total_s = time.perf_counter() - started
    loading = LoadParts(total_s, opened.planning_s, opened.pipeline.load_times)
    try:
        measured = _measure(path, checkpoint, opened, loading, settings, steps, imposed)
    finally:
        opened.engine.close()
    del opened
    if tap is not None and trace is not None and routing_trace is not None:
        measured = replace(measured, imposed=_imposed(routing_trace, trace, tap))
    if peer is None:
        return measured
    _free()
    steps.begin("llama-bench, second time")
    return _compared(measured, peer, setup, first)


def count_steps(settings: BenchSettings, peer: bool) -> int:
    """Return the number of steps that a benchmark reports."""
    counts = {
        "prompts": len(settings.prompts),
        "decode": len(settings.contexts),
        "verify": 1,
        "parts": 1,
        "prefix": len(settings.prompts),
        "agent": 2,
        "draft": 1 + len(settings.accept),
    }
    steps = 2 + sum(counts[kind] for kind in settings.only)  # loading, bandwidth
    return steps + (settings.schema is not None) + (2 if peer else 0)


def _compared(report: Report, peer: LlamaBench, setup: PeerSetup, first: PeerRun) -> Report:
    """Run the peer again and add its runs to the report; our figures stay if it fails this time."""
    runs, left_out = [first], report.figures.left_out
    try:
        runs.append(peer.run(report.path, setup, report.settings))
    except HeadroomError as error:
        left_out.append(f"llama-bench, second time: {error}")
    left_out += dict.fromkeys(text for run in runs for text in run.left_out)
    notes = list(setup.notes)
    if unlike := unlike_note(first, report.plan.devices[0].name):
        notes.append(unlike)
    if report.imposed is not None:
        notes.append("llama-bench takes no routing trace: its routers chose")
    return replace(report, peer=tuple(runs), peer_notes=tuple(notes))


def with_device(options: Options, shape: ModelShape, draft: ModelShape | None = None) -> Options:
    """Return options that name a device; if none is given, the one that a run would choose."""
    if options.device is not None:
        return options
    devices = make_run_plan(shape, options, draft=draft).devices
    return replace(options, device=",".join(device.name for device in devices))


def check_with_workers(options: Options, *, compares: bool, traces: bool) -> None:
    """Refuse what can only be measured if the layers run in this process."""
    flags = [name for name, given in (("compare", compares), ("routing-trace", traces)) if given]
    if flags:
        raise OptionError(
            f"--{flags[0]} measures a model in this process, not in --workers {options.workers}.",
            hint=f"Leave out --workers or --{flags[0]}.",
            param="workers",
        )


def make_fitting_plan(
    options: Options,
    settings: BenchSettings,
    shape: ModelShape,
    draft: ModelShape | None = None,
) -> tuple[Options, Plan]:
    """Return options and their plan, for the largest of the batches that fits into memory.

    If not even the smallest fits, or `--parallel` is given, the error is that of the largest.
    """
    full = with_room(options, settings, shape)
    assert full.parallel is not None
    try:
        return full, make_run_plan(shape, full, draft=draft)
    except PlanError:
        if options.parallel is not None:
            raise
        for fewer in sorted({x for x in settings.batches if x < full.parallel}, reverse=True):
            smaller = with_room(replace(options, parallel=fewer), settings, shape)
            with suppress(PlanError):
                return smaller, make_run_plan(shape, smaller, draft=draft)
        raise


def with_room(options: Options, settings: BenchSettings, shape: ModelShape) -> Options:
    """Return options with room for all that is measured, as far as the model allows."""
    gpu = (options.device or "cpu") != "cpu"
    chunk = options.chunk or (max(CPU_CHUNK, *settings.prompts) if gpu else CPU_CHUNK)
    if options.chunk is None and set(MORE_KINDS) & set(settings.only):
        chunk = SERVER_CHUNK
    decodes = bool({"decode", "draft"} & set(settings.only)) or settings.schema is not None
    parallel = options.parallel or (max(settings.batches) if decodes else 1)
    batches = tuple(batch for batch in settings.batches if batch <= parallel) or (parallel,)
    contexts = settings.contexts if decodes else ()
    prompts = settings.prompts if {"prompts", "prefix"} & set(settings.only) else ()
    more = settings.longer if "prefix" in settings.only else 0
    session = settings.agent_tokens + settings.agent_answer if "agent" in settings.only else 0
    needed = max(
        *(tokens + more + PROMPT_ANSWER for tokens in prompts),
        session,
        *(context + settings.room(context, batches, chunk) for context in contexts),
        PAGE_SIZE,
    )
    whole_pages = -(-needed // PAGE_SIZE) * PAGE_SIZE
    context = options.context or min(whole_pages, shape.context_limit)
    return replace(options, chunk=chunk, parallel=parallel, context=context)


def _imposed(path: Path, trace: RoutingTrace, tap: ImposedTrace) -> ImposedRouting:
    return ImposedRouting(path.name, trace.source, trace_stats(trace), tap.nbytes)


def _measure(
    path: Path,
    checkpoint: Checkpoint,
    opened: OpenedModel,
    loading: LoadParts,
    settings: BenchSettings,
    steps: StepCounter,
    imposed: Imposed | None,
) -> Report:
    figures = SpeedBench(opened, settings, steps).run()
    if settings.schema is not None:
        steps.begin("answers under a schema")
        SchemaBench(opened, settings, Tokenizer.from_checkpoint(checkpoint), figures).run()
    if "prefix" in settings.only:
        PrefixBench(opened, settings, steps, figures).run()
    if "agent" in settings.only:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        AgentBench(opened, settings, steps, tokenizer, figures).run()
    if imposed is not None:
        DraftBench(opened, settings, steps, imposed, figures).run()
    memory = memory_use(opened)  # before the profiler takes some
    if opened.on_gpu:
        lift_limit(opened.torch_device)
    upkeep = opened.engine.upkeep  # may be called here, since no request runs
    totals = None if upkeep is None else upkeep.read()
    if "parts" in settings.only and opened.in_workers:
        figures.left_out.append("parts: the layers run in other processes")
    elif "parts" in settings.only:
        steps.begin("parts of a step")
        try:
            measure_parts(opened, figures, settings)
        except (
            HeadroomError,
            RuntimeError,
        ) as error:  # of the profiler
            figures.left_out.append(f"parts: {error}")
    steps.begin("bandwidth")
    locations = find_locations(opened)
    experts = None
    if locations is not None and totals is not None:
        experts = ExpertReport(locations, totals, cold_bandwidths(opened))
    return Report(
        path=path,
        settings=settings,
        plan=opened.plan,
        device=device_facts(opened),
        loading=loading,
        figures=figures,
        bandwidth=measure_bandwidth(opened),
        memory=memory,
        experts=experts,
    )


def _show_percent(steps: StepCounter) -> LoadProgress:
    """Return a function that tells the percentage of weights loaded, then of captured steps."""

    def show(done: int, total: int, step: LoadStep = "loading") -> None:
        steps.tell(f"{step}, {100 * done // max(total, 1)} %")

    return show


def _free() -> None:
    """Free the memory that a closed model held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
