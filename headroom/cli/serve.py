"""`headroom serve`: answer over HTTP."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headroom.cli.completion import model_names
from headroom.cli.library import alias_paths
from headroom.cli.loading import ready_model
from headroom.cli.progress import progress_bar
from headroom.cli.settings import with_settings
from headroom.errors import HeadroomError, OptionError
from headroom.formats.aliases import with_aliases
from headroom.formats.checkpoint import model_files
from headroom.options import Options

if TYPE_CHECKING:
    from headroom.server.shelf import Shelf

MODELS_HELP = (
    "files, folders or known names; the first is loaded at once, others when they are asked for; "
    "the default model if left out"
)


@with_settings("engine", "workers", "server", "program")
def serve(
    options: Options,
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help=MODELS_HELP, autocompletion=model_names),
    ] = None,
) -> None:
    """Serve one or several models over HTTP, as the OpenAI API and others do."""
    try:
        # The server's packages are an extra: say so if they are missing.
        from headroom.server.http_server import bind, run_server
    except ModuleNotFoundError as error:
        raise HeadroomError(
            f"The server needs {error.name}, which is not installed.",
            hint="Install it with: pip install 'headroom[server]'.",
        ) from error
    if models:
        options = replace(options, model=models[0])
    # Bind first, so that an address in use is reported before minutes of loading, not after.
    with bind(options.host, options.port) as bound, open_shelf(options, models) as shelf:
        shelf.announce_first_load()
        run_server(shelf, options, bound, lambda: progress_bar("loading"))


def open_shelf(options: Options, given: list[str] | None) -> "Shelf":
    """Return the shelf of the models that the command line names; none is loaded yet."""
    paths: dict[Path, str] = {}  # and the text that each was named by
    chosen: dict[Path, str] = {}  # the aliases of models that were named by one
    for text in given or [options.model]:
        named = with_aliases(replace(options, model=text))
        path = ready_model(named)
        found = model_files(path) if path.is_dir() else [path]
        for file in found:
            paths.setdefault(file, named.model if len(found) == 1 else str(file))
            if named.model != text and named.served_name and len(found) == 1:
                chosen.setdefault(file, named.served_name)
    from headroom.server.model_card import names_of  # imports torch, which takes seconds
    from headroom.server.shelf import Shelf

    names = names_of(list(paths), list(paths.values()), chosen)
    if options.served_name is not None:
        if len(names) > 1:
            raise OptionError(
                f"--served-name is one name, and there are {len(names)} models.",
                hint="Leave it out: each model has the name of its file.",
                param="served_name",
            )
        names = [options.served_name]
    if len(names) == 1:  # the loaded model has the name that the server lists
        options = replace(options, served_name=names[0])
    shelf = Shelf.of_files(dict(zip(names, paths, strict=True)), options)
    shelf.add_aliases(alias_paths(options))
    return shelf
