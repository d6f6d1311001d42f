"""How much of a decode step is Python: wall time of a step, and the part of it in C++ kernels.

    python benchmarks/python_share.py MODEL.gguf ... [--tokens 64] [--rounds 3] [--threads 2]

Everything that is not a call of the C++ module counts as Python: torch's own operations, the
engine, sampling. The round whose steps were shortest counts.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headroom.engine.request import SamplingParams
from headroom.kernels.native import module
from headroom.llm import LLM

PROMPT = list(range(40, 72))


class Clock:
    """Time spent in calls of the C++ module, and how many there were."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function wrapped so that its time is counted."""

        def call(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*given)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return call


class Timed:
    """A C++ object whose methods are timed."""

    def __init__(self, clock: Clock, inner: Any) -> None:
        self._clock, self._inner = clock, inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value
        timed = self._clock.timed(lambda *given: value(*map(bare, given)))
        setattr(self, name, timed)  # found at once from now on
        return timed


def bare(value: Any) -> Any:
    """What the C++ module takes: its own object, not the timed one."""
    return value._inner if isinstance(value, Timed) else value


def watch(clock: Clock) -> None:
    """Time every call of operations, layers and experts from now on."""
    native = module.MODULE
    make_ops, make_layer, experts = native.Ops, native.Layer, native.experts
    native.Ops = lambda *given: Timed(clock, make_ops(*given))
    native.Layer = lambda *given, **named: Timed(clock, make_layer(*given, **named))
    native.experts = clock.timed(lambda *given: experts(*map(bare, given)))


@dataclass(frozen=True, slots=True)
class Step:
    """One token of one sequence, on average, in seconds."""

    wall: float
    native: float
    calls: float


def measure(llm: LLM, clock: Clock, tokens: int) -> Step:
    """Decode twice, one token and many; the steps between are the difference."""
    seen = []
    for count in (1, 1 + tokens):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=count)
        began, before, calls = time.perf_counter(), clock.seconds, clock.calls
        llm.generate([PROMPT], params)
        seen.append((time.perf_counter() - began, clock.seconds - before, clock.calls - calls))
    one, many = seen
    return Step(*((b - a) / tokens for a, b in zip(one, many, strict=True)))


def main() -> None:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    clock = Clock()
    watch(clock)
    for path in given.models:
        with LLM(path, context=256, parallel=1, threads=given.threads) as llm:
            measure(llm, clock, 2)
            steps = [measure(llm, clock, given.tokens) for _ in range(given.rounds)]
        best = min(steps, key=lambda step: step.wall)
        print(
            f"{path}: step {best.wall * 1e6:.0f} us, kernels {best.native * 1e6:.0f} us in "
            f"{best.calls:.0f} calls, Python {1 - best.native / best.wall:.0%}"
        )


if __name__ == "__main__":
    main()
