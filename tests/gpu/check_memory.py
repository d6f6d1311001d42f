"""Holds a GPU's memory against the plan: prints every line, peaks, and PASS or FAIL.

    python -m tests.gpu.check_memory [--full] [--folder FOLDER] [27b|35b ...]
    python -m tests.gpu.check_memory --card 12GiB --card 8GiB [--folder FOLDER]

Four layers of true width unless --full; each model with contexts of 8192 and 131072 tokens in a
process of its own, so that peaks do not mix. A run passes where the peak of what torch allocated
is within the plan's lines and at least 90 % of them, and where what the process took of the device,
its CUDA context included, is within them and the runtime line. Nothing else may use the GPU.

With --card the 35B-A3B of full size (19.7 GiB, and as much host memory) runs as on a card of that
size, under --device-memory: torch refuses more, and some experts must be cold. Exits with 1 if
anything failed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from headroom.engine.scheduler import Turn
from headroom.plan.layout import DevicePlan
from headroom.units import MIB
from tests.gpu.running import MODELS, decoding, open_pipeline, sequence, step_seconds, synth
from tests.gpu.usage import Usage, free_by_torch

CONTEXTS = (8192, 131072)
CHUNK, PARALLEL = 2048, 16
CARD_MODELS = ("35b",)  # dense ones do not fit on a small card
ENOUGH = 0.9  # of what is planned, that a run has to take


@dataclass(frozen=True, slots=True)
class Load:
    """What a model is loaded for."""

    context: int
    chunk: int = CHUNK
    parallel: int = PARALLEL
    card: str = ""  # a size such as 12GiB; "": the whole GPU

    @property
    def settings(self) -> dict[str, object]:
        """The settings of an engine, with a cache for one sequence of full length and others."""
        given = {"context": self.context, "parallel": self.parallel, "chunk": self.chunk}
        given["cache_tokens"] = self.context + 64 * 64
        return given | ({"device_memory": self.card} if self.card else {})


def torch_bytes(device: DevicePlan) -> int:
    """Return the most that torch takes as planned: what the engine allocates, and graphs."""
    graphs = sum(line.bytes for line in device.lines if line.name == "graphs")
    return sum(device.allocated.values()) + graphs


def measure(name: str, path: Path, load: Load) -> bool:
    """Load, run the largest steps, compare with the plan; return whether all is within it."""
    usage = Usage()  # before CUDA starts
    torch.cuda.init()
    everybody = torch.cuda.mem_get_info()[1] - free_by_torch()
    whose = "of it by us" if usage.whole else "since then by us, who have no driver's report"
    print(f"  CUDA's start: {mib(everybody)} in use, {mib(usage.taken())} {whose}")
    pipeline, plan = open_pipeline(path, device="cuda:0", **load.settings)
    device = plan.devices[0]
    loaded = torch.cuda.max_memory_allocated()
    print(f"  after loading and capture: peak {mib(loaded)}, taken {mib(usage.taken())}")
    run_steps(pipeline, plan)
    print_lines(device, pipeline.allocated)
    lines, most = {line.name: line.bytes for line in device.lines}, torch_bytes(device)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    taken = usage.taken()
    print(f"  planned {mib(most - lines['graphs'])}, graphs {mib(lines['graphs'])}")
    print(f"  peak allocated {mib(peak)}, reserved {mib(reserved)}")
    print(f"  taken {mib(taken)}, {mib(taken - reserved)} beside torch, "
          f"runtime {mib(lines['runtime'])}")  # fmt: skip
    arena, scratch = pipeline._stages[0]._model._workspace.arena, device.allocated["workspace"]
    print(f"  scratch {mib(scratch)}, most used {mib(arena.peak_bytes)}")
    everything, what = most + lines["runtime"], " ".join(filter(None, (name, load.card)))
    found = [
        verdict(f"{what} {load.context}: {told}", good, share)
        for told, good, share in (
            ("peak within the plan", peak <= most, peak / most),
            ("peak at least 90 %", peak >= ENOUGH * most, peak / most),
            ("reserved within the plan", reserved <= most, reserved / most),
            ("device within the plan", taken <= everything, taken / everything),
            ("scratch within its line", arena.peak_bytes <= scratch, arena.peak_bytes / scratch),
        )
    ]
    if load.card:
        cold, total = device.total_experts - device.hot_experts, max(1, device.total_experts)
        found.append(verdict(f"{what} {load.context}: some are cold", cold > 0, cold / total))
    pipeline.close()
    return all(found)


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
    """Print each line of the plan with what the engine counted for it."""
    for line in device.lines:  # type: ignore[attr-defined]
        counted = allocated.get(line.name)  # type: ignore[attr-defined]
        beside = "" if counted is None else f" allocated {mib(counted)}"
        note = "" if counted in (None, line.bytes) else " DIFFERENT"
        print(f"  {line.name:16} {mib(line.bytes)}{beside}{note}")


def verdict(what: str, good: bool, share: float) -> bool:
    print(f"{'PASS' if good else 'FAIL'} {what}: {100 * share:.1f} %", flush=True)
    return good


def mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


def written(name: str, folder: Path, *, full: bool) -> Path:
    """Write a model with random weights of true width, unless it is there; four layers or all."""
    family, size = MODELS[name]
    path = folder / (f"{name}.gguf" if full else f"{name}-4.gguf")
    more = [] if full else ["--layers", "4"]
    return synth(family, path, "--size", size, "--quant", "Q4_K_M", *more)


def measured_apart(name: str, path: Path, load: Load, *, full: bool) -> bool:
    """Measure in a separate process."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "tests.gpu.check_memory", name, "--folder", str(path.parent)]
    for word in ("context", "chunk", "parallel"):
        command += [f"--{word}", str(getattr(load, word))]
    command += [*(["--card", load.card] if load.card else []), *(["--full"] if full else [])]
    print(f"{name}, context {load.context}{load.card and f', card of {load.card}'}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        print(f"FAIL {name} {load.context}: exit status {code}")
    print(f"  {time.perf_counter() - started:.1f} s", flush=True)
    return code == 0


def main() -> int:
    """Measure each model, card and context in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--full", action="store_true", help="all layers")
    parser.add_argument("--card", action="append", help="a size; may be given several times")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--context", type=int, help="measure this one, in this process")
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--parallel", type=int, default=PARALLEL)
    given = parser.parse_args()
    cards, full = given.card or [""], given.full or bool(given.card)
    found = []
    with tempfile.TemporaryDirectory() as made:
        for name in given.models or (CARD_MODELS if given.card else MODELS):
            path = written(name, given.folder or Path(made), full=full)
            for card in cards:
                for context in [given.context] if given.context else CONTEXTS:
                    load = Load(context, given.chunk, given.parallel, card)
                    if given.context:
                        found.append(measure(name, path, load))
                    else:
                        found.append(measured_apart(name, path, load, full=full))
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
