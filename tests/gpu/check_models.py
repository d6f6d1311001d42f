"""Compares whole models on a GPU with the plain kernels of the CPU; times them with --bench."""

import argparse
import itertools
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from headroom.engine.batching import make_batch
from headroom.engine.request import GenerationRequest, SamplingParams
from headroom.engine.scheduler import Turn
from headroom.engine.sequence import Sequence
from headroom.formats.checkpoint import open_checkpoint
from headroom.memory.plan import make_plan
from headroom.memory.targets import plan_devices
from headroom.models.describe import describe
from headroom.options import Options
from headroom.split.launch import start_pipeline
from headroom.split.pipeline import Pipeline


def synth(family: str, out: Path, *more: str) -> Path:
    if not out.exists():
        started = time.perf_counter()
        command = [sys.executable, "-m", "headroom", "synth", family, str(out), *more]
        subprocess.run(command, check=True)
        seconds, size = time.perf_counter() - started, out.stat().st_size / 1e9
        print(f"synth {out.name} {size:.2f} GB in {seconds:.1f} s")
    return out


def open_pipeline(path: Path, **settings):
    model = describe(open_checkpoint(path))
    options = Options(model=str(path), **settings)
    plan = make_plan([model.shape], plan_devices(options), options)
    return start_pipeline(plan, model), plan


def sequence(tokens, pages, slot=0):
    request = GenerationRequest(
        id=str(slot),
        prompt=tuple(tokens),
        params=SamplingParams(prompt_logprobs=True),
        stop_ids=frozenset(),
    )
    return Sequence(request, lambda event: None, limit=10**6, order=0, pages=list(pages), slot=slot)


def all_logits(pipeline, tokens, pieces):
    running, found = sequence(tokens, range(8)), []
    with torch.inference_mode():
        for rows in pieces:
            hidden = pipeline.forward(make_batch([Turn(running, rows)], 64))
            for first in range(0, len(hidden), 4):
                found.append(pipeline.logits(hidden[first : first + 4]).clone())
            running.cached += rows
    return torch.cat(found)


def compare(name: str, path: Path) -> None:
    torch.manual_seed(1)
    settings = {"context": 512, "parallel": 4, "chunk": 256}
    cpu, _ = open_pipeline(path, device="cpu", dtype="f32", kv_type="f32", **settings)
    tokens = torch.randint(0, min(cpu.vocab, 1000), (100,)).tolist()
    wanted = all_logits(cpu, tokens, [100])
    gpu, _ = open_pipeline(path, device="cuda:0", **settings)
    for label, pieces in (
        ("prefill", [100]),
        ("chunks", [40, 3, 57]),
        ("decode", [60] + [1] * 40),
        ("few", [20, 12, 30, 1, 7, 30]),
    ):
        try:
            found = all_logits(gpu, tokens, pieces)
            error = float((found - wanted).norm() / wanted.norm())
            same = float((found.argmax(1) == wanted.argmax(1)).float().mean())
            verdict = "PASS" if error < 0.1 else "FAIL"
            print(f"{verdict} {name} {label}: error {error:.1e}, same best {same:.2f}", flush=True)
        except Exception:
            print(f"FAIL {name} {label}")
            traceback.print_exc(limit=6)


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--bench", default="")
    parser.add_argument("--folder", default="/tmp")
    given = parser.parse_args()
    folder = Path(given.folder)
    if given.bench:
        family = "qwen35" if given.bench == "27b" else "qwen35moe"
        size = "qwen3.5-27b" if given.bench == "27b" else "qwen3.5-35b-a3b"
        bench(
            given.bench,
            synth(family, folder / f"{given.bench}.gguf", "--size", size, "--quant", "Q4_K_M"),
        )
        return
    for name, family, more in (
        ("llama", "llama", ["--quant", "Q8_0"]),
        ("qwen3", "qwen3", ["--quant", "Q4_K_M"]),
        ("qwen3moe", "qwen3moe", ["--quant", "Q4_K_M"]),
        ("laguna", "laguna", ["--quant", "Q8_0"]),
        ("27b-4", "qwen35", ["--size", "qwen3.5-27b", "--layers", "4", "--quant", "Q4_K_M"]),
        ("35b-4", "qwen35moe", ["--size", "qwen3.5-35b-a3b", "--layers", "4", "--quant", "Q4_K_M"]),
    ):
        try:
            compare(name, synth(family, folder / f"{name}.gguf", *more))
        except Exception:
            print("FAIL", name)
            traceback.print_exc(limit=8)


if __name__ == "__main__":
    sys.exit(main())
