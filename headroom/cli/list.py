"""`headroom list`: the models on this machine."""

import json
from typing import Annotated

import typer

from headroom.cli.settings import with_settings
from headroom.options import Options


@with_settings("program", log_level="warning")
def list(
    options: Options,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """List the models on this machine: of the home folder, of other programs, and with an alias."""
    # Readers of files import numpy; --help must not wait for it.
    from headroom.cli.library import library, library_table, listed_json, problems

    found = library(options)
    if as_json:
        print(json.dumps({"version": 1, "models": [listed_json(model) for model in found]}))
        return
    if not found:
        print(f"There are no models in {options.home_path}. Get one with: headroom pull")
        return
    from rich.console import Console

    Console(highlight=False).print(library_table(found))
    for problem in problems(found):
        print(problem)
