"""Predicted against measured memory of a GPU: 60 cases of models, contexts, KV types and cards.

    python -m benchmarks.memory_matrix --folder FOLDER --out matrix.json [--seconds N] [--only 35b]
    python -m benchmarks.memory_matrix --out matrix.json --table benchmarks/MEMORY.md

Each case loads a model of true size in a process of its own, as on a card of the given size
(--device-memory), runs the largest steps, and watches what the process takes of the GPU from before
CUDA starts to the end. Nothing else may use the GPU. Weights are zeros (tests/hollow.py) and are
not even read: memory does not depend on them. Results are added to the file, and cases that it
holds are not measured again, so that the matrix can be completed in several calls. Each call prints
the table of all results; --half 1 and --half 2 divide the matrix between two calls of equal length.

Exits with 1 if a case took more than predicted, or if the prediction is more than 3 % above it.
"""

import argparse
import json
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch

from headroom.engine.scheduler import Turn
from headroom.families.files import open_checkpoint
from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.layers import upload
from headroom.plan.describe import describe
from headroom.plan.lines import published_activation
from headroom.plan.plan import Plan
from headroom.split.pipeline import Pipeline
from headroom.units import GIB, MIB
from tests.gpu.running import decoding, open_pipeline, sequence, step_seconds
from tests.gpu.usage import Usage, free_by_torch
from tests.hollow import write_hollow

MODELS = {
    "27b": ("qwen35", "qwen3.5-27b", "Qwen3.5-27B"),
    "35b": ("qwen35moe", "qwen3.5-35b-a3b", "Qwen3.5-35B-A3B"),
    "31b": ("gemma4", "gemma-4-31b", "Gemma 4 31B"),
    "26b": ("gemma4", "gemma-4-26b-a4b", "Gemma 4 26B-A4B"),
    "xs2": ("laguna", "laguna-xs.2", "Laguna-XS.2"),
}
PARALLEL = 4
MOST_OVER = 0.03  # that a prediction may be above what was measured
LOOK_S = 0.01  # between two looks at the free memory


@dataclass(frozen=True, slots=True)
class Case:
    """What is loaded, and on what card."""

    model: str
    context: int
    kv_type: str
    card: int  # GiB
    budget: str = ""  # of hot experts; "": as many as fit

    @property
    def name(self) -> str:
        """The key of its result."""
        words = (self.model, f"{self.context // 1024}k", self.kv_type, f"{self.card}g", self.budget)
        return " ".join(word for word in words if word)

    @property
    def settings(self) -> dict[str, object]:
        """The settings of an engine."""
        given: dict[str, object] = {
            "context": self.context,
            "kv_type": self.kv_type,
            "parallel": PARALLEL,
            "device_memory": f"{self.card}GiB",
        }
        return given | ({"expert_budget": self.budget} if self.budget else {})


def cases() -> Iterator[Case]:
    """Yield all cases, the cards of a model one after another."""
    for model, cards in (
        ("27b", ((24, 8), (24, 32), (32, 32), (32, 128), (48, 32), (48, 128))),
        ("31b", ((24, 8), (32, 8), (32, 32), (40, 32), (48, 32), (48, 128))),
    ):
        for card, context in cards:
            for kv_type in ("bf16", "q8_0"):
                yield Case(model, context * 1024, kv_type, card)
    for model in ("35b", "26b", "xs2"):
        for card, context, kv_type, budget in (
            (8, 8, "bf16", ""),
            (8, 32, "q8_0", ""),
            (8, 8, "bf16", "0%"),
            (12, 8, "bf16", ""),
            (12, 32, "bf16", "25%"),
            (12, 128, "q8_0", ""),
            (16, 32, "bf16", ""),
            (16, 128, "q8_0", "40%"),
            (24, 32, "bf16", "60%"),
            (24, 128, "bf16", ""),
            (32, 128, "bf16", ""),
            (48, 128, "bf16", "80%"),
        ):
            yield Case(model, context * 1024, kv_type, card, budget)


