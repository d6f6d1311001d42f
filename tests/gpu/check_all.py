"""All that a GPU is to show, in one go: scripts that measure, then `gpu` tests side by side.

    python -m tests.gpu.check_all [--seconds 500] [--bench] [--only WORD] [--out LOG]

One log with everything that was printed; a summary at the end. Exits with 1 if anything failed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PYTEST = (
    "-m",
    "pytest",
    "-m",
    "gpu",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
    "-v",
    "--tb=short",
)
FAMILIES = (
    "llama",
    "qwen3 or qwen3-",
    "qwen3moe",
    "qwen35 or qwen35-",
    "qwen35moe",
    "laguna",
    "gemma",
)
KERNELS = (
    "products or experts",
    "attention or delta",
    "not (products or experts or attention or delta)",
)
# What check_cold_engine runs alone: its CPU threads want all cores.
LEFT_OUT = {"test_gpu_cold"}
# Measured alone: what runs beside them would take from the GPU and from the host's cores.
MEASURING = {"check_cold_engine", "check_memory", "check_models"}


@dataclass(frozen=True, slots=True)
class Job:
    """One process."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended."""

    job: Job
    code: int | None  # None: it ran out of time
    seconds: float
    printed: str

    @property
    def failed(self) -> bool:
        """Whether anything is wrong; a script may print a failure and go on."""
        lines = self.printed.splitlines()
        return self.code not in (0, 5) or any(line.startswith("FAIL") for line in lines)


def jobs(only: str, bench: bool) -> tuple[list[Job], list[Job]]:
    """Return what may run side by side, and what must run alone."""
    beside: list[Job] = []
    alone: list[Job] = []
    for name in sorted({path.stem for path in FOLDER.glob("test_gpu_*.py")} - LEFT_OUT):
        path = str(FOLDER.relative_to(Path.cwd()) / f"{name}.py")
        words = {"test_gpu_families": FAMILIES, "test_gpu_kernels": KERNELS}.get(name, ("",))
        for word in words:
            picked = ("-k", word) if word else ()
            beside.append(Job(f"{name} {word}".strip(), (*PYTEST, *picked, path)))
    for name in sorted(path.stem for path in FOLDER.glob("check_*.py")):
        if name == "check_all":
            continue
        job = Job(name, ("-m", f"tests.gpu.{name}"))
        (alone if name in MEASURING else beside).append(job)
        if bench and "--bench" in (FOLDER / f"{name}.py").read_text():
            alone.append(Job(f"{name} --bench", (*job.arguments, "--bench")))
    return [x for x in beside if only in x.name], [x for x in alone if only in x.name]


def run(job: Job, until: float, threads: int = 0) -> Outcome:
    """Run one process, at most until a time, with so many threads; 0: as many as it likes."""
    started = time.monotonic()
    left = until - started
    if left <= 0:
        return Outcome(job, None, 0.0, "not begun: no time was left\n")
    try:
        done = subprocess.run(
            [sys.executable, "-u", *job.arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=left, check=False,
            env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        )  # fmt: skip
        code, printed = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, printed = None, (error.stdout or b"").decode(errors="replace")
    return Outcome(job, code, time.monotonic() - started, printed)


def outcomes(
    beside: Sequence[Job], alone: Sequence[Job], until: float, most: int
) -> Iterator[Outcome]:
    """Yield how processes ended: those that are measured first, then those side by side."""
    for job in alone:
        yield run(job, until)
    threads = max(1, (os.cpu_count() or 1) // most)
    with ThreadPoolExecutor(most) as pool:
        yield from pool.map(lambda job: run(job, until, threads), beside)


def main() -> int:
    """Run everything and tell how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--bench", action="store_true", help="measure kernels, too")
    parser.add_argument("--only", default="", help="what has this word in its name")
    parser.add_argument("--most", type=int, default=8, help="processes side by side")
    parser.add_argument("--out", type=Path, default=Path("check_all.log"))
    given = parser.parse_args()
    until, wrong = time.monotonic() + given.seconds, 0
    with given.out.open("w") as log:
        for found in outcomes(*jobs(given.only, given.bench), until, given.most):
            word = "FAIL" if found.failed else "PASS"
            head = f"{word} {found.job.name}: exit {found.code}, {found.seconds:.0f} s"
            log.write(f"=== {head}\n{found.printed}\n")
            log.flush()
            print(head, flush=True)
            for line in found.printed.splitlines()[-4:] if found.failed else ():
                print(f"    {line[:200]}", flush=True)
            wrong += found.failed
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
