"""Cold experts through the whole engine on a GPU: tokens, logits, long runs, memory.

python -m tests.gpu.check_cold_engine [--only WORD ...] [--seconds 150]

Needs the C++ module. What does not fit into the seconds is LEFT OUT, and said. Exits with 1 if a
case failed, and with 2 if none failed but some were left out. Each family may run in a process of
its own beside others (`--only laguna`); those of no family want all cores. `test_gpu_cold` has the
same cases as tests.
"""

import argparse
import faulthandler
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Generic, TypeVar

import torch

from headroom.kernels.native.module import MISSING, MODULE
from tests.gpu import cold_cases as cases
from tests.gpu.kept import keep_code

T = TypeVar("T")
Case = tuple[str, Callable[[], str]]
CPU_COLD = {"expert_budget": "30%", "cold": "cpu"}
ALONE = "alone"  # the group of cases that are of no family


def chosen(name: str, only: Sequence[str]) -> bool:
    """Return whether to run a case: no words were given, or its name contains one of them."""
    return not only or any(word in name for word in only)


def group_of(name: str) -> str:
    """Return the model and the type that a case is of, or that it is of none."""
    family, kind = name.split()[:2]
    return f"{family} {kind}" if family in cases.LIMITS else ALONE


class Run:
    """Runs cases one after another and counts what became of them."""

    def __init__(self, only: Sequence[str], seconds: float) -> None:
        self._only, self._until = only, time.monotonic() + seconds
        self.counts = {"PASS": 0, "FAIL": 0, "LEFT OUT": 0}

    def __call__(self, name: str, work: Callable[[], str]) -> None:
        """Run a case and print its verdict."""
        if not chosen(name, self._only):
            return
        if time.monotonic() > self._until:
            self._tell("LEFT OUT", name)
            return
        started = time.perf_counter()
        try:
            wrong = work()
        except Exception:
            wrong = traceback.format_exc(limit=-6)
        spent = f"({time.perf_counter() - started:.1f} s)"
        self._tell("FAIL" if wrong else "PASS", f"{name}: {wrong} {spent}" if wrong else
                   f"{name} {spent}")  # fmt: skip

    @property
    def code(self) -> int:
        """What a process exits with: 1 if a case failed, 2 if only some were left out."""
        return 1 if self.counts["FAIL"] else 2 if self.counts["LEFT OUT"] else 0

    def _tell(self, verdict: str, what: str) -> None:
        self.counts[verdict] += 1
        print(f"{verdict} {what}", flush=True)


