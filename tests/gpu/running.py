"""Whole models for the checks on a GPU: written, loaded as their plan says, and stepped."""

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from headroom.engine.batching import make_batch
from headroom.engine.request import GenerationRequest, SamplingParams
from headroom.engine.scheduler import Turn
from headroom.engine.sequence import Sequence
from headroom.families.files import open_checkpoint
from headroom.machine.targets import plan_devices
from headroom.options import load_options
from headroom.plan.describe import describe
from headroom.plan.plan import Plan, make_plan
from headroom.split.launch import start_pipeline
from headroom.split.memory_check import limit_memory
from headroom.split.pipeline import Pipeline
from tests.gpu.kept import keep_code

MODELS = {"27b": ("qwen35", "qwen3.5-27b"), "35b": ("qwen35moe", "qwen3.5-35b-a3b")}


def synth(family: str, out: Path, *more: str) -> Path:
    """Write a model with random weights, unless it is there."""
    if not out.exists():
        started = time.perf_counter()
        command = [sys.executable, "-m", "headroom", "synth", family, str(out), *more]
        subprocess.run(command, check=True)
        seconds, size = time.perf_counter() - started, out.stat().st_size / 1e9
        print(f"synth {out.name} {size:.2f} GB in {seconds:.1f} s")
    return out


def open_pipeline(path: Path, **settings: object) -> tuple[Pipeline, Plan]:
    """Load a model as its plan says, and use kept machine code."""
    keep_code()
    model = describe(open_checkpoint(path))
    options = load_options({"model": str(path), **settings})
    plan = make_plan([model.shape], plan_devices(options), options)
    limit_memory(plan, options.device_memory)
    return start_pipeline(plan, model), plan


def sequence(tokens: Iterable[int], pages: Iterable[int], state_slot: int = 0) -> Sequence:
    """A sequence that has its pages already."""
    request = GenerationRequest(
        id=str(state_slot),
        prompt=tuple(tokens),
        params=SamplingParams(prompt_logprobs=True),
        stop_ids=frozenset(),
    )
    return Sequence(
        request, lambda event: None, limit=10**6, pages=list(pages), state_slot=state_slot
    )


def decoding(context: int, pages: int, state_slot: int) -> Sequence:
    """A sequence that has `context` tokens in the cache and decodes the next."""
    one = sequence([7] * (context + 1), range(pages), state_slot)
    one.cached = context
    return one


def step_seconds(pipeline: Pipeline, turns: list[Turn], count: int) -> float:
    """The mean time of a step, after a few to warm up."""
    step = make_batch(turns, 64)
    with torch.inference_mode():
        for _ in range(2):
            pipeline.step(step)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            pipeline.step(step)
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count
