"""The engine allocates what the plan says, line by line, to the byte."""

import os
import time
from pathlib import Path

import pytest
import torch

from headroom.engine.request import SamplingParams
from headroom.formats.checkpoint import open_checkpoint
from headroom.kernels.native import attention as native_attention
from headroom.kernels.native.layer import Step
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.ops import Span
from headroom.layers.threads import set_threads
from headroom.llm import LLM
from headroom.memory.budget import native_layer_scratch
from headroom.memory.devices import detect_devices
from headroom.memory.plan import Plan, make_plan
from headroom.models.describe import describe
from headroom.options import Options
from headroom.split.launch import start_pipeline

# What a device loses beside the engine's own allocations.
NOT_OURS = {"runtime", "reserve", "graphs"}


def planned(plan: Plan) -> dict[str, int]:
    lines = {line.name: line.bytes for line in plan.devices[0].lines if line.bytes}
    lines |= {line.name: line.bytes for line in plan.host.lines if line.bytes}
    return {name: size for name, size in lines.items() if name not in NOT_OURS}


def plan_and_load(path: Path, **settings: object) -> tuple[Plan, dict[str, int]]:
    model = describe(open_checkpoint(path))
    options = Options(model=str(path), threads=1, **settings)  # type: ignore[arg-type]
    plan = make_plan([model.shape], detect_devices(options), options)
    return plan, dict(start_pipeline(plan, model).allocated)


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
@pytest.mark.parametrize("kv_type", ["f32", "q8_0", "q5_1"])
@pytest.mark.parametrize("context", [512, 2048])
@pytest.mark.parametrize("parallel", [1, 4])
def test_planned_equals_allocated_for_the_default_model(
    smollm2_path: Path, kv_type: str, context: int, parallel: int
) -> None:
    plan, allocated = plan_and_load(
        smollm2_path, kv_type=kv_type, context=context, parallel=parallel
    )
    assert allocated == planned(plan)
    assert {"core_weights", "embeddings", "kv", "staging", "workspace", "logits"} == set(allocated)


@pytest.mark.parametrize("weights", ["packed", "unpacked"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_planned_equals_allocated_for_a_model_with_a_head_of_its_own(
    tiny_path: Path, weights: str, kernels: str
) -> None:
    plan, allocated = plan_and_load(
        tiny_path, weights=weights, kernels=kernels, context=128, parallel=2
    )
    expected = planned(plan)
    if plan.settings.kernels == "reference":
        expected.pop("workspace")  # torch's own, measured and not allocated by us
    assert allocated == expected
    assert "head" in allocated


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
@pytest.mark.parametrize(("parallel", "context", "chunk"), [(1, 512, 32), (3, 1100, 7)])
def test_the_planned_scratch_is_what_the_cpp_layer_needs_at_most(
    tiny_path: Path, parallel: int, context: int, chunk: int
) -> None:
    model = describe(open_checkpoint(tiny_path))
    context = min(context, model.config.context_limit)
    options = Options(context=context, parallel=parallel, chunk=chunk, kv_type="f32", threads=1)
    plan = make_plan([model.shape], detect_devices(options), options)
    pipeline = start_pipeline(plan, model)
    layer = pipeline._stage._model._blocks[0]._layer  # type: ignore[attr-defined]
    pages = torch.arange(plan.settings.sequence_pages)
    spans = tuple(Span(row, 1, context - 1, pages) for row in range(parallel))
    step = Step(spans, torch.zeros(parallel, dtype=torch.int64))
    needed = layer.scratch_bytes(plan.settings.rows, step)
    assert needed == native_layer_scratch(model.config.hidden, model.shape.layers[0], plan.settings)
    assert native_attention.span_table(spans)[0].shape == (parallel, 5)


def test_a_full_engine_stays_within_its_scratch(tiny_path: Path) -> None:
    """Every sequence at the end of its context while another prompt is read."""
    with LLM(str(tiny_path), context=256, parallel=3, chunk=64, threads=1) as llm:
        params = SamplingParams(temperature=0, ignore_eos=True)
        prompts = [[7] * 200, [9] * 255, [11] * 100, [13] * 250, [15] * 240]
        done = llm.generate(prompts, params)
        assert [d.prompt_tokens + d.generated_tokens for d in done] == [256] * 5


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_pinned_threads_stay_on_cores_that_this_process_may_use(tiny_path: Path) -> None:
    plan, _ = plan_and_load(tiny_path, pin_threads=True, context=64)
    assert plan.settings.pin_threads
    before = set(os.listdir("/proc/self/task"))
    set_threads(2, pin=True)
    assert POOL.ops.threads == 2
    allowed = sorted(os.sched_getaffinity(0))
    expected = [{allowed[1]}] if len(allowed) > 1 else [set(allowed)]
    deadline = time.monotonic() + 10  # the worker pins itself once it runs
    while True:
        workers = set(os.listdir("/proc/self/task")) - before
        cores = [os.sched_getaffinity(int(worker)) for worker in workers]
        if cores == expected or time.monotonic() > deadline:
            break
    set_threads(1)
    assert cores == expected
