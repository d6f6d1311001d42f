"""What worker processes gain: sequences that decode together, and a long prompt.

    python benchmarks/workers.py MODEL [--sequences 8] [--tokens 64] [--prompt 1024] [--rounds 3]

The machine is calibrated first. One process with one thread and two workers with one thread each
take turns on the same model, so that a machine whose speed changes favours neither. With two
workers the engine and its sampling are a third process. All draw greedily; their tokens must be
equal.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from headroom import LLM, SamplingParams
from headroom.bench.workload import random_prompt

SHORT = 16  # tokens of each prompt whose answers are measured


def main() -> None:
    """Measure both, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default=None, help="as of headroom run")
    given = parser.parse_args()
    home = tempfile.mkdtemp()
    # A plan predicts by these speeds.
    calibrate = [sys.executable, "-m", "headroom", "calibrate", "--home", home]
    subprocess.run(calibrate, check=True, stdout=subprocess.DEVNULL)
    settings: dict[str, Any] = {
        "home": home,
        "no_prefix_cache": True,
        "threads": 1,
        "parallel": given.sequences,
        "context": given.prompt + given.tokens + SHORT,
        "chunk": 128,
        "dtype": given.dtype,
        "log_level": "warning",
    }
    found: dict[str, list[dict[str, Any]]] = {"1 process": [], "2 workers": []}
    with LLM(given.model, **settings) as one, LLM(given.model, workers="2", **settings) as two:
        for _ in range(1 + given.rounds):  # the first round warms up
            found["1 process"].append(measure(one, given))
            found["2 workers"].append(measure(two, given))
        predicted = {"1 process": one.plan.predicted, "2 workers": two.plan.predicted}
    equal = len({json.dumps(run["tokens"]) for runs in found.values() for run in runs}) == 1
    rates = {
        what: {name: statistics.median(x[what] for x in runs[1:]) for name, runs in found.items()}
        for what in ("decode_tokens_per_s", "prompt_tokens_per_s")
    }
    plan, stages = predicted["2 workers"], found["2 workers"][-1]["stages"]
    singles = {
        name: statistics.median(x["one_sequence_tokens_per_s"] for x in runs[1:])
        for name, runs in found.items()
    }
    print(
        json.dumps(
            {
                "model": given.model,
                "machine": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "sequences": given.sequences,
                "equal_tokens": equal,
                **{what: pair | {"ratio": ratio(pair)} for what, pair in rates.items()},
                "one_sequence_tokens_per_s": {
                    name: {
                        "measured": round(speed, 2),
                        "predicted": round(predicted[name].decode_tokens_per_s, 2),
                        "ratio": round(predicted[name].decode_tokens_per_s / speed, 3),
                    }
                    for name, speed in singles.items()
                },
                "one_sequence_step_ms": parts_of_steps(found["2 workers"][1:]),
                "measured_shares": shares([float(stage["busy_s"]) for stage in stages]),
                "predicted_shares": shares([stage.decode_s for stage in plan.stages]),
            },
            indent=1,
        )
    )


def measure(llm: LLM, given: argparse.Namespace) -> dict[str, Any]:
    """Return the speed of answers that are decoded together, and of one long prompt."""
    vocab = llm.engine.vocab
    prompts = [random_prompt(SHORT, vocab, seed) for seed in range(given.sequences)]
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
    started = time.perf_counter()
    answers = llm.generate(prompts, params)
    decode_s = time.perf_counter() - started
    long = random_prompt(given.prompt, vocab, 99)
    started = time.perf_counter()
    llm.generate(long, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    prompt_s = time.perf_counter() - started
    single = llm.generate(prompts[0], params)[0]
    return {
        "one_sequence_tokens_per_s": (given.tokens - 1) / single.timings.decode_s,
        "decode_tokens_per_s": given.sequences * given.tokens / decode_s,
        "prompt_tokens_per_s": given.prompt / prompt_s,
        "tokens": [list(answer.token_ids) for answer in answers],
        "stages": answers[-1].timings.stages,
        "single_stages": single.timings.stages,
        "single_step_s": single.timings.decode_s / (given.tokens - 1),
    }


def parts_of_steps(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return what a step of one sequence takes over two workers, in ms; medians of all runs.

    The rest of a step is on its way between processes, or spent in the engine and its sampling.
    """
    whole = statistics.median(run["single_step_s"] for run in runs)
    busy = [
        statistics.median(run["single_stages"][at]["busy_s"] / run["single_stages"][at]["steps"]
                          for run in runs)
        for at in range(2)
    ]  # fmt: skip
    parts = {"whole": whole, "worker 1": busy[0], "worker 2": busy[1], "rest": whole - sum(busy)}
    return {name: round(1e3 * seconds, 3) for name, seconds in parts.items()}


def ratio(pair: dict[str, float]) -> float:
    """Return how many times as fast two workers are."""
    return round(pair["2 workers"] / pair["1 process"], 3)


def shares(seconds: list[float]) -> list[float]:
    """Return the share of each stage."""
    return [round(one / sum(seconds), 3) for one in seconds]


if __name__ == "__main__":
    main()
