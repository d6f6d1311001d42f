"""`headroom serve`: answer over HTTP."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headroom.cli.loading import progress_bar, ready_model
from headroom.cli.settings import with_settings
from headroom.errors import HeadroomError, OptionError
from headroom.formats.checkpoint import model_files
from headroom.options import Options

if TYPE_CHECKING:
    from headroom.server.shelf import Shelf

MODELS_HELP = (
    "files, folders or known names; the first is loaded at once, others when they are asked for; "
    "the default model if left out"
)


@with_settings("engine", "server", "program")
def serve(
    options: Options,
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help=MODELS_HELP)
    ] = None,
) -> None:
    """Serve one or several models over HTTP, as the OpenAI API and others do."""
    try:
        # The server's packages are an extra: say so if they are missing.
        from headroom.server.app import bind, run_server
    except ModuleNotFoundError as error:
        raise HeadroomError(
            f"The server needs {error.name}, which is not installed.",
            hint="Install it with: pip install 'headroom[server]'.",
        ) from error
    if models:
        options = replace(options, model=models[0])
    # Bind first, so that an address in use is reported before minutes of loading, not after.
    with bind(options.host, options.port) as bound, open_shelf(options, models) as shelf:
        run_server(shelf, options, bound)


def open_shelf(options: Options, given: list[str] | None) -> "Shelf":
    """Return the shelf of the models that the command line names, with the first one loaded."""
    paths: dict[Path, str] = {}  # and the text that each was named by
    for text in given or [options.model]:
        path = ready_model(replace(options, model=text))
        found = model_files(path) if path.is_dir() else [path]
        for file in found:
            paths.setdefault(file, text if len(found) == 1 else str(file))
    from headroom.server.model_card import names_of  # imports torch, which takes seconds
    from headroom.server.shelf import Shelf

    names = names_of(list(paths), list(paths.values()))
    if options.served_name is not None:
        if len(names) > 1:
            raise OptionError(
                f"--served-name is one name, and there are {len(names)} models.",
                hint="Leave it out: each model has the name of its file.",
                param="served_name",
            )
        names = [options.served_name]
    shelf = Shelf.of_files(dict(zip(names, paths, strict=True)), options)
    try:
        with progress_bar("loading") as show:
            shelf.load_first(show)
    except BaseException:
        shelf.close()
        raise
    return shelf
