"""Measures models that are split over stages, against the same models on one GPU.

    python -m tests.gpu.check_split --folder FOLDER [--only 27b,35b] [--seconds 520]
    python -m tests.gpu.check_split --folder FOLDER --tiny --device cpu     # a rehearsal

Every case is a process of its own. A table at the end has a row for each: two stages on one GPU
must decode at 95 % of the speed of one stage (27B), 93 % with 60 % of the experts hot (35B), and a
GPU with a CPU must be within 15 % of what its plan predicts. `headroom calibrate` measures the
machine first, in FOLDER. Rows without a limit tell what stages gain that work at the same time:
`both` shares the sequences that decode among two steps, `one` does not. LEFT OUT marks rows for
which `--seconds` did not suffice. Nothing else may use the GPU. Exits with 1 if a row failed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headroom.engine.request import SamplingParams
from headroom.llm import LLM
from tests.gpu.running import MODELS, synth

TOKENS, ROUNDS, TOGETHER, LONG = 128, 3, 8, 2048
CPU_LAYERS = 8  # of 64


@dataclass(frozen=True, slots=True)
class Case:
    """A model on some devices."""

    name: str
    model: str  # of MODELS
    devices: str  # "g" is the GPU
    settings: Mapping[str, Any] = field(default_factory=dict)
    shares: bool | None = None  # sequences among two steps; None: as the plan predicts
    ratio_to: str = ""  # another case's name
    least: float = 0.0  # of that ratio
    predicts: bool = False  # must be as fast as its plan predicts


SPLIT = {"split": f"{64 - CPU_LAYERS},{CPU_LAYERS}"}
HOT = {"expert_budget": "60%"}
CASES = (
    Case("27b", "27b", "g"),
    Case("27b, two stages", "27b", "g,g", ratio_to="27b", least=0.95),
    Case("27b, 8 layers on the CPU", "27b", "g,cpu", SPLIT, predicts=True),
    Case("27b, 8 layers on the CPU, both", "27b", "g,cpu", SPLIT, shares=True),
    Case("27b, 8 layers on the CPU, one", "27b", "g,cpu", SPLIT, shares=False),
    Case("35b, 60 % hot", "35b", "g", HOT),
    Case("35b, 60 % hot, two stages", "35b", "g,g", HOT, ratio_to="35b, 60 % hot", least=0.93),
    Case("35b, CPU behind the GPU", "35b", "g,cpu", {"split": "30,10"}),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    name: str
    decode: float = 0.0  # tokens per second of one sequence
    together: float = 0.0  # of several
    prompt: float = 0.0  # of a long prompt
    note: str = ""
    verdict: str = ""  # PASS, FAIL, LEFT OUT, or "" if nothing is wanted


def measure(path: Path, case: Case, device: str, home: Path) -> dict[str, Any]:
    """Load a model and return its speeds."""
    devices = ",".join(device if part == "g" else part for part in case.devices.split(","))
    given = {"context": LONG + 1024, "parallel": TOGETHER, "routing_stats": "off", **case.settings}
    given |= {"home": str(home), "no_prefix_cache": True}  # the calibration lies in the home folder
    with LLM(str(path), device=devices, **given) as llm:
        pipeline = llm.engine._pipeline
        if (shares := case.shares) is not None:
            pipeline._pays_to_share = lambda sequences, steps: shares  # type: ignore[assignment]
        speeds: dict[str, list[float]] = {"decode": [], "together": [], "prompt": []}
        for number in range(1 + ROUNDS):
            single = run(llm, 1, 32, TOKENS, number)
            many = run(llm, TOGETHER, 32, TOKENS, number)
            long = run(llm, 1, min(LONG, llm.plan.settings.context - 64), 1, number)
            if number:  # the first round warms up
                for name, speed in zip(speeds, (single, many, long), strict=True):
                    speeds[name].append(speed)
        predicted = llm.plan.predicted
        stages = [
            {"device": stage.device, "predicted_ms": round(1e3 * stage.decode_s, 2)}
            for stage in predicted.stages
        ]
    return {
        **{name: statistics.median(found) for name, found in speeds.items()},
        "predicted": predicted.decode_tokens_per_s,
        "estimate": predicted.estimate,
        "stages": stages,
    }


def run(llm: LLM, sequences: int, prompt: int, tokens: int, seed: int) -> float:
    """Return the tokens per second of answers, or of a prompt whose answer is one token."""
    vocab, context = llm.engine.vocab, llm.plan.settings.context
    prompts = [
        [(seed * 7919 + number * 104729 + 31 * at) % vocab for at in range(prompt)]
        for number in range(sequences)
    ]
    params = SamplingParams(
        temperature=0, max_tokens=min(tokens, context - prompt), ignore_eos=True
    )
    started = time.perf_counter()
    answers = llm.generate(prompts, params)
    took = time.perf_counter() - started
    if tokens == 1:
        return prompt / took
    # The time of the longest decode phase: prompts are left out.
    decode_s = max(answer.timings.decode_s for answer in answers)
    return sequences * (len(answers[0].token_ids) - 1) / decode_s


def judge(case: Case, found: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> Row:
    """Return a case's row, with what it is held to."""
    note, verdict = "", ""
    if case.ratio_to and case.ratio_to in others:
        share = found["decode"] / others[case.ratio_to]["decode"]
        note = f"{100 * share:.1f} % of {case.ratio_to}, wanted {100 * case.least:.0f} %"
        verdict = "PASS" if share >= case.least else "FAIL"
    elif case.ratio_to:
        note, verdict = f"nothing to compare with: no {case.ratio_to}", "FAIL"
    elif case.predicts:
        share = found["predicted"] / found["decode"]
        note = f"predicted {found['predicted']:.2f}, {100 * share:.1f} % of it, wanted 85 to 115 %"
        note += " (not calibrated)" if found["estimate"] else ""
        verdict = "PASS" if 0.85 <= share <= 1.15 else "FAIL"
    return Row(case.name, found["decode"], found["together"], found["prompt"], note, verdict)


