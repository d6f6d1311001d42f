"""A model with experts of which some are cold: speed by share of hot ones, routing and path.

    python benchmarks/experts.py --folder /tmp/experts --out experts.json --seconds 500

Writes a model with random weights once with even and once with skewed routing (files that are
there already are used), measures the machine, and runs `headroom bench` for one configuration
after another, the most important first, each in a process of its own with a limit of its own. What
does not fit into the seconds is left out. Prints a table in Markdown; everything is in the JSON.
"""

import argparse
import json
import random
import shlex
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SKEW = "0.9"  # of the choices go to the hot 60 %
PROMPTS, CONTEXT = (512, 2048), 32
# What a step takes that was not run yet, in seconds.
PREPARE_S = {"calibrate": 20.0, "uniform": 20.0, "skewed": 20.0, "profile": 30.0}
FIRST_S, USUAL_S = 60.0, 35.0  # the first run of a machine also compiles every kernel
LIMIT_S = 100.0  # of one child
PROFILED = 24  # short prompts: statistics are of the many tokens that are drawn after them


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run the model."""

    name: str
    hot: str  # as the table says it
    flags: tuple[str, ...]  # of headroom bench
    cold: str = "auto"
    routing: str = "uniform"  # or "skewed"
    stats: bool = False  # placed by statistics, not evenly
    parts: bool = True  # also look into a step, which takes a few seconds
    must: tuple[int, ...] = ()  # tokens per second: decode, prompts of 512 and 2048
    aim: tuple[int, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        """What is made before it; without any of it there is nothing to measure."""
        return (self.routing, "profile") if self.stats else (self.routing,)


def _share(percent: int, cold: str = "auto", **more: Any) -> Config:
    routing = more.get("routing", "uniform")
    name, budget = f"{percent}-{routing}-{cold}", ("--expert-budget", f"{percent}%")
    return Config(name + more.pop("suffix", ""), f"{percent} %", budget, cold, **more)


def _card(size: str) -> Config:
    return Config(f"card-{size}", f"card of {size}", ("--device-memory", size))


# The most important first.
CONFIGS = (
    _share(60, must=(130, 1500, 3500), aim=(220, 3000, 8000)),
    _share(60, routing="skewed", stats=True, must=(250, 1500, 3500), aim=(450, 3000, 8000)),
    _share(0, must=(65, 900, 2500), aim=(110,)),
    _share(60, suffix="-even", routing="skewed", parts=False),  # what are statistics worth?
    _card("12GiB"),
    _card("8GiB"),
    _share(100),
    _share(60, "gpu", parts=False),
    _share(60, "cpu", parts=False),
    _share(0, "gpu", parts=False),
    _share(0, "cpu", parts=False),
    _share(60, "cpu", routing="skewed", stats=True, parts=False),
    _share(60, "gpu", routing="skewed", stats=True, parts=False),
)


@dataclass(slots=True)
class Result:
    """What became of one configuration or preparation."""

    name: str
    status: str  # "done", "failed", "too long" or "left out"
    seconds: float = 0.0
    command: str = ""
    log: list[str] = field(default_factory=list)  # the last lines
    report: dict[str, Any] | None = None  # of headroom bench, or what a preparation printed


def expected_s(config: Config, taken: Sequence[float], ready: Mapping[str, bool]) -> float:
    """Return how long a configuration will take, by what others took, preparations included."""
    own = max(0.5 * USUAL_S, 1.1 * statistics.median(taken)) if taken else FIRST_S
    return own + sum(PREPARE_S[need] for need in config.needs if need not in ready)


def run_all(
    configs: Sequence[Config],
    left_s: Callable[[], float],
    prepare: Callable[[str], bool],
    run: Callable[[Config], Result],
) -> list[Result]:
    """Run what fits into the time, in order; what fails is noted and stops nothing else."""
    results: list[Result] = []
    ready: dict[str, bool] = {}
    taken: list[float] = []
    for config in configs:
        needed, left = expected_s(config, taken, ready), left_s()
        if needed > left:
            note = f"it takes about {needed:.0f} s and {max(0.0, left):.0f} s are left"
            results.append(Result(config.name, "left out", log=[note]))
            continue
        for need in config.needs:
            if need not in ready:
                ready[need] = prepare(need)
            if not ready[need]:
                results.append(Result(config.name, "failed", log=[f"{need} could not be made"]))
                break
        else:
            results.append(run(config))
        if results[-1].status == "done":
            taken.append(results[-1].seconds)
    return results


class Bench:
    """Runs the commands, each as a process of its own."""

    def __init__(self, given: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._given, self._say = given, say
        self._folder = Path(given.folder)
        self._end = time.monotonic() + given.seconds
        self._again = self._parts = True
        self.prepared: list[Result] = []  # and what was tried again

    def left_s(self) -> float:
        """Return the seconds until the end."""
        return self._end - time.monotonic()

    def prepare(self, what: str) -> bool:
        """Measure the machine, write a model or count its choices; tell whether that worked."""
        made = {"profile": self._stats, "calibrate": self._folder / "calibration"}
        path = made.get(what, self._model(what))
        if path.exists():
            self._say(f"{what}: {path} is there")
            return True
        if what == "profile":
            draw = random.Random(0).choices
            lines = ["".join(draw(string.ascii_letters, k=16)) for _ in range(PROFILED)]
            (self._folder / "prompts.txt").write_text("\n".join(lines) + "\n")
        result = self._child(what, self._commands(what), LIMIT_S)
        self.prepared.append(result)
        return result.status == "done"

    def run(self, config: Config) -> Result:
        """Measure one configuration; the first that fails once more, without parts of a step."""
        config = replace(config, parts=config.parts and self._parts)
        result = self._child(config.name, self._bench(config), LIMIT_S)
        if result.status == "done" or not (config.parts and self._again):
            return result
        self.prepared.append(result)
        again = self._child(config.name, self._bench(replace(config, parts=False)), LIMIT_S)
        self._again, self._parts = False, again.status != "done"  # are they to blame?
        return again

    def _bench(self, config: Config) -> list[str]:
        given = self._given
        kinds = "prompts,decode,parts" if config.parts else "prompts,decode"
        stats = self._stats if config.stats else "off"
        return [
            "bench", str(self._model(config.routing)), "--json", *self._where(),
            "--prompts", given.prompts, "--contexts", str(CONTEXT), "--batch", "1",
            "--tokens", str(given.tokens), "--rounds", "3", "--only", kinds,
            "--routing-stats", str(stats), "--cold", config.cold, *config.flags,
            *shlex.split(given.flags),
        ]  # fmt: skip

    def _commands(self, what: str) -> list[str]:
        given = self._given
        if what == "calibrate":
            return ["calibrate", "--json", "--home", str(self._folder)]
        if what == "profile":
            return [
                "profile", str(self._model("skewed")), "--prompts",
                str(self._folder / "prompts.txt"), "--tokens", "128", "--raw", "--json",
                "--out", str(self._stats), "--context", "256", "--parallel", "4", *self._where(),
            ]  # fmt: skip
        skew = ["--routing-skew", SKEW] if what == "skewed" else []
        model = str(self._model(what))
        return ["synth", given.family, model, "--size", given.size, "--quant", given.quant, *skew]

    def _where(self) -> list[str]:
        return ["--device", self._given.device, "--home", str(self._folder)]

    @property
    def _stats(self) -> Path:
        return self._folder / "skewed.routing.json"

    def _model(self, routing: str) -> Path:
        return self._folder / f"{self._given.size}-{routing}.gguf"

    def _child(self, name: str, command: Sequence[str], limit_s: float) -> Result:
        limit = max(5.0, min(limit_s, self.left_s()))
        result = run_child(name, [sys.executable, "-m", "headroom", *command], limit)
        self._say(f"{name}: {result.status} in {result.seconds:.0f} s{_last(result)}")
        return result


def run_child(name: str, command: Sequence[str], limit_s: float) -> Result:
    """Run a process that prints one JSON object, or nothing of interest."""
    began = time.monotonic()
    result = Result(name, "failed", command=shlex.join(command[1:]))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, cwd=ROOT, check=False
        )
    except subprocess.TimeoutExpired as error:
        result.status, stderr = "too long", error.stderr or b""
        result.log = _tail(stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr)
    else:
        result.log = [*_tail(done.stderr), f"exit code {done.returncode}"]
        result.report = last_json(done.stdout)
        result.status = "failed" if done.returncode else "done"
    result.seconds = time.monotonic() - began
    return result


def last_json(text: str) -> dict[str, Any] | None:
    """Return the object on the last line that has one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            return found if isinstance(found, dict) else None
    return None


