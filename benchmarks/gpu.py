"""Prompt and decode speed of a synthesised model on one GPU, and where a step's time goes.

    python -m benchmarks.gpu 27b|35b [--folder FOLDER]

Writes Qwen3.5-27B or 35B-A3B in Q4_K_M with random weights to the folder, if it is not there.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from headroom.engine.batching import make_batch
from headroom.engine.request import GenerationRequest, SamplingParams
from headroom.engine.scheduler import Turn
from headroom.engine.sequence import Sequence
from headroom.formats.checkpoint import open_checkpoint
from headroom.memory.plan import Plan, make_plan
from headroom.memory.targets import plan_devices
from headroom.models.describe import describe
from headroom.options import Options
from headroom.split.launch import start_pipeline
from headroom.split.pipeline import Pipeline

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
    """Load a model as its plan says."""
    model = describe(open_checkpoint(path))
    options = Options(model=str(path), **settings)  # type: ignore[arg-type]
    plan = make_plan([model.shape], plan_devices(options), options)
    return start_pipeline(plan, model), plan


def sequence(tokens: Iterable[int], pages: Iterable[int], slot: int = 0) -> Sequence:
    """A sequence that has its pages already."""
    request = GenerationRequest(
        id=str(slot),
        prompt=tuple(tokens),
        params=SamplingParams(prompt_logprobs=True),
        stop_ids=frozenset(),
    )
    return Sequence(request, lambda event: None, limit=10**6, order=0, pages=list(pages), slot=slot)


def bench(name: str, path: Path) -> None:
    """Speeds of prompts and of steps at several batches and contexts."""
    started = time.perf_counter()
    settings = {"context": 20480, "parallel": 16, "chunk": 2048}
    pipeline, plan = open_pipeline(path, device="cuda:0", **settings)
    seconds, held = time.perf_counter() - started, torch.cuda.memory_allocated() / 1e9
    print(f"BENCH {name} loaded in {seconds:.1f} s, {held:.2f} GB", flush=True)
    pages = plan.settings.sequence_pages
    for rows in (512, 2048):
        prompt = sequence([5 + i % 900 for i in range(rows)], range(pages))
        seconds = step_seconds(pipeline, [Turn(prompt, rows)], 3)
        print(f"BENCH {name} prompt {rows}: {rows / seconds:.0f} tok/s", flush=True)
    for batch, context in itertools.product((1, 4, 8, 16), (20, 16384)):
        turns = [Turn(decoding(context, pages, slot), 1) for slot in range(batch)]
        seconds = step_seconds(pipeline, turns, 30)
        speed = f"{batch / seconds:.0f} tok/s ({seconds * 1e3:.2f} ms)"
        print(f"BENCH {name} decode batch {batch} context {context}: {speed}", flush=True)
    verify = sequence([7] * 40, range(pages))
    verify.cached = 20
    seconds = step_seconds(pipeline, [Turn(verify, 16)], 20)
    print(f"BENCH {name} one step of 16 rows: {seconds * 1e3:.2f} ms", flush=True)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as seen:
        pipeline.forward(make_batch([Turn(decoding(20, pages, 0), 1)], 64))
        torch.cuda.synchronize()
    table = seen.key_averages().table(
        sort_by="cuda_time_total", row_limit=22, max_name_column_width=50
    )
    print(table)


def decoding(context: int, pages: int, slot: int) -> Sequence:
    """A sequence that has `context` tokens in the cache and decodes the next."""
    one = sequence([7] * (context + 1), range(pages), slot)
    one.cached = context
    return one


def step_seconds(pipeline: Pipeline, turns: list[Turn], count: int) -> float:
    """The mean time of a step, after a few to warm up."""
    step = make_batch(turns, 64)
    with torch.inference_mode():
        for _ in range(2):
            pipeline.forward(step)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            pipeline.forward(step)
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def main() -> None:
    """Measure and print one line for each figure, then the kernels of a step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    family, size = MODELS[given.model]
    path = given.folder / f"{given.model}.gguf"
    bench(given.model, synth(family, path, "--size", size, "--quant", "Q4_K_M"))


if __name__ == "__main__":
    main()
