"""The parts of a step, which layers report to a recorder that measures where time goes."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar

from headroom.kernels.cuda.compile import compile_kernel

# "fused": attention and dense network of a layer that runs in one C++ call.
STEP_PARTS = ("attention", "recurrent", "experts", "dense", "fused", "head", "sampling", "other")
MARKER = "headroom_part_"  # prefix of the names of marker kernels, see marker.cu
STEP = "step"

P = ParamSpec("P")
T = TypeVar("T")


class Recorder(Protocol):
    """Gets a call when a step begins, and when an outermost part of it begins and ends.

    The calls come from the thread that runs the step.
    """

    def begin_step(self) -> None: ...

    def begin(self, part: str) -> None: ...

    def end(self, part: str) -> None: ...


@dataclass(slots=True)
class _Watch:
    """The recorder in use. It is global, like a logger, so that layers need not pass it on."""

    recorder: Recorder | None = None
    inside: bool = False  # a part is running; parts within it are not reported


_WATCH = _Watch()


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Report the steps inside this context to `recorder`; enter and leave it between steps."""
    _WATCH.recorder, _WATCH.inside = recorder, False
    try:
        yield
    finally:
        _WATCH.recorder = None


def begin_step() -> None:
    """Report that a step begins."""
    if _WATCH.recorder is not None:
        _WATCH.recorder.begin_step()


def part_of_step(part: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function whose time counts as this part of a step."""
    assert part in STEP_PARTS

    def decorate(run: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(run)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            recorder = _WATCH.recorder
            if recorder is None or _WATCH.inside:
                return run(*args, **kwargs)
            _WATCH.inside = True
            recorder.begin(part)
            try:
                return run(*args, **kwargs)
            finally:
                recorder.end(part)
                _WATCH.inside = False

        return call

    return decorate


@dataclass(slots=True)
class StepTimes:
    """When a step began (perf_counter), and the seconds of each of its parts."""

    started: float
    parts: dict[str, float] = field(default_factory=dict)


class ClockRecorder:
    """Reads the clock around parts; for the CPU, where a call returns when its work is done."""

    def __init__(self) -> None:
        self.steps: list[StepTimes] = []
        self._began = 0.0

    def begin_step(self) -> None:
        """Begin a new step; all parts until the next one belong to it."""
        self.steps.append(StepTimes(time.perf_counter()))

    def begin(self, part: str) -> None:
        """Note the time at which a part begins."""
        self._began = time.perf_counter()

    def end(self, part: str) -> None:
        """Add the part's seconds to its step."""
        if self.steps:
            parts = self.steps[-1].parts
            parts[part] = parts.get(part, 0.0) + time.perf_counter() - self._began


class MarkerRecorder:
    """Launches empty kernels that mark the parts on a GPU's timeline, also in captured steps."""

    def begin_step(self) -> None:
        """Mark where a step begins."""
        self._mark(STEP)

    def begin(self, part: str) -> None:
        """Mark where a part begins."""
        self._mark(part)

    def end(self, part: str) -> None:
        """Mark that the following kernels belong to no part."""
        self._mark("other")

    def _mark(self, name: str) -> None:
        compile_kernel("marker.cu", MARKER + name)((1,), (1,), ())
