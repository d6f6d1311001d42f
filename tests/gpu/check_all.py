"""All that a GPU is to show, in one go: tests and checks side by side, then what is measured alone.

    python -m tests.gpu.check_all [--seconds 500] [--bench] [--only WORD] [--out LOG]

One log with everything that was printed; what ran out of time is LEFT OUT there, not failed, and
so are tests of a package that is missing. A file without tests is a failure else.
Machine code is kept in one folder, which all processes use, and later runs too. Exits with 1 if
anything failed, and with 2 if nothing failed but something was left out.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.gpu.jobs import Job, Outcome, jobs

FOLDER = Path(tempfile.gettempdir()) / "headroom-gpu-tests"
ALONE_SHARE = 0.35  # of the time, kept for what runs alone


def environment(job: Job, folder: Path, threads: int) -> dict[str, str]:
    """The variables of a process: where code is kept, which part it runs, how many threads it has.

    Without the last each would have as many as the machine has cores, and all wait for each other.
    """
    found = os.environ | job.variables | {"HEADROOM_HOME": str(folder)}
    if threads:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HEADROOM_THREADS")
        found |= dict.fromkeys(names, str(threads)) | {"OMP_WAIT_POLICY": "passive"}
    return found


def run(job: Job, until: float, folder: Path = FOLDER, threads: int = 0) -> Outcome:
    """Run one process, at most until a time, with so many threads; 0: as many as it likes."""
    started = time.monotonic()
    left = until - started
    if left <= 0:
        return Outcome(job, None, 0.0, "not begun: no time was left\n")
    try:
        done = subprocess.run(
            [sys.executable, "-u", *job.arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=left, check=False,
            env=environment(job, folder, threads),
        )  # fmt: skip
        code, printed = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, printed = None, (error.stdout or b"").decode(errors="replace")
    return Outcome(job, code, time.monotonic() - started, printed)


def outcomes(
    beside: Sequence[Job], alone: Sequence[Job], seconds: float, most: int, folder: Path
) -> Iterator[Outcome]:
    """Yield how processes ended: first those that run in parallel, then those that run alone."""
    now = time.monotonic()
    until = now + seconds
    until_beside = now + seconds * (1 - ALONE_SHARE) if alone else until
    # One thread would leave out what several of them do with each other.
    threads = max(2, (os.cpu_count() or 1) // most)
    with ThreadPoolExecutor(most) as pool:
        begun = [pool.submit(run, job, until_beside, folder, threads) for job in beside]
        for done in as_completed(begun):
            yield done.result()
    for job in alone:
        yield run(job, until, folder)


def main() -> int:
    """Run everything and print how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--bench", action="store_true", help="measure kernels, too")
    parser.add_argument("--only", default="", help="what has this word in its name")
    parser.add_argument("--most", type=int, default=14, help="processes side by side")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of kept machine code")
    parser.add_argument("--out", type=Path, default=Path("check_all.log"))
    given = parser.parse_args()
    started, counts = time.monotonic(), {"PASS": 0, "FAIL": 0, "LEFT OUT": 0}
    found = jobs(given.only, given.bench)
    with given.out.open("w") as log:
        for one in outcomes(*found, given.seconds, given.most, given.folder):
            counts[one.verdict] += 1
            log.write(f"=== {one.head}\n{one.printed}\n")
            log.flush()
            print(one.head, flush=True)
            for line in one.wrong_lines:
                print(f"    {line[:200]}", flush=True)
        told = ", ".join(f"{verdict} {count}" for verdict, count in counts.items())
        summary = f"{told} of {sum(counts.values())} in {time.monotonic() - started:.0f} s"
        log.write(f"=== {summary}\n")
        print(summary, flush=True)
    return 1 if counts["FAIL"] else 2 if counts["LEFT OUT"] else 0


if __name__ == "__main__":
    sys.exit(main())
