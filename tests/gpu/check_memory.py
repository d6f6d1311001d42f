"""Holds a GPU's memory against the plan: prints every line, peaks, and PASS or FAIL.

    python -m tests.gpu.check_memory [--full] [--folder FOLDER] [27b|35b ...]

Four layers of true width unless --full; each model with contexts of 8192 and 131072 tokens in a
process of its own, so that peaks do not mix. A run passes where the peak of what torch allocated
is within the plan's lines and at least 90 % of them, and where what the process took of the device,
its CUDA context included, is within them and the runtime line. Nothing else may use the GPU.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from headroom.engine.scheduler import Turn
from headroom.memory.budget import NOT_ALLOCATED
from headroom.units import MIB
from tests.gpu.running import MODELS, decoding, open_pipeline, sequence, step_seconds, synth
from tests.gpu.usage import Usage, free_by_torch

CONTEXTS = (8192, 131072)


def measure(name: str, path: Path, context: int, chunk: int, parallel: int) -> None:
    """Load, run the steps that take most, and compare."""
    usage = Usage()  # before CUDA starts
    torch.cuda.init()
    everybody = torch.cuda.mem_get_info()[1] - free_by_torch()
    whose = "of it by us" if usage.whole else "since then by us, who have no driver's report"
    print(f"  CUDA's start: {mib(everybody)} in use, {mib(usage.taken())} {whose}")
    settings = {"context": context, "parallel": parallel, "chunk": chunk}
    settings["cache_tokens"] = context + 64 * 64
    pipeline, plan = open_pipeline(path, device="cuda:0", **settings)
    device = plan.devices[0]
    loaded = torch.cuda.max_memory_allocated()
    print(f"  after loading and capture: peak {mib(loaded)}, taken {mib(usage.taken())}")
    run_steps(pipeline, plan)
    print_lines(device, pipeline.allocated)
    lines = {line.name: line.bytes for line in device.lines}
    planned = sum(size for line, size in lines.items() if line not in NOT_ALLOCATED)
    most = planned + lines["graphs"]
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    taken = usage.taken()
    print(f"  planned {mib(planned)}, graphs {mib(lines['graphs'])}")
    print(f"  peak allocated {mib(peak)}, reserved {mib(reserved)}")
    print(f"  taken {mib(taken)}, {mib(taken - reserved)} beside torch, "
          f"runtime {mib(lines['runtime'])}")  # fmt: skip
    arena = pipeline._stage._model._workspace.arena
    print(f"  scratch {mib(device.allocated['workspace'])}, most used {mib(arena.peak_bytes)}")
    verdict(f"{name} {context}: peak within the plan", peak <= most, peak / most)
    verdict(f"{name} {context}: peak at least 90 %", peak >= 0.9 * most, peak / most)
    verdict(f"{name} {context}: reserved within the plan", reserved <= most, reserved / most)
    everything = most + lines["runtime"]
    verdict(f"{name} {context}: device within the plan", taken <= everything, taken / everything)
    verdict(f"{name} {context}: scratch within its line",
            arena.peak_bytes <= device.allocated["workspace"],
            arena.peak_bytes / device.allocated["workspace"])  # fmt: skip


def run_steps(pipeline: object, plan: object) -> None:
    """A chunk at the end of the context with others that decode, and decode steps alone."""
    settings = plan.settings  # type: ignore[attr-defined]
    pages = settings.sequence_pages
    chunk = sequence([5 + i % 900 for i in range(settings.context)], range(pages))
    chunk.cached = settings.context - settings.chunk
    turns = [Turn(chunk, settings.chunk)]
    turns += [Turn(decoding(20, 2, slot), 1) for slot in range(1, settings.parallel)]
    seconds = step_seconds(pipeline, turns, 3)  # type: ignore[arg-type]
    print(f"  {settings.chunk} rows at the end of the context: {seconds * 1e3:.1f} ms")
    fresh = sequence([5 + i % 900 for i in range(settings.chunk)], range(pages))
    seconds = step_seconds(pipeline, [Turn(fresh, settings.chunk)], 5)  # type: ignore[arg-type]
    print(f"  prompt {settings.chunk}: {settings.chunk / seconds:.0f} tok/s")
    for batch in (1, settings.parallel):
        turns = [Turn(decoding(20, 2, slot), 1) for slot in range(batch)]
        seconds = step_seconds(pipeline, turns, 20)  # type: ignore[arg-type]
        print(f"  decode of {batch}: {seconds * 1e3:.2f} ms")
    few = sequence([7] * settings.context, range(pages))
    few.cached = settings.context - 32
    seconds = step_seconds(pipeline, [Turn(few, 32)], 5)  # type: ignore[arg-type]
    print(f"  32 rows at the end of the context: {seconds * 1e3:.2f} ms")


def print_lines(device: object, allocated: object) -> None:
    """Each line of the plan beside what the engine counted for it."""
    for line in device.lines:  # type: ignore[attr-defined]
        counted = allocated.get(line.name)  # type: ignore[attr-defined]
        beside = "" if counted is None else f" allocated {mib(counted)}"
        note = "" if counted in (None, line.bytes) else " DIFFERENT"
        print(f"  {line.name:16} {mib(line.bytes)}{beside}{note}")


def verdict(what: str, good: bool, share: float) -> None:
    print(f"{'PASS' if good else 'FAIL'} {what}: {100 * share:.1f} %", flush=True)


def mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


def main() -> None:
    """Each model and context in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--context", type=int, help="measure this one, in this process")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--parallel", type=int, default=16)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    for name in given.models:
        family, size = MODELS[name]
        path = folder / (f"{name}.gguf" if given.full else f"{name}-4.gguf")
        more = [] if given.full else ["--layers", "4"]
        synth(family, path, "--size", size, "--quant", "Q4_K_M", *more)
        if given.context:
            measure(name, path, given.context, given.chunk, given.parallel)
            continue
        for context in CONTEXTS:
            started = time.perf_counter()
            command = [sys.executable, "-m", "tests.gpu.check_memory", name, "--folder", folder]
            command += ["--context", str(context), "--chunk", str(given.chunk)]
            command += ["--parallel", str(given.parallel), *(["--full"] if given.full else [])]
            print(f"{name}, context {context}", flush=True)
            done = subprocess.run([str(word) for word in command], check=False)
            if done.returncode:
                print(f"FAIL {name} {context}: exit status {done.returncode}")
            print(f"  {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
