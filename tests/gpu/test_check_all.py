"""`check_all` runs every check and reports what failed; this test needs no GPU."""

import importlib
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.check_all import environment, outcomes, run
from tests.gpu.check_cold_engine import ALONE, Run, all_cases, chosen, group_of
from tests.gpu.check_engine import FAMILIES
from tests.gpu.cold_cases import LIMITS, PATHS, SHARES
from tests.gpu.jobs import (
    AS_TESTS,
    BY_HAND,
    COLD_ALONE,
    COLD_FAMILIES,
    COLD_GROUPS,
    COLD_TYPES,
    Job,
    Outcome,
    jobs,
)
from tests.gpu.parts import VARIABLE, divide
from tests.synth_models import MODELS

ECHO = Job("echo", ("-c", "print('PASS one'); print('FAIL two')"))
FOLDER = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_module_for_a_gpu_imports_names_that_are_there(path: Path) -> None:
    importlib.import_module(f"tests.gpu.{path.stem}")


def test_every_script_and_every_test_file_is_run() -> None:
    beside, alone = jobs("", bench=True)
    words = " ".join(word for job in (*beside, *alone) for word in job.arguments)
    for path in (*FOLDER.glob("check_*.py"), *FOLDER.glob("test_gpu_*.py")):
        assert path.stem in {"check_older", *BY_HAND} or path.stem in words
    assert "check_matmul --bench" in {job.name for job in alone}
    assert [job.name for job in jobs("check_route", bench=True)[1]] == ["check_route --bench"]


@pytest.mark.parametrize("script", sorted(AS_TESTS))
def test_scripts_that_run_only_to_measure_have_their_cases_in_tests(script: str) -> None:
    tests = "".join((FOLDER / f"test_gpu_{name}.py").read_text() for name in ("kernels", "older"))
    assert f"{script}." in tests
    assert script not in {job.name for part in jobs("", bench=False) for job in part}


def test_all_parts_of_a_file_are_run_and_every_model_has_one() -> None:
    beside, _ = jobs("test_gpu_families", bench=False)
    assert {job.name for job in beside} == {f"test_gpu_families {name}" for name in MODELS}
    parts = [job.variables[VARIABLE] for job in beside]
    assert sorted(parts) == sorted(f"{n}/{len(MODELS)}" for n in range(1, len(MODELS) + 1))
    named = {job.name.split()[1]: divide(list(MODELS), job.variables[VARIABLE]) for job in beside}
    assert named == {name: {name} for name in MODELS}


@pytest.mark.parametrize("parts", [1, 3, 10, 40])
def test_each_test_is_in_one_part(parts: int) -> None:
    keys = [f"test {n // 2}" for n in range(37)]
    found = Counter(key for n in range(parts) for key in divide(keys, f"{n + 1}/{parts}"))
    assert found == Counter(set(keys))


