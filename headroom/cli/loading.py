"""Finds, downloads and loads the model of a command."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headroom.cli.progress import progress_bar
from headroom.errors import FormatError, OptionError
from headroom.families.files import find_weights, refuse_plan_name
from headroom.families.registry import is_known
from headroom.formats.hub import DEFAULT_MODEL, SHORT_NAMES, pull
from headroom.options import Options

if TYPE_CHECKING:
    from headroom.experts.traces.taps import RouterTap
    from headroom.llm import LLM


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
    return SHORT_NAMES.get(name.lower(), name.lower()) == DEFAULT_MODEL


def refuse_synth(name: str, home: Path) -> None:
    """Refuse a name such as `synth:llama`: only `headroom bench` makes such models itself."""
    if not name.lower().startswith("synth:"):
        return
    from headroom.bench.models import parse_synth  # imports torch, which takes seconds

    model = parse_synth(name)  # an unknown name is refused with the list of known ones
    assert model is not None
    path, recipe = model.path(home), model.recipe
    flags = f"--size {recipe.name} --quant {model.mix}"
    make = f"Write it with: headroom synth {recipe.family} FILE {flags}; then name the file."
    if is_known(recipe.name):
        make += f" A plan needs no file: headroom plan {recipe.name}:{model.mix}"
    raise OptionError(
        f"{name} is a synthetic model, which only headroom bench makes itself.",
        hint=f"It has made {path}: name that file." if path.is_file() else make,
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
def open_llm(
    options: Options, path: Path | None = None, tap: "RouterTap | None" = None
) -> "Iterator[LLM]":
    """Load the chosen model, and close it when the command ends.

    `path` is where the model is, if the command has found it already; `tap` records the picks of
    its routers.
    """
    path = path or ready_model(options)
    with progress_bar("loading") as show:
        from headroom.llm import LLM  # torch takes seconds to import; --help must not wait for it

        llm = LLM(options=options, path=path, progress=show, tap=tap)
    with llm:
        yield llm
