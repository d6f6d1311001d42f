"""What commands do first: find the model, or download it, and load it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from headroom.errors import FormatError, OptionError
from headroom.families.files import find_weights, refuse_plan_name
from headroom.families.registry import is_known
from headroom.formats.hub import ALIASES, DEFAULT_MODEL, pull
from headroom.options import Options

if TYPE_CHECKING:
    from headroom.llm import LLM


Show = Callable[[int, int | None], None]  # called with bytes done and bytes in all, if known


@contextmanager
def progress_bar(what: str) -> Iterator[Show]:
    """Draw a progress bar if standard error is a terminal; yield the function that moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(
        *columns, TransferSpeedColumn(), console=console, transient=True, disable=quiet
    ) as progress:
        task = progress.add_task(what, total=None)

        def show(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        yield show


def pull_model(name: str, home: Path) -> Path:
    """Download a model with a progress bar, and return its path."""
    refuse_synth(name, home)
    try:
        with progress_bar(f"pulling {name or DEFAULT_MODEL}") as show:
            return pull(name, home, show)
    except FormatError:
        refuse_plan_name(name)
        raise


def is_default(name: str) -> bool:
    """Whether a name stands for the default model."""
    return ALIASES.get(name.lower(), name.lower()) == DEFAULT_MODEL


def refuse_synth(name: str, home: Path) -> None:
    """Refuse a name like `synth:llama`, a model that only `headroom bench` writes by itself."""
    if not name.lower().startswith("synth:"):
        return
    from headroom.bench.models import (
        parse_synth,
    )  # imports torch, which may take its time before an error

    model = parse_synth(name)  # an unknown name is refused with the list of known ones
    assert model is not None
    path, recipe = model.path(home), model.recipe
    flags = f"--size {recipe.name} --quant {model.mix}"
    make = f"Write it with: headroom synth {recipe.family} FILE {flags}; then name the file."
    if is_known(recipe.name):
        make += f" A plan needs no file: headroom plan {recipe.name}:{model.mix}"
    raise OptionError(
        f"{name} is a model that only headroom bench writes by itself.",
        hint=f"It has written {path}: name that file." if path.is_file() else make,
        param="model",
    )


def ready_model(options: Options) -> Path:
    """Return the path of the chosen model; the default model is downloaded if it is missing."""
    refuse_synth(options.model, options.home_path)
    try:
        return find_weights(options.model, options.home_path)
    except FormatError:
        if not is_default(options.model):
            raise
    return pull_model(DEFAULT_MODEL, options.home_path)


@contextmanager
def open_llm(options: Options, path: Path | None = None) -> "Iterator[LLM]":
    """Load the chosen model, and close it when the command ends.

    `path` is where the model is, if the command has found it already.
    """
    path = path or ready_model(options)
    with progress_bar("loading") as show:
        from headroom.llm import LLM  # torch takes seconds to import; --help must not wait for it

        llm = LLM(options=options, path=path, progress=show)
    with llm:
        yield llm