@pytest.mark.parametrize(
    ("file", "part", "name"),
    [("test_gpu_families", "3/14", "qwen3moe"), ("test_gpu_cold", "6/13", "laguna bf16")],
)
def test_a_process_collects_its_part_of_a_file(file: str, part: str, name: str) -> None:
    job = next(job for job in jobs(file, bench=False)[0] if job.variables[VARIABLE] == part)
    done = subprocess.run(
        [sys.executable, *job.arguments, "--collect-only", "-q", "-q"],
        env=os.environ | job.variables, capture_output=True, text=True, timeout=200,
        check=False, cwd=FOLDER.parent.parent,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert found
    assert all(f"[{name}" in line for line in found)
    assert job.name == f"{file} {name}"


def test_every_family_has_its_process() -> None:
    beside, none_alone = jobs("test_gpu_cold", bench=False)
    none_beside, alone = jobs("check_cold_engine", bench=False)
    assert none_alone == none_beside == []
    assert set(COLD_FAMILIES) == set(LIMITS)
    assert {job.name for job in beside} == {f"test_gpu_cold {name}" for name in COLD_GROUPS[:-1]}
    assert set(COLD_ALONE) <= set(alone[0].arguments)
    engines = [name for job in jobs("check_engine", bench=False)[0] for name in job.arguments[2:]]
    assert sorted(engines) == sorted(FAMILIES)


def test_every_case_of_cold_experts_runs_in_one_process(tmp_path: Path) -> None:
    names = [name for name, _ in all_cases(tmp_path)]
    assert {group_of(name) for name in names} == set(COLD_GROUPS)
    assert not list(tmp_path.iterdir())  # to name them writes no models
    alone = jobs("check_cold_engine", bench=False)[1][0].arguments
    words = alone[alone.index("--only") + 1 : alone.index("--seconds")]
    for name in names:
        assert chosen(name, words) == (group_of(name) == ALONE)
    for family in LIMITS:
        for share in (*SHARES, "100%"):
            assert {f"{family} f32 {path} {share}" for path in PATHS} <= set(names)
            shared = {f"{family} {kind} shared {share}" for kind in COLD_TYPES}
            assert shared <= set(names) or share == "100%"


def test_a_failure_that_was_only_printed_counts_as_a_failure() -> None:
    found = run(ECHO, time.monotonic() + 60)
    assert (found.code, found.verdict, found.printed) == (0, "FAIL", "PASS one\nFAIL two\n")
    assert found.wrong_lines == ["FAIL two"]


@pytest.mark.parametrize(
    ("code", "printed", "verdict"),
    [
        (0, "PASS", "PASS"),
        (5, "no tests ran", "FAIL"),
        (1, "PASS", "FAIL"),
        (None, "PASS", "LEFT OUT"),
        (None, "FAIL a case", "FAIL"),
        (None, "tests/gpu/test_gpu_x.py::test_y FAILED [ 9%]", "FAIL"),
        (2, "LEFT OUT a case", "LEFT OUT"),
        (2, "interrupted", "FAIL"),
        (2, "LEFT OUT a case\nFAIL another", "FAIL"),
    ],
)
def test_an_exit_tells_the_rest(code: int | None, printed: str, verdict: str) -> None:
    assert Outcome(ECHO, code, 1.0, printed).verdict == verdict


def test_a_file_without_tests_fails_unless_it_says_that_it_may_be_empty() -> None:
    beside, _ = jobs("test_gpu", bench=False)
    assert {job.name.split()[0] for job in beside if job.may_be_empty} == {"test_gpu_variants"}
    empty = next(job for job in beside if job.may_be_empty)
    assert Outcome(empty, 5, 1.0, "1 skipped").verdict == "LEFT OUT"
    assert Outcome(empty, 5, 1.0, "FAIL").verdict == "FAIL"
    assert Outcome(empty, 2, 1.0, "").verdict == "FAIL"


def test_what_takes_longest_is_begun_first() -> None:
    names = [job.name for job in jobs("", bench=False)[0]]
    assert names[0] == "check_models"
    assert names.index("test_gpu_cold laguna f32") < names.index("check_code_cache")
    assert names.index("test_gpu_families gemma4-moe") < names.index("test_gpu_families llama")


def test_what_was_left_out_is_reported_in_one_line() -> None:
    assert Outcome(ECHO, None, 2.0, "").head == "LEFT OUT echo: ran out of time, 2 s"
    some = Outcome(ECHO, 2, 2.0, "LEFT OUT a\nLEFT OUT b\nPASS c\n")
    assert some.head == "LEFT OUT echo: exit 2, 2 s, 2 cases LEFT OUT"


@pytest.mark.parametrize(
    ("seconds", "wrong", "code"), [(60.0, "", 0), (60.0, "bad", 1), (-1.0, "bad", 2)]
)
def test_a_run_of_cases_exits_by_what_became_of_them(seconds: float, wrong: str, code: int) -> None:
    cases = Run([], seconds)
    cases("one", lambda: wrong)
    assert cases.code == code


def test_what_runs_too_long_is_ended_with_what_it_printed() -> None:
    slow = Job("slow", ("-c", "import time; print('begun', flush=True); time.sleep(60)"))
    found = run(slow, time.monotonic() + 4)
    assert (found.code, found.printed, found.verdict) == (None, "begun\n", "LEFT OUT")
    assert run(ECHO, time.monotonic() - 1).printed.startswith("not begun")


def test_tests_that_run_alone_begin_when_the_others_have_ended(tmp_path: Path) -> None:
    beside = [Job(f"beside {n}", ("-c", f"import time; time.sleep({n})")) for n in (1, 0)]
    found = [one.job.name for one in outcomes(beside, [ECHO], 60, 2, tmp_path)]
    assert found == ["beside 0", "beside 1", "echo"]


def test_processes_share_kept_code_and_have_few_threads(tmp_path: Path) -> None:
    job = Job("one", (), {VARIABLE: "1/2"})
    found = environment(job, tmp_path, 2)
    assert (found["HEADROOM_HOME"], found[VARIABLE]) == (str(tmp_path), "1/2")
    assert found["HEADROOM_THREADS"] == found["OMP_NUM_THREADS"] == "2"
    assert "HEADROOM_THREADS" not in environment(job, tmp_path, 0)