class Once(Generic[T]):
    """A value that several cases need, made when it is first used."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: T | None = None

    def __call__(self) -> T:
        """Return it."""
        if self._made is None:
            self._made = self._make()
        return self._made


def worker_cases(path: Once[Path]) -> Iterator[Case]:
    """Captured steps that ask the CPU, in one engine."""
    settings = {"device": cases.GPU, "context": 2048, **CPU_COLD}

    def all_of() -> str:
        with cases.opened(path(), **settings) as llm:
            parts = (cases.told_experts, cases.long_answers, cases.with_pauses, cases.cancels)
            return "; ".join(f"{part.__name__}: {wrong}" for part in parts if (wrong := part(llm)))

    yield "worker: figures, long answers, pauses, cancelling", all_of
    yield "worker: closing when idle", lambda: cases.closes(path(), busy=False)
    yield "worker: closing in a step", lambda: cases.closes(path(), busy=True)


def bf16_cases(name: str, path: Once[Path]) -> Iterator[Case]:
    """Logits and tokens against those of all-hot experts."""
    wanted, limit = Once(lambda: cases.unpacked_logits(path())), cases.LIMITS[name]
    shipped = Once(lambda: cases.logits(path()))  # short prompts multiply packed tiles there
    tokens = Once(lambda: cases.unpacked_answers(path()))

    def against(case: Callable[..., str], *more: object, **settings: object) -> str:
        return case(path(), wanted(), *more, **settings)

    def near_shipped(share: str) -> str:
        return cases.near(path(), shipped(), limit, expert_budget=share, cold="gpu")

    def same_tokens(**settings: object) -> str:
        return cases.same_tokens_of_gpu(path(), tokens(), **settings)

    for share in cases.SHARES:
        yield f"{name} bf16 gpu {share}", partial(against, cases.same_bits, share)
        yield f"{name} bf16 gpu {share} and hot ones packed", partial(near_shipped, share)
        shared = partial(against, cases.near_when_shared, limit, share)
        yield f"{name} bf16 shared {share}", shared
        if share == "0%":
            continue  # without slots nothing changes hands
        for policy in ("lru", "spare", "counts", "auto"):
            kept = partial(against, cases.same_bits_of_caches, share, policy)
            yield f"{name} bf16 gpu {share}, slots by {policy}", kept
        yield (
            f"{name} bf16 auto {share}, slots by auto",
            partial(against, cases.near_with_caches, limit, share),
        )
    yield f"{name} bf16 gpu 30% tokens", same_tokens
    within = partial(same_tokens, swap_every="4")
    yield f"{name} bf16 gpu 30% tokens, exchanges within requests", within
    ways: dict[str, dict[str, object]] = {
        "cpu 0%": {"expert_budget": "0%", "cold": "cpu"},
        "cpu 30%": CPU_COLD,
        "auto 60%": {"expert_budget": "60%", "cold": "auto"},
        "no-pin 30%": {"expert_budget": "30%", "no_pin": True},
        "copies 30%": {"expert_budget": "30%", "keep_host_copy": True},
    }
    for way, settings in ways.items():
        yield f"{name} bf16 {way}", partial(against, cases.near, limit, **settings)
    yield f"{name} bf16 drop", partial(against, cases.drops, limit)


def f32_cases(name: str, path: Once[Path]) -> Iterator[Case]:
    """Tokens against those of the CPU's plain kernels."""
    wanted = Once(lambda: cases.exact_answers(path()))

    def same(share: str, cold: str, **more: object) -> str:
        return cases.same_tokens(path(), wanted(), expert_budget=share, cold=cold, **more)

    def shared(share: str) -> str:
        return cases.same_tokens_when_shared(path(), wanted(), share)

    def dropped() -> str:
        all_hot = cases.logits(path(), **cases.EXACT)
        return cases.drops(path(), all_hot, cases.LIMITS[name], **cases.EXACT)

    for share, cold in [(share, cold) for share in ("100%", *cases.SHARES) for cold in cases.PATHS]:
        yield f"{name} f32 {cold} {share}", partial(same, share, cold)
    for share in cases.SHARES:
        yield f"{name} f32 shared {share}", partial(shared, share)
    yield f"{name} f32 gpu 30% swaps within requests", partial(same, "30%", "gpu", swap_every="4")
    yield f"{name} f32 drop", dropped


def mixed_case(path: Path) -> str:
    """A model with fused and plain layers asks the CPU in steps that are not captured."""
    with cases.opened(path, device=cases.GPU, **CPU_COLD) as llm:
        found = cases.ask(llm)
    right = [len(tokens) for tokens in found] == [cases.GREEDY.max_tokens] * len(found)
    return "" if right else f"{found}"


def all_cases(folder: Path) -> Iterator[Case]:
    """The cases, the most telling first; of every family before the next of one.

    A model is written when the first of its cases runs.
    """
    names = (*cases.LIMITS, "qwen35moe")
    paths = {name: Once(partial(cases.model_file, name, folder)) for name in names}
    for cold in ("cpu", "gpu", "drop"):
        yield f"memory of a small card, {cold}", partial(small_card, paths["qwen3moe"], cold)
    yield from worker_cases(paths["qwen35moe-wide"])
    yield "some layers fused, others plain", lambda: mixed_case(paths["qwen35moe"]())
    made = [make(name, paths[name]) for make in (bf16_cases, f32_cases) for name in cases.LIMITS]
    for cases_of_all in zip_longest(*made):
        yield from filter(None, cases_of_all)


def small_card(path: Once[Path], cold: str) -> str:
    """An engine keeps to the plan of a small card."""
    return cases.keeps_to_plan(path(), expert_budget="30%", cold=cold)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="cases with a word in their name")
    parser.add_argument("--seconds", type=float, default=150.0, help="no case begins after this")
    parser.add_argument("--folder", type=Path, help="of models, to use them again")
    given = parser.parse_args()
    if MODULE is None:
        print(f"FAIL the C++ module is {MISSING}")
        sys.exit(1)
    faulthandler.dump_traceback_later(given.seconds + 60, exit=True)  # shows where a hang is
    keep_code()
    torch.manual_seed(0)
    run = Run(given.only, given.seconds)
    with tempfile.TemporaryDirectory() as made:
        for name, work in all_cases(given.folder or Path(made)):
            run(name, work)
    print(" ".join(f"{verdict} {count}" for verdict, count in run.counts.items()), flush=True)
    sys.exit(run.code)


if __name__ == "__main__":
    main()