def _tail(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()][-40:]


def _last(result: Result) -> str:
    if result.status == "done":
        return f"; {described(result.report)}"
    return f"; {' / '.join(result.log[-2:])}"


HEADS = (
    "hot experts", "routing", "cold by (layers)", "decode tok/s", "prompt 512", "prompt 2048",
    "hits", "GPU busy, decode / prompt", "of it waiting", "link GB/s, decode", "link GB/s, prompt",
    "CPU GB/s", "peak of plan, GB", "load, s",
)  # fmt: skip


def table(configs: Sequence[Config], results: Sequence[Result]) -> list[str]:
    """Return the lines of a table in Markdown; what is missing says why."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for config, result in zip(configs, results, strict=True):
        cells = [config.hot, config.routing + (", statistics" if config.stats else "")]
        if result.status == "done" and result.report:
            cells += row(config, result.report)
        else:
            cells += [config.cold, result.status, *[""] * (len(HEADS) - 4)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def row(config: Config, report: Mapping[str, Any]) -> list[str]:
    """Return what a report says of one configuration, as cells behind the first two."""
    decode, prompts = decode_of(report), {x["tokens"]: x for x in report["prompts"]}
    longest = prompts[max(prompts)] if prompts else {}
    busy = [part.get("gpu_share") for part in report["parts"]]  # of decoding, then of the prompt
    use, memory = decode.get("experts") or {}, report["memory"]
    wait = use.get("ms_per_token", {}).get("wait")
    step_ms = 1e3 * decode["step_s"] if decode else 0.0
    speeds = [decode.get("tokens_per_s")]
    speeds += [prompts.get(count, {}).get("tokens_per_s") for count in PROMPTS]
    return [
        _paths(config, report),
        *(_beside(speed, config, at) for at, speed in enumerate(speeds)),
        _percent(use.get("hit_rate")),
        " / ".join(_percent(share) for share in busy if share is not None),
        "" if wait is None or not step_ms else _percent(wait / step_ms),
        _rate(use, "gpu"),
        _rate(longest.get("experts") or {}, "stream"),
        _rate(use, "cpu"),
        f"{memory['peak_bytes'] / 1e9:.2f} of {memory['planned_bytes'] / 1e9:.2f}",
        f"{report['load_s']:.1f}",
    ]


def decode_of(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the figure of one sequence that decodes; empty where there is none."""
    return next((figure for figure in report["decodes"] if figure["batch"] == 1), {})


