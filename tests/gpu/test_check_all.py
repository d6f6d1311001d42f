"""The run of everything for a GPU leaves nothing out and tells what went wrong; it needs no GPU."""

import time
from pathlib import Path

import pytest

from tests.gpu.check_all import LEFT_OUT, Job, Outcome, jobs, run

ECHO = Job("echo", ("-c", "print('PASS one'); print('FAIL two')"))


def test_every_script_and_every_test_file_is_run() -> None:
    beside, alone = jobs("", bench=True)
    words = " ".join(word for job in (*beside, *alone) for word in job.arguments)
    folder = Path(__file__).parent
    for path in (*folder.glob("check_*.py"), *folder.glob("test_gpu_*.py")):
        assert path.stem in {"check_all", *LEFT_OUT} or path.stem in words
    assert "check_matmul --bench" in {job.name for job in alone}
    assert [job.name for job in jobs("check_matmul", bench=False)[0]] == ["check_matmul"]


def test_a_printed_failure_is_one() -> None:
    found = run(ECHO, time.monotonic() + 60)
    assert (found.code, found.failed, found.printed) == (0, True, "PASS one\nFAIL two\n")


@pytest.mark.parametrize(("code", "failed"), [(0, False), (5, False), (1, True), (None, True)])
def test_an_exit_tells_the_rest(code: int | None, failed: bool) -> None:
    assert Outcome(ECHO, code, 1.0, "PASS").failed is failed


def test_what_runs_too_long_is_ended_with_what_it_printed() -> None:
    slow = Job("slow", ("-c", "import time; print('begun', flush=True); time.sleep(60)"))
    found = run(slow, time.monotonic() + 4)
    assert (found.code, found.printed) == (None, "begun\n")
    assert run(ECHO, time.monotonic() - 1).printed.startswith("not begun")