@dataclass(frozen=True, slots=True)
class Result:
    """What a case was predicted to take of the GPU, and what it took."""

    case: Case
    predicted: int  # bytes, without the reserve
    published: int  # the same with the published formula in place of our workspace
    measured: int
    hot: float  # share of experts in GPU memory; 1 for a dense model
    lines: dict[str, int]
    reserved: int  # of what was measured, by torch
    mapped: int  # bytes of host memory that the GPU reads in place
    seconds: float
    day: str

    @property
    def over(self) -> float:
        """How far the prediction is above what was measured, as a share of that."""
        return self.predicted / self.measured - 1


class Watch:
    """Looks at the GPU's free memory in a thread, and keeps the least."""

    def __init__(self) -> None:
        self.least, self._done = free_by_torch(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(LOOK_S):
            self.least = min(self.least, free_by_torch())

    def end(self) -> int:
        """Return the fewest bytes that were free."""
        self._done.set()
        self._thread.join()
        return min(self.least, free_by_torch())


def measure(case: Case, path: Path) -> Result:
    """Load a case in this process and run its largest steps."""
    began = time.perf_counter()
    usage = Usage()  # before CUDA starts
    torch.cuda.init()  # type: ignore[no-untyped-call]
    free, taken = free_by_torch(), usage.taken()
    watch = Watch()
    upload._read = lambda *read: None  # what lies in the buffers is as good
    pipeline, plan = open_pipeline(path, device="cuda:0", **case.settings)
    run_steps(pipeline, plan)
    torch.cuda.synchronize()
    reserved = torch.cuda.max_memory_reserved()
    # From the driver's report before CUDA started; from CUDA's own afterwards, which is quicker.
    measured = taken + free - watch.end()
    device = plan.devices[0]
    lines = {line.name: line.bytes for line in device.lines if line.name != "reserve"}
    predicted = sum(lines.values())
    store = pipeline._stages[0].store
    found = Result(
        case=case,
        predicted=predicted,
        published=predicted - lines["workspace"] + published_bytes(path, plan),
        measured=measured,
        hot=device.hot_experts / device.total_experts if device.total_experts else 1.0,
        lines=lines,
        reserved=reserved,
        mapped=len(store.memory) if store is not None and store.pinned else 0,
        seconds=time.perf_counter() - began,
        day=date.today().isoformat(),
    )
    pipeline.close()
    return found


def published_bytes(path: Path, plan: Plan) -> int:
    """Return the activation reserve of a plan by the published formula."""
    shape = describe(open_checkpoint(path)).shape
    value_bytes = int(BY_NAME[plan.settings.v_type].bytes_for(32) / 32)
    return published_activation(
        shape.hidden, shape.ffn_width, plan.settings.parallel, value_bytes, graphs=True
    ).bytes


def run_steps(pipeline: Pipeline, plan: Plan) -> None:
    """Run a chunk at the end of the context with others that decode, a prompt, and small steps."""
    settings = plan.settings
    pages = range(min(settings.sequence_pages, settings.pages))
    context = min(settings.context, len(pages) * settings.page_size)
    long = sequence([7] * context, pages)
    long.cached = max(0, context - settings.chunk)
    others = [Turn(decoding(20, 2, slot), 1) for slot in range(1, settings.parallel)]
    steps = [[Turn(long, min(settings.chunk, context)), *others]]
    steps.append([Turn(sequence([5] * min(settings.chunk, context), pages), settings.chunk)])
    steps += [
        [Turn(decoding(20, 2, slot), 1) for slot in range(batch)]
        for batch in (1, settings.parallel)
    ]
    few = sequence([7] * context, pages)
    few.cached = max(0, context - DECODE_ROWS)
    steps.append([Turn(few, min(DECODE_ROWS, context))])
    for turns in steps:
        step_seconds(pipeline, turns, 1)


def measure_apart(case: Case, path: Path) -> Result | str:
    """Measure a case in a process of its own; return what went wrong if it did.

    The process is forked: it has torch imported already, and starts CUDA itself.
    """
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def work() -> None:
        try:
            theirs.send(measure(case, path))
        except BaseException as error:
            traceback.print_exc()
            theirs.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        found = mine.recv()
    except EOFError:
        found = "the process ended without a result"
    process.join()
    assert isinstance(found, (Result, str))
    return found


def load_results(path: Path) -> dict[str, Result]:
    """Return the results of a file by their case's name."""
    if not path.exists():
        return {}
    found = {}
    for entry in json.loads(path.read_text()):
        case = Case(**entry.pop("case"))
        found[case.name] = Result(case=case, **entry)
    return found


def save_results(path: Path, results: dict[str, Result]) -> None:
    """Write all results."""
    path.write_text(json.dumps([asdict(result) for result in results.values()], indent=1) + "\n")


def verdict(result: Result) -> bool:
    """Print a result; return whether the prediction holds."""
    most = (1 + MOST_OVER) * result.measured
    good = result.measured <= result.predicted <= most
    print(
        f"{'PASS' if good else 'FAIL'} {result.case.name}: predicted {result.predicted / GIB:.3f}, "
        f"measured {result.measured / GIB:.3f} GiB ({100 * result.over:+.2f} %), "
        f"{(result.predicted - result.measured) / MIB:+.0f} MiB, beside torch "
        f"{(result.measured - result.reserved) / MIB:.0f}, mapped {result.mapped / GIB:.2f} GiB, "
        f"{result.seconds:.0f} s",
        flush=True,
    )
    return good


def table(results: dict[str, Result]) -> str:
    """Return all results as a page."""
    ordered = [results[case.name] for case in cases() if case.name in results]
    over = sorted(result.over for result in ordered)
    days = sorted({result.day for result in ordered})
    text = [
        "# Predicted and measured memory of a GPU",
        "",
        "What a plan predicts that a process takes of the GPU (all lines but the reserve), and",
        "the most that it took, CUDA's context included: models of true size with Q4_K_M weights,",
        "4 sequences together, on one H200, of which --device-memory allows as much as a smaller",
        "card has. `python -m benchmarks.memory_matrix` repeats it.",
        "",
        "In the last column our workspace is replaced by the published formula (8 x rows x width",
        "x 2 bytes, and 2 GiB for graphs; see `plan/lines.py`): what that formula would reserve.",
        "",
        f"{len(ordered)} cases, {' to '.join(days[:: max(1, len(days) - 1)])}: the prediction is "
        f"{100 * over[0]:+.2f} to {100 * over[-1]:+.2f} % above what was measured, "
        f"{100 * over[len(over) // 2]:+.2f} % in the median.",
        "",
        "| model | context | KV | card, GiB | hot experts | predicted, GiB | measured, GiB | over "
        "| published formula, over |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in ordered:
        case = result.case
        hot = f"{100 * result.hot:.0f} %" if case.model not in ("27b", "31b") else "dense"
        published = result.published / result.measured - 1
        text.append(
            f"| {MODELS[case.model][2]} | {case.context // 1024}k | {case.kv_type} | {case.card} "
            f"| {hot} | {result.predicted / GIB:.3f} | {result.measured / GIB:.3f} "
            f"| {100 * result.over:+.2f} % | {100 * published:+.1f} % |"
        )
    return "\n".join(text) + "\n"


def main() -> int:
    """Measure the cases that the file of results lacks, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="of the models, which take no room on the disk")
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--again", action="store_true", help="measure known cases, too")
    parser.add_argument("--seconds", type=float, default=500, help="begin nothing after them")
    parser.add_argument("--half", choices=("1", "2"), help="only every second case, from this one")
    parser.add_argument("--table", type=Path, help="write the table here")
    given = parser.parse_args()
    began, results = time.perf_counter(), load_results(given.out)
    wrong = left_out = 0
    wanted = list(cases()) if given.folder is not None else []
    for case in wanted if given.half is None else wanted[int(given.half) - 1 :: 2]:
        if given.only not in case.name or (case.name in results and not given.again):
            continue
        if time.perf_counter() - began > given.seconds:
            left_out += 1
            continue
        given.folder.mkdir(parents=True, exist_ok=True)
        family, size, _ = MODELS[case.model]
        found = measure_apart(case, write_hollow(family, size, given.folder / f"{size}.gguf"))
        if isinstance(found, str):
            print(f"FAIL {case.name}: {found}", flush=True)
            wrong += 1
            continue
        results[case.name] = found
        save_results(given.out, results)
        wrong += not verdict(found)
    if left_out:
        print(f"LEFT OUT {left_out} cases: run it again")
    if results:
        print(table(results))
    if given.table is not None:
        given.table.write_text(table(results))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
