"""Speeds of models with cold experts against what they must reach, as one table.

    python -m benchmarks.expert_speeds --folder FOLDER --out speeds.json --only traces,batches
    python -m benchmarks.expert_speeds --folder FOLDER --out speeds.json --only uniform,paths,others

Each call takes at most --seconds (520): it begins no row that would take longer, and says which
rows it left out. The file of results is read again, so that calls add up to one table, which each
call prints whole. The folder holds models of random weights, made-up routing traces and the
machine's measured speeds; what is there already is used.

Rows come in groups: "traces" and "batches" impose routing like that of real models, "uniform" has
even routing, "paths" compares who computes cold experts, on a quiet machine and with three of four
cores kept busy by another program, and "others" has other models and short prompts. With
--llama-bench, llama.cpp runs the rows of "others" with as many experts in GPU memory.

Exits with 1 if a row is slower than it must be. With --device cpu --tiny everything runs on tiny
models, where speeds mean nothing, to try this program.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experts import Result, run_child

GROUPS = ("traces", "batches", "uniform", "paths", "others")
# Families and sizes by the names that rows use, and the tiny ones that stand for them.
MODELS = {
    "35b": ("qwen35moe", "qwen3.5-35b-a3b"),
    "xs2": ("laguna", "laguna-xs.2"),
    "26b": ("gemma4", "gemma-4-26b-a4b"),
}
TINY = {"35b": "tiny", "xs2": "tiny", "26b": "tiny-moe"}
FIRST, SECOND = "qwen3-30b-a3b", "qwen3.8-flash-next"  # presets of traces
TRACE_TOKENS, TRACE_SEQUENCES = 8000, 16
CONTEXT = 32  # tokens before the decoded ones
BUSY_SHARE = 0.75  # of the cores, which another program keeps busy
# What takes how long, in seconds, before it has been seen.
MODEL_S, CALIBRATE_S, TRACE_S, ROW_S, FIRST_ROW_S = 25.0, 20.0, 8.0, 22.0, 45.0
LIMIT_S = 120.0  # of one child
AUTO_LEAST = 0.95  # of the better of two fixed paths: what "auto" must reach


@dataclass(frozen=True, slots=True)
class Target:
    """One figure of a row, and what it must reach and shall reach, in tokens per second."""

    kind: str  # "decode" or "prompt"
    number: int  # sequences that decode together, or tokens of the prompt
    must: float = 0.0  # 0: reported only
    aim: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One run of headroom bench."""

    name: str
    group: str
    told: str  # in the table
    flags: tuple[str, ...]
    targets: tuple[Target, ...]
    model: str = "35b"
    trace: str = ""  # preset of the imposed routing; "": random weights route evenly
    hits: float = 0.0  # share of choices that must be hits; 0: reported only
    busy: bool = False  # while another program keeps most cores busy
    tokens: int = 384
    compare: bool = False  # with llama.cpp, if it is there


def _decode(must: float = 0.0, aim: float = 0.0) -> tuple[Target, ...]:
    return (Target("decode", 1, must, aim),)


def _path_rows() -> Iterator[Row]:
    for busy in (False, True):
        state = "busy" if busy else "quiet"
        for share, trace in (("60%", ""), ("40%", FIRST)):
            for cold in ("gpu", "cpu", "auto"):
                yield Row(
                    f"{state}-{share}-{trace or 'even'}-{cold}",
                    "paths",
                    f"{share} resident, {trace or 'even routing'}, --cold {cold}, {state}",
                    ("--expert-budget", share, "--cold", cold),
                    _decode(),
                    trace=trace,
                    busy=busy,
                    tokens=192,
                )


