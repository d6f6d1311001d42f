"""Callbacks through which long work reports its progress; the command line draws it."""

from collections.abc import Callable
from typing import Literal, Protocol

# Loading is counted in bytes of weights; then, on a GPU, capturing in runs that compile kernels.
LoadStep = Literal["loading", "capturing"]
StepReport = Callable[[str, int, int], None]  # what runs now, steps done, steps in all


class LoadProgress(Protocol):
    """A callback that is told how far the loading of a model is."""

    def __call__(self, done: int, total: int, step: LoadStep = "loading") -> None:
        """Take the amount that is done of a step, and the whole amount."""


def ignore_progress(done: int, total: int, step: LoadStep = "loading") -> None:
    """Do nothing: the callback if nobody wants to know how far loading is."""


def ignore_steps(what: str, done: int, total: int) -> None:
    """Do nothing: the callback if nobody wants to know which step runs."""


class StepCounter:
    """Counts the steps of some work, and reports each when it begins."""

    def __init__(self, total: int, report: StepReport = ignore_steps) -> None:
        self._total = total
        self._begun = 0
        self._report = report

    def begin(self, what: str) -> None:
        """Begin the next step."""
        self._begun += 1
        self.tell(what)

    def tell(self, what: str) -> None:
        """Say more about the step that runs."""
        self._report(what, min(self._begun - 1, self._total), self._total)