def described(report: Mapping[str, Any] | None) -> str:
    """Return a report in a few words, for those who wait."""
    if not report or "decodes" not in report:
        return "" if report is None else json.dumps(report)[:300]
    prompts = [f"{x['tokens_per_s']:.0f} ({x['tokens']})" for x in report["prompts"]]
    decode = decode_of(report)
    hits, speed = (decode.get("experts") or {}).get("hit_rate"), decode.get("tokens_per_s", 0.0)
    return f"decode {speed:.1f} tok/s, prompts {', '.join(prompts)}, hits {_percent(hits)}"


def _beside(speed: float | None, config: Config, at: int) -> str:
    """Return a speed with what it must be and what is aimed at."""
    if speed is None:
        return ""
    both = (("must", config.must), ("aim", config.aim))
    wanted = [f"{what} {speeds[at]}" for what, speeds in both if at < len(speeds)]
    shown = f"{speed:.1f}" if at == 0 else f"{speed:.0f}"
    return f"{shown} ({', '.join(wanted)})" if wanted else shown


def _paths(config: Config, report: Mapping[str, Any]) -> str:
    """Return what was asked for and which layers went which way."""
    found = (report.get("experts") or {}).get("layers_by_path") or {}
    ways = ", ".join(f"{path} {count}" for path, count in found.items())
    return f"{config.cold} ({ways})" if ways else "none cold"


def _rate(use: Mapping[str, Any], path: str) -> str:
    speed = use.get("cold_bytes_per_s", {}).get(path)
    if not speed:
        return ""
    share = use.get("bandwidth_share", {}).get(path)
    return f"{speed / 1e9:.1f}" + (f" ({_percent(share)})" if share else "")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def chosen(configs: Sequence[Config], names: str) -> list[Config]:
    """Return the configurations that were asked for, in the order of their importance."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {config.name for config in configs}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"{unknown[0]} is not known; known: {', '.join(sorted(known))}")
    return [config for config in configs if not wanted or config.name in wanted]


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", required=True, help="of models, statistics and speeds")
    parser.add_argument("--out", required=True, help="JSON file that gets everything")
    parser.add_argument("--seconds", type=float, default=500.0, help="that all may take")
    parser.add_argument("--only", default="", help="names of configurations, with commas")
    parser.add_argument("--flags", default="", help="more flags of headroom bench")
    model = {"family": "qwen35moe", "size": "qwen3.5-35b-a3b", "quant": "Q4_K_M"}
    others = {"device": "cuda:0", "prompts": ",".join(map(str, PROMPTS))}
    for name, value in (model | others).items():
        parser.add_argument(f"--{name}", default=value)
    parser.add_argument("--tokens", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    """Measure, write the JSON after every step, and print the table."""
    given = arguments()
    configs, began, results = chosen(CONFIGS, given.only), time.monotonic(), []

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)

    Path(given.folder).mkdir(parents=True, exist_ok=True)
    bench = Bench(given, say)

    def save() -> None:
        all_of = {"prepared": bench.prepared, "results": results}
        found = {key: [asdict(one) for one in rows] for key, rows in all_of.items()}
        Path(given.out).write_text(json.dumps(found, indent=1) + "\n")

    def run(config: Config) -> Result:
        result = bench.run(config)
        results.append(result)
        save()
        return result

    bench.prepare("calibrate")
    results = run_all(configs, bench.left_s, bench.prepare, run)
    save()
    print("\n".join(["", *table(configs, results)]), flush=True)
    for result in results:
        if result.status != "done":
            print(f"\n{result.name}: {result.status}", *result.log[-12:], sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
