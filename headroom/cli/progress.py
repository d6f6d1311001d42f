"""Progress on a terminal: bars and spinners on standard error; a pipe sees nothing."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from headroom.cli.quiet_keys import quiet_keys
from headroom.progress import LoadStep, StepReport

CAPTURING = "compiling kernels, capturing steps"


class Show(Protocol):
    """Moves a bar: bytes, or the runs that a GPU's steps are captured in."""

    def __call__(self, done: int, total: int | None, step: LoadStep = "loading") -> None:
        """Show what is done and, if that is known, all there is to do."""


class _Amount(ProgressColumn):
    """Bytes done and in all with their speed, or a number of runs."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._speed, self._count = (
            DownloadColumn(),
            TransferSpeedColumn(),
            MofNCompleteColumn(),
        )

    def render(self, task: Task) -> Text:
        if task.fields["counts"]:
            return self._count.render(task)
        if not task.completed:  # nothing has come yet: there is no speed, and often no size
            return Text("")
        return Text.assemble(self._bytes.render(task), " ", self._speed.render(task))


@contextmanager
def progress_bar(what: str) -> Iterator[Show]:
    """Draw a bar of bytes if standard error is a terminal; yield the function that moves it."""
    with _drawing(TextColumn("{task.description}"), BarColumn(), _Amount()) as progress:
        task = progress.add_task(what, total=None, counts=False)

        def show(done: int, total: int | None, step: LoadStep = "loading") -> None:
            counts = step == "capturing"
            if counts != progress.tasks[0].fields["counts"]:
                progress.reset(task, total=total, description=CAPTURING, counts=counts)
            progress.update(task, completed=done, total=total)

        yield show


@contextmanager
def step_bar(what: str) -> Iterator[StepReport]:
    """Draw a bar of steps if standard error is a terminal; yield the function that moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with _drawing(SpinnerColumn(), *columns, TimeElapsedColumn()) as progress:
        task = progress.add_task(what, total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield report


@contextmanager
def waiting(*consoles: Console) -> Iterator[None]:
    """Show a spinner on the last console until the block ends, if all are terminals."""
    if not all(console.is_terminal for console in consoles):
        yield
        return
    with consoles[-1].status("", spinner_style="dim"):
        yield


@contextmanager
def _drawing(*columns: ProgressColumn) -> Iterator[Progress]:
    """Yield a progress that is drawn on a terminal and vanishes at the end.

    Log lines that come meanwhile appear above it: it stands in for standard error.
    """
    console = Console(stderr=True)
    quiet = not console.is_terminal  # a pipe would get an empty line
    keys = nullcontext() if quiet else quiet_keys()
    with keys, Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        yield progress
