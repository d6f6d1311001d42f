"""The processes of a run of everything for a GPU, and how each of them ended."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.parts import VARIABLE
from tests.synth_models import MODELS

FOLDER = Path(__file__).parent
PYTEST = (
    "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=", "-v", "--tb=short",
    "--import-mode", "importlib", "--durations", "6", "-o", "faulthandler_timeout=150",
)  # fmt: skip
# In how many processes the tests of a file run.
PARTS = {
    "test_gpu_kernels": 10,
    "test_gpu_older": 4,
    "test_gpu_table": 12,
    "test_gpu_variants": 2,
}
NO_TESTS = 5  # pytest's exit where it found none to run
# What a test file says of itself where another package may be missing: no tests are no failure.
MAY_BE_EMPTY = "check_all: may be empty"
# Scripts whose cases are tests: they run only to measure.
AS_TESTS = frozenset(
    f"check_{part}"
    for part in (
        "attention", "delta_net", "experts", "grouped", "load", "matmul", "norms", "older", "route",
        "sampler",
    )
)  # fmt: skip
BY_HAND = {"check_all", "check_start"}  # not part of a run of everything
# These read the memory of the whole GPU, so nothing else may run.
ALONE = {"check_memory"}
COLD_FAMILIES = (
    "gemma4-moe", "qwen35moe-wide", "laguna", "qwen3moe", "gemma4-moe-f16", "qwen3moe-bf16",
)  # fmt: skip
COLD_TYPES = ("f32", "bf16")
COLD_ALONE = ("worker", "memory", "some layers")  # which want all cores, or time what they see
COLD_SECONDS = "300"
COLD_GROUPS = (*(f"{name} {kind}" for name in COLD_FAMILIES for kind in COLD_TYPES), "alone")
# The tests of a model in a process each.
MODEL_PARTS = {"test_gpu_families": tuple(MODELS), "test_gpu_cold": COLD_GROUPS}
BY_SCRIPT = {"test_gpu_cold alone"}  # run by check_cold_engine while nothing else runs
LEFT_OUT_CODE = 2  # that check_cold_engine exits with where cases are left out and none failed
# Scripts of which several processes run a part each: their arguments.
DIVIDED = {
    "check_engine": (("laguna", "qwen3"), ("gemma4", "llama"), ("qwen3moe", "qwen35")),
}
# What takes longest, first, so that nothing long is begun in the end.
LONGEST = ("check_models", "test_gpu_cold", "check_engine", "moe", "laguna")


@dataclass(frozen=True, slots=True)
class Job:
    """One process."""

    name: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    may_be_empty: bool = False  # whether pytest may find no tests


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended."""

    job: Job
    code: int | None  # None: it ran out of time
    seconds: float
    printed: str

    @property
    def verdict(self) -> str:
        """PASS, FAIL or LEFT OUT; a script may print a failure and go on."""
        left_out = (
            self.code is None or self._left_out or (self.code == NO_TESTS and self.job.may_be_empty)
        )
        if self._failures() or not (left_out or self.code == 0):
            return "FAIL"
        return "LEFT OUT" if left_out else "PASS"

    @property
    def head(self) -> str:
        """What became of it, in one line."""
        ended = "ran out of time" if self.code is None else f"exit {self.code}"
        more = f", {self._cases_left_out} cases LEFT OUT" if self._cases_left_out else ""
        return f"{self.verdict} {self.job.name}: {ended}, {self.seconds:.0f} s{more}"

    @property
    def wrong_lines(self) -> list[str]:
        """What to show of it where not all is well: failures, else what it printed last."""
        if self.verdict == "PASS":
            return []
        return self._failures()[:8] or self.printed.splitlines()[-3:]

    @property
    def _left_out(self) -> bool:
        """Return whether the exit code says that cases were left out; pytest's code 2 differs."""
        return self.code == LEFT_OUT_CODE and self._cases_left_out > 0

    @property
    def _cases_left_out(self) -> int:
        return sum(line.startswith("LEFT OUT") for line in self.printed.splitlines())

    def _failures(self) -> list[str]:
        lines = self.printed.splitlines()
        return [x for x in lines if x.startswith("FAIL") or ("::" in x and " FAILED" in x)]


def jobs(only: str, bench: bool) -> tuple[list[Job], list[Job]]:
    """Return what may run side by side, the longest first, and what must run alone."""
    beside = list(_tests())
    alone = [_script("check_cold_engine", "--only", *COLD_ALONE, "--seconds", COLD_SECONDS)]
    for name in sorted(path.stem for path in FOLDER.glob("check_*.py")):
        if name in ALONE:
            alone.append(_script(name))
        elif name not in {"check_cold_engine", *BY_HAND, *AS_TESTS}:
            beside += [_script(name, *words) for words in DIVIDED.get(name, ((),))]
        if bench and "--bench" in (FOLDER / f"{name}.py").read_text():
            alone.append(_script(name, "--bench"))
    beside.sort(key=_order)
    return [x for x in beside if only in x.name], [x for x in alone if only in x.name]


def _order(job: Job) -> int:
    return next((at for at, word in enumerate(LONGEST) if word in job.name), len(LONGEST))


def _script(name: str, *arguments: str) -> Job:
    shown = [word for word in arguments if word not in ("--seconds", COLD_SECONDS)]
    return Job(" ".join([name, *shown]), ("-m", f"tests.gpu.{name}", *arguments))


def _tests() -> Iterator[Job]:
    for name in sorted(path.stem for path in FOLDER.glob("test_gpu_*.py")):
        path = str((FOLDER / f"{name}.py").relative_to(Path.cwd()))
        empty = MAY_BE_EMPTY in (FOLDER / f"{name}.py").read_text()
        count = PARTS.get(name, 1)
        parts = MODEL_PARTS.get(name, tuple(f"{n}/{count}" for n in range(1, count + 1)))
        for number, part in enumerate(parts, 1):
            full = f"{name} {part}" if len(parts) > 1 else name
            if full not in BY_SCRIPT:
                variables = {VARIABLE: f"{number}/{len(parts)}"}
                yield Job(full, (*PYTEST, path), variables, empty)