ROWS: tuple[Row, ...] = (
    Row(
        *("40-first", "traces", f"40 % resident, {FIRST}", ("--expert-budget", "40%")),
        *(_decode(340, 460), "35b", FIRST, 0.88),
    ),
    Row(
        *("40-second", "traces", f"40 % resident, {SECOND}", ("--expert-budget", "40%")),
        *(_decode(240, 320), "35b", SECOND),
    ),
    Row(
        *("card-12", "traces", f"card of 12 GiB, {FIRST}", ("--device-memory", "12GiB")),
        *(_decode(360, 450), "35b", FIRST),
    ),
    Row(
        *("card-8", "traces", f"card of 8 GiB, {FIRST}", ("--device-memory", "8GiB")),
        *(_decode(270, 360), "35b", FIRST),
    ),
    Row(
        *("card-12-many", "batches", f"card of 12 GiB, {FIRST}", ("--device-memory", "12GiB")),
        (Target("decode", 4, 450, 700), Target("decode", 16, 500, 1000)),
        *("35b", FIRST),
    ),
    Row(
        *("hot-many", "batches", "all hot", ("--expert-budget", "100%")),
        (
            Target("decode", 4, 1442, 1500),
            Target("decode", 8, 2300, 2600),
            Target("decode", 16, 2900, 3600),
        ),
        tokens=128,
    ),
    Row(
        *("hot-many-first", "batches", f"all hot, {FIRST}", ("--expert-budget", "100%")),
        (Target("decode", 4), Target("decode", 8), Target("decode", 16)),
        trace=FIRST,
        tokens=128,
    ),
    Row(
        *("60-even", "uniform", "60 % resident, even routing", ("--expert-budget", "60%")),
        _decode(233, 280),
    ),
    Row(
        *("card-12-even", "uniform", "card of 12 GiB, even routing"),
        ("--device-memory", "12GiB"),
        _decode(),
    ),
    *_path_rows(),
    Row(
        *("few-cold", "others", "258 of 10240 experts cold", ("--expert-budget", "97.48%")),
        (Target("prompt", 95),),
        compare=True,
    ),
    *(
        Row(
            f"{model}-60",
            "others",
            "60 % resident, even routing",
            ("--expert-budget", "60%"),
            (*_decode(), *(Target("prompt", count) for count in (95, 512, 2048))),
            model=model,
            tokens=128,
            compare=True,
        )
        for model in ("xs2", "26b")
    ),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure of a row."""

    row: str
    kind: str
    number: int
    tokens_per_s: float
    hit_rate: float | None
    link_bytes: float | None  # read or copied over the link for a token
    peer: float | None = None  # tokens per second of llama.cpp


def figures_of(row: Row, report: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of a row that a report of headroom bench has."""
    decodes = {figure["batch"]: figure for figure in report["decodes"]}
    prompts = {figure["tokens"]: figure for figure in report["prompts"]}
    compared = (report.get("compare") or {}).get("figures") or []
    peers = {one["what"]: float(one["peer_tokens_per_s"]) for one in compared}
    found = []
    for target in row.targets:
        figure = (decodes if target.kind == "decode" else prompts).get(target.number)
        if figure is None:
            continue
        use = figure.get("experts") or {}
        size = use.get("cold_bytes_per_token") or {}
        speed = float(figure["tokens_per_s"])
        found.append(
            Figure(
                *(row.name, target.kind, target.number, speed, use.get("hit_rate")),
                link_bytes=size.get("gpu", 0.0) + size.get("stream", 0.0) if size else None,
                # It decodes one sequence.
                peer=peers.get(
                    f"prompt of {target.number}"
                    if target.kind == "prompt"
                    else f"decode after {CONTEXT}" * (target.number == 1)
                ),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a row."""

    row: str
    status: str  # "done", "failed", "too long" or "left out"
    seconds: float
    why: str  # last lines of the log, if it is not done
    figures: tuple[Figure, ...] = ()


def load_outcomes(path: Path) -> dict[str, Outcome]:
    """Return the outcomes of a file by their row's name."""
    if not path.exists():
        return {}
    found = {}
    for entry in json.loads(path.read_text()):
        figures = tuple(Figure(**figure) for figure in entry.pop("figures"))
        found[entry["row"]] = Outcome(**entry, figures=figures)
    return found


def save_outcomes(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write all outcomes."""
    path.write_text(json.dumps([asdict(one) for one in outcomes.values()], indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A line of the table, and whether it is as fast as it must be; None: it is not judged."""

    cells: tuple[str, ...]
    good: bool | None


HEADS = (
    *("run", "model", "figure", "tok/s", "must", "aim", "verdict", "hits"),
    *("over the link, a token", "llama.cpp"),
)


def verdicts(outcomes: Mapping[str, Outcome]) -> Iterator[Verdict]:
    """Yield the lines of the table: all rows, then "auto" against the fixed paths."""
    for row in ROWS:
        outcome = outcomes.get(row.name)
        by_target = {(x.kind, x.number): x for x in outcome.figures} if outcome else {}
        for target in row.targets:
            figure = by_target.get((target.kind, target.number))
            yield _line(row, target, figure, outcome.status if outcome else "not run")
    yield from _path_verdicts(outcomes)


def _line(row: Row, target: Target, figure: Figure | None, status: str) -> Verdict:
    what = f"batch {target.number}" if target.kind == "decode" else f"prompt of {target.number}"
    head = (row.told, MODELS[row.model][1], what)
    wanted = tuple(f"{x:.0f}" if x else "" for x in (target.must, target.aim))
    if figure is None:
        return Verdict((*head, status, *wanted, "", "", "", ""), None)
    fast = figure.tokens_per_s >= target.must
    hitting = figure.hit_rate is None or figure.hit_rate >= row.hits
    judged = bool(target.must or row.hits)
    good = fast and hitting if judged else None
    reached = "aim" if target.aim and figure.tokens_per_s >= target.aim else "must"
    told = "" if good is None else reached if good else "TOO SLOW" if not fast else "TOO FEW HITS"
    beside = "" if figure.peer is None else f"{figure.peer:.0f}"
    cells = (
        *(*head, f"{figure.tokens_per_s:.0f}", *wanted, told, _percent(figure.hit_rate)),
        *("" if figure.link_bytes is None else f"{figure.link_bytes / 1e6:.0f} MB", beside),
    )
    return Verdict(cells, good)


def _path_verdicts(outcomes: Mapping[str, Outcome]) -> Iterator[Verdict]:
    for auto in (row for row in ROWS if row.group == "paths" and row.name.endswith("-auto")):
        stem = auto.name.removesuffix("auto")
        speeds = [
            outcome.figures[0].tokens_per_s if outcome and outcome.figures else None
            for outcome in (outcomes.get(stem + cold) for cold in ("gpu", "cpu", "auto"))
        ]
        told = (auto.told.replace("--cold auto", "auto over the better path"), "", "batch 1")
        gpu, cpu, own = speeds
        if gpu is None or cpu is None or own is None:
            yield Verdict((*told, "not run", f"{AUTO_LEAST}x", "1.1x", "", "", "", ""), None)
            continue
        ratio = own / max(gpu, cpu)
        good = ratio >= AUTO_LEAST
        word = "aim" if ratio >= 1.1 else "must" if good else "TOO SLOW"
        yield Verdict((*told, f"{ratio:.2f}x", f"{AUTO_LEAST}x", "1.1x", word, "", "", ""), good)


def table(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the lines of a table in Markdown."""
    rows = [HEADS, ("---",) * len(HEADS), *(verdict.cells for verdict in verdicts(outcomes))]
    return [f"| {' | '.join(cells)} |" for cells in rows]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _keep_busy() -> None:
    """Copy memory without end, as a compiler or a game would use cores and bandwidth."""
    source = np.zeros(64 << 20, dtype=np.uint8)
    target = np.empty_like(source)
    while True:
        np.copyto(target, source)


@contextmanager
def others_busy(cores: int) -> Iterator[None]:
    """Keep so many cores busy by other processes."""
    context = multiprocessing.get_context("spawn")
    busy = [context.Process(target=_keep_busy, daemon=True) for _ in range(cores)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.join()


class Bench:
    """Makes what rows need and runs them, each as a process of its own, until the time is up."""

    def __init__(self, given: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._given, self._say = given, say
        self._folder = Path(given.folder)
        self._end = time.monotonic() + given.seconds
        self._row_s: list[float] = []

    def left_s(self) -> float:
        """Return the seconds until the end."""
        return self._end - time.monotonic()

    def run(self, row: Row) -> Outcome:
        """Run a row, if there is time for it and for what it needs."""
        needs = [(path, command, took) for path, command, took in self._needs(row)]
        missing = [need for need in needs if not need[0].exists()]
        own_s = 1.1 * max(self._row_s[-5:]) if self._row_s else FIRST_ROW_S
        own_s = max(own_s, ROW_S) * (2.0 if row.compare and self._given.llama_bench else 1.0)
        needed_s = own_s + sum(took for _, _, took in missing)
        if needed_s > self.left_s():
            why = f"it takes about {needed_s:.0f} s and {max(0.0, self.left_s()):.0f} s are left"
            return Outcome(row.name, "left out", 0.0, why)
        for path, command, _ in missing:
            made = self._child(path.name, command)
            if made.status != "done":
                return Outcome(row.name, made.status, made.seconds, _tail(made))
        cores = int(BUSY_SHARE * (os.cpu_count() or 1)) if row.busy else 0
        with others_busy(cores):
            result = self._child(row.name, self._command(row))
        if result.status != "done" or result.report is None:
            return Outcome(row.name, "failed", result.seconds, _tail(result))
        self._row_s.append(result.seconds)
        return Outcome(row.name, "done", result.seconds, "", tuple(figures_of(row, result.report)))

    def _needs(self, row: Row) -> Iterator[tuple[Path, list[str], float]]:
        """Yield what a row needs: its file, the command that makes it, the seconds that takes."""
        family, size = MODELS[row.model]
        size = TINY[row.model] if self._given.tiny else size
        model = self._model(row)
        if not self._given.tiny:
            home = ["--home", str(self._folder)]
            calibration = self._folder / "calibration"
            yield calibration, ["calibrate", "--json", *home], CALIBRATE_S
        yield model, ["synth", family, str(model), "--size", size, "--quant", "Q4_K_M"], MODEL_S
        if row.trace:
            trace, tokens = self._trace(row), 256 if self._given.tiny else TRACE_TOKENS
            yield (
                trace,
                [
                    *("synth-trace", str(model), str(trace), "--preset", row.trace),
                    *("--tokens", str(tokens), "--sequences", str(TRACE_SEQUENCES)),
                ],
                TRACE_S,
            )

    def _command(self, row: Row) -> list[str]:
        given = self._given
        decode = [x.number for x in row.targets if x.kind == "decode"]
        prompts = [x.number for x in row.targets if x.kind == "prompt"]
        kinds = ["decode"] * bool(decode) + ["prompts"] * bool(prompts)
        tokens = min(row.tokens, 16) if given.tiny else row.tokens
        command = [
            *("bench", str(self._model(row)), "--json", "--device", given.device),
            *("--home", str(self._folder), "--routing-stats", "off", "--no-parts"),
            *("--contexts", str(CONTEXT), "--tokens", str(tokens), "--only", ",".join(kinds)),
            *("--batch", ",".join(map(str, decode or [1]))),
            *("--prompts", ",".join(map(str, prompts or [512]))),
        ]
        if not (given.tiny and given.device == "cpu"):
            command += row.flags
        if row.trace:
            command += ["--routing-trace", str(self._trace(row))]
        if row.compare and given.llama_bench:
            command += ["--compare", "llama-bench", given.llama_bench]
        return command

    def _model(self, row: Row) -> Path:
        size = f"{row.model}-tiny" if self._given.tiny else MODELS[row.model][1]
        return self._folder / f"{size}.gguf"

    def _trace(self, row: Row) -> Path:
        return self._folder / f"{self._model(row).stem}-{row.trace}.trace"

    def _child(self, name: str, command: Sequence[str]) -> Result:
        limit_s = max(5.0, min(LIMIT_S, self.left_s()))
        result = run_child(name, [sys.executable, "-m", "headroom", *command], limit_s)
        self._say(f"{name}: {result.status} in {result.seconds:.0f} s")
        return result


def _tail(result: Result) -> str:
    return " / ".join(result.log[-4:])


def chosen(names: str) -> list[Row]:
    """Return the rows of some groups, or with some names, in the order of the table."""
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    known = {*GROUPS, *(row.name for row in ROWS)}
    if unknown := sorted(wanted - known):
        raise SystemExit(f"{unknown[0]} is not known; known: {', '.join(sorted(known))}")
    return [row for row in ROWS if not wanted or wanted & {row.group, row.name}]


def main() -> int:
    """Run the chosen rows that the file of results lacks, and print the whole table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="of models, traces and speeds")
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    parser.add_argument("--only", default="", help="groups or rows, with commas")
    parser.add_argument("--again", action="store_true", help="measure known rows, too")
    parser.add_argument("--seconds", type=float, default=520.0, help="that all may take")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--llama-bench", default="", help="the program of llama.cpp")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this script")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    began, outcomes = time.monotonic(), load_outcomes(given.out)
    bench = Bench(
        given, lambda text: print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)
    )
    for row in chosen(given.only):
        known = outcomes.get(row.name)
        if known is not None and known.status == "done" and not given.again:
            continue
        outcomes[row.name] = bench.run(row)
        save_outcomes(given.out, outcomes)
    print("\n".join(["", *table(outcomes)]), flush=True)
    for one in outcomes.values():
        if one.status != "done":
            print(f"\n{one.row}: {one.status}: {one.why}", flush=True)
    slow = [verdict for verdict in verdicts(outcomes) if verdict.good is False]
    return 1 if slow and not given.tiny else 0


if __name__ == "__main__":
    sys.exit(main())
