"""Parts of a step: what the layers tell whoever measures where the time goes."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar

from headroom.kernels.cuda.compile import compile_kernel

# "fused": attention and dense of a layer that one C++ call runs, which cannot be told apart.
PARTS = ("attention", "recurrent", "experts", "dense", "fused", "head", "sampling", "other")
MARKER = "headroom_part_"  # how the names of marker kernels begin; see marker.cu
STEP = "step"

P = ParamSpec("P")
T = TypeVar("T")


class Recorder(Protocol):
    """Is told of steps and of their outermost parts, in the thread that runs them."""

    def begin_step(self) -> None: ...

    def begin(self, part: str) -> None: ...

    def end(self, part: str) -> None: ...


@dataclass(slots=True)
class _Watch:
    """Who is told, if anybody: like a log, so that no layer must pass it on."""

    recorder: Recorder | None = None
    inside: bool = False  # a part; parts within it are its own business


_WATCH = _Watch()


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Tell `recorder` of all steps that run meanwhile; begin and end while none runs."""
    _WATCH.recorder, _WATCH.inside = recorder, False
    try:
        yield
    finally:
        _WATCH.recorder = None


def begin_step() -> None:
    """Say that a step begins."""
    if _WATCH.recorder is not None:
        _WATCH.recorder.begin_step()


def part_of_step(part: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function's time count as this part of a step."""
    assert part in PARTS

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
    """When a step began and what its parts took, in seconds."""

    started: float
    parts: dict[str, float] = field(default_factory=dict)


class ClockRecorder:
    """Reads the clock around parts: right where a call returns when its work is done."""

    def __init__(self) -> None:
        self.steps: list[StepTimes] = []
        self._began = 0.0

    def begin_step(self) -> None:
        """Open a new step; what runs until the next is its own."""
        self.steps.append(StepTimes(time.perf_counter()))

    def begin(self, part: str) -> None:
        """Note when a part begins."""
        self._began = time.perf_counter()

    def end(self, part: str) -> None:
        """Add what the part took to its step."""
        if self.steps:
            parts = self.steps[-1].parts
            parts[part] = parts.get(part, 0.0) + time.perf_counter() - self._began


class MarkerRecorder:
    """Starts empty kernels that tell parts apart on a GPU's timeline, in captured steps too."""

    def begin_step(self) -> None:
        """Mark where a step begins."""
        self._mark(STEP)

    def begin(self, part: str) -> None:
        """Mark where a part begins."""
        self._mark(part)

    def end(self, part: str) -> None:
        """Mark that what follows is of no part."""
        self._mark("other")

    def _mark(self, name: str) -> None:
        compile_kernel("marker.cu", MARKER + name)((1,), (1,), ())
