"""`headroom rm`: delete models from this disk."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headroom.cli.completion import stored_names
from headroom.cli.settings import with_settings
from headroom.errors import FormatError, OptionError
from headroom.formats.aliases import find_alias, load_aliases, remove_alias
from headroom.options import Options
from headroom.units import counted, gib


@with_settings("program", log_level="warning")
def rm(
    options: Options,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="names, as list has them", autocompletion=stored_names
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    outside: Annotated[
        bool, typer.Option("--outside", help="also delete files outside of the home folder")
    ] = False,
) -> None:
    """Delete models, and say how many bytes that frees.

    Files that another model needs stay, and so does a model that has another alias.
    """
    if not yes and not sys.stdin.isatty():
        raise OptionError(
            "rm asks before it deletes, and standard input is not a terminal.",
            hint="Add --yes to delete without being asked.",
            param="yes",
        )
    if not all(name.strip() for name in models):
        raise OptionError("An empty name is no model.", hint="headroom list shows all names.")
    for name in models:
        remove(name, options, yes=yes, outside=outside)


def remove(name: str, options: Options, *, yes: bool, outside: bool) -> None:
    """Delete one model, or only its alias if the model has another one."""
    # Readers of files import numpy; --help must not wait for it.
    from headroom.cli.library import alias_paths
    from headroom.families.files import find_weights
    from headroom.formats.other_stores import owner_of
    from headroom.formats.pulled import (
        is_inside,
        remove_model,
        stored_file,
        stored_models,
    )

    home = options.home_path
    aliases = load_aliases(options.aliases_path)
    alias = find_alias(name, aliases)
    target = name if alias is None else aliases[alias]
    stored = stored_models(home)
    model = next((model for model in stored if model.name == target), None)
    if model is None:
        try:
            path = find_weights(target, home)
        except FormatError as error:
            raise FormatError(
                f"There is no model {name!r} on this disk.", hint="headroom list shows all."
            ) from error
        same = (model for model in stored if model.path.absolute() == path.absolute())
        model = next(same, None) or stored_file(path)
    if owner := owner_of(model.path):
        raise OptionError(
            f"{model.name} belongs to {owner}: nothing was deleted.",
            hint=f"Delete it with {owner}'s own command.",
            param="models",
        )
    where = model.path.absolute()
    others = [x for x, path in alias_paths(options).items() if path == where and x != alias]
    if others and alias is not None:
        remove_alias(options.aliases_path, alias)
        print(f"{alias} is no alias any more; the files stay, since {_named(others)}.")
        return
    if others:
        raise OptionError(
            f"{model.name} stays, since {_named(others)}.",
            hint=f"Remove {'it' if len(others) == 1 else 'them'} instead: "
            f"headroom rm {' '.join(others)}",
            param="models",
        )
    if not outside and not all(is_inside(file, home) for file in model.files):
        raise OptionError(
            f"{model.path} is not in {home}: nothing was deleted.",
            hint="Add --outside to delete it nevertheless"
            + (f"; headroom alias --remove {alias} only forgets the alias." if alias else "."),
            param="outside",
        )
    if not yes and not _agreed(model.name, model.size_bytes, model.files):
        print(f"{model.name} stays.")
        return
    done = remove_model(model, home, stored)
    if alias is not None:
        remove_alias(options.aliases_path, alias)
    kept = f"; {counted(len(done.kept), 'file')} stay, which another model needs" * bool(done.kept)
    files = counted(len(done.removed), "file")
    print(f"{model.name}: removed {files}, {gib(done.freed_bytes)} are free now{kept}")


def _named(aliases: list[str]) -> str:
    if len(aliases) == 1:
        return f"{aliases[0]} is an alias of the model"
    return f"{', '.join(aliases)} are aliases of the model"


def _agreed(name: str, size_bytes: int, files: tuple[Path, ...]) -> bool:
    """Ask on the terminal whether to delete a model; return True only for y or yes."""
    question = f"Delete {name}, {counted(len(files), 'file')} with {gib(size_bytes)}? [y/N] "
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