def print_table(rows: Sequence[Row]) -> None:
    """Print all rows."""
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  decode  {TOGETHER} together  prompt  (tokens per second)")
    for row in rows:
        speeds = f"{row.decode:6.1f}  {row.together:10.1f}  {row.prompt:6.0f}"
        print(f"{row.name:{width}}  {speeds}  {row.verdict} {row.note}".rstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases that fit into the time; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for models and measurements")
    parser.add_argument("--only", help="models, as in 27b,35b")
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="models of a few layers")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # of a child: its name
    given = parser.parse_args(arguments)
    if given.case:
        case = next(case for case in CASES if case.name == given.case)
        if given.tiny:
            case = tiny(case)
        path = model_path(given, case.model)
        print(json.dumps(measure(path, case, given.device, given.folder)))
        return 0
    ends = time.monotonic() + given.seconds
    wanted = given.only.split(",") if given.only else list(MODELS)
    if not given.tiny:
        # Measurements lie in the home folder, where the cases find them.
        child(["-m", "headroom", "calibrate", "--home", str(given.folder)], 120)
    rows: list[Row] = []
    found: dict[str, dict[str, Any]] = {}
    cases = [tiny(case) for case in CASES] if given.tiny else CASES
    for case in (case for case in cases if case.model in wanted):
        left = ends - time.monotonic()
        if left < (0 if given.tiny else 30):
            rows.append(Row(case.name, verdict="LEFT OUT"))
            continue
        try:
            model_path(given, case.model)
            left = ends - time.monotonic()
            told = child(child_arguments(given, case), left)
            found[case.name] = json.loads(told.splitlines()[-1])
            rows.append(judge(case, found[case.name], found))
        except subprocess.TimeoutExpired:
            rows.append(Row(case.name, verdict="LEFT OUT"))
        except subprocess.CalledProcessError as error:
            rows.append(Row(case.name, note=error.stderr.strip()[-500:], verdict="FAIL"))
        print_table(rows[-1:])
    print()
    print_table(rows)
    return int(any(row.verdict == "FAIL" for row in rows))


def tiny(case: Case) -> Case:
    """Return a case for a model of a few layers."""
    settings = {name: value for name, value in case.settings.items() if name != "split"}
    settings["context"] = 256
    return Case(case.name, case.model, case.devices, settings, case.shares)


def child_arguments(given: argparse.Namespace, case: Case) -> list[str]:
    """Return the arguments with which Python measures one case."""
    more = ["--tiny"] if given.tiny else []
    return [
        *("-m", "tests.gpu.check_split", "--case", case.name),
        *("--folder", str(given.folder), "--device", given.device, *more),
    ]


def child(arguments: Sequence[str], seconds: float) -> str:
    """Run Python and return what it prints."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds)
    return done.stdout


def model_path(given: argparse.Namespace, name: str) -> Path:
    """Return the path of a model, which is written if it is not there."""
    family, preset = MODELS[name]
    if given.tiny:
        return synth(family, given.folder / f"{name}-tiny.gguf")
    path = given.folder / f"{name}.gguf"
    return synth(family, path, "--size", preset, "--quant", "Q4_K_M")


if __name__ == "__main__":
    sys.exit(main())
