"""`headroom alias`: names of one's own for models."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headroom.cli.completion import alias_names, model_names
from headroom.cli.settings import with_settings
from headroom.errors import OptionError
from headroom.families.registry import is_known
from headroom.formats.aliases import add_alias, find_alias, load_aliases, remove_alias
from headroom.options import Options


@with_settings("program", log_level="warning")
def alias(
    options: Options,
    name: Annotated[str | None, typer.Argument(help="the new name", show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Argument(
            help="a file, a folder or a known name",
            show_default=False,
            autocompletion=model_names,
        ),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(
            "--remove", metavar="NAME", help="forget an alias", autocompletion=alias_names
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="list as one JSON object")] = False,
) -> None:
    """Give a model a name of your own, list these names, or remove one.

    Every command takes an alias as MODEL, and a server takes it in the field `model` of requests.
    """
    path = options.aliases_path
    if remove is not None:
        if name is not None:
            raise OptionError("--remove takes the one name to forget.", param="remove")
        print(f"{remove} stood for {remove_alias(path, remove)}")
    elif name is None:
        show_aliases(load_aliases(path), as_json)
    elif model is None:
        raise OptionError(
            f"{name} stands for no model.",
            hint=f"Write headroom alias {name} MODEL, or headroom alias to list all.",
            param="model",
        )
    else:
        target = checked_target(name, model, options)
        add_alias(path, name, target)
        print(f"{name} stands for {target}")


def show_aliases(aliases: dict[str, str], as_json: bool) -> None:
    """Print all aliases, with the models that they stand for."""
    if as_json:
        print(json.dumps({"version": 1, "aliases": aliases}))
        return
    wide = max(map(len, aliases), default=0)
    for name, model in aliases.items():
        print(f"{name:<{wide}}  {model}")


def checked_target(name: str, model: str, options: Options) -> str:
    """Return what an alias stands for; refuse a name that means something already."""
    # Imports huggingface_hub and numpy; listing must not wait for them.
    from headroom.cli.bench import CPU_KERNELS
    from headroom.formats.hub import KNOWN_MODELS, SHORT_NAMES, find_on_disk
    from headroom.formats.hub_names import parse_hub_name

    taken = ""
    if name.lower() in (*SHORT_NAMES, *KNOWN_MODELS, CPU_KERNELS) or is_known(name):
        taken = "a model that headroom knows"
    elif find_on_disk(name) is not None:
        taken = "a file or a folder here"
    if taken:
        raise OptionError(
            f"{name} is {taken}: an alias would hide it.", hint="Choose another name.", param="name"
        )
    aliases = load_aliases(options.aliases_path)
    if (other := find_alias(model, aliases)) is not None:
        return aliases[other]
    if (there := find_on_disk(model)) is not None:
        return str(Path(there).absolute())
    known = SHORT_NAMES.get(model.lower(), model)
    if known.lower() in KNOWN_MODELS or is_known(known) or parse_hub_name(known) is not None:
        return known
    raise OptionError(
        f"There is no file, folder or known model {model!r}.",
        hint="Name a file, a folder, org/repo or org/repo:file.gguf of Hugging Face.",
        param="model",
    )
