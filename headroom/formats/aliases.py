"""Aliases: names that a user gives to models, kept in one small file."""

import fcntl
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headroom.errors import FormatError, OptionError
from headroom.formats.atomic import replace_text
from headroom.formats.json_files import read_object
from headroom.options import Options

log = logging.getLogger(__name__)

ALIASES_VERSION = 1
ALIAS_CHARACTERS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def load_aliases(path: Path) -> dict[str, str]:
    """Return the models by their aliases; none if there is no file."""
    try:
        table = read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(path, str(error)) from error
    found = table.get("aliases")
    if table.get("version") != ALIASES_VERSION or not isinstance(found, Mapping):
        raise _broken(path, f"it has no version {ALIASES_VERSION} with aliases")
    if not all(isinstance(value, str) for value in found.values()):
        raise _broken(path, "a model is not a text")
    return dict(found)


def find_alias(name: str, aliases: Mapping[str, str]) -> str | None:
    """Return an alias as it is written in the file; case does not matter."""
    wanted = name.strip().lower()
    return next((alias for alias in aliases if alias.lower() == wanted), None)


def usable_aliases(options: Options) -> dict[str, str]:
    """Return the models by their aliases; a file that cannot be read is told, and stops nothing."""
    try:
        return load_aliases(options.aliases_path)
    except FormatError as error:
        log.warning("aliases: none are known: %s", error)
        return {}


def with_aliases(options: Options) -> Options:
    """Return the options with models in place of aliases; the alias stays the served name."""
    if not options.model and options.draft is None:  # nothing that an alias could stand for
        return options
    aliases = usable_aliases(options)
    draft = options.draft_model
    if draft is not None and (alias := find_alias(draft, aliases)) is not None:
        options = replace(options, draft=aliases[alias])
    if (alias := find_alias(options.model, aliases)) is None:
        return options
    name = options.served_name or alias.lower()
    return replace(options, model=aliases[alias], served_name=name)


def add_alias(path: Path, name: str, model: str) -> None:
    """Add an alias to the file; one that is there already is refused."""
    if len(name) > ALIAS_CHARACTERS or _NAME.fullmatch(name) is None:
        raise OptionError(
            f"{name!r} cannot be an alias.",
            hint=f"Write up to {ALIAS_CHARACTERS} letters, digits, dots, dashes and underscores, "
            "a letter or digit first.",
            param="name",
        )
    with _changing(path) as aliases:
        if (taken := find_alias(name, aliases)) is not None:
            raise OptionError(
                f"{taken} is an alias of {aliases[taken]} already.",
                hint=f"Remove it first: headroom alias --remove {taken}",
                param="name",
            )
        aliases[name] = model


def remove_alias(path: Path, name: str) -> str:
    """Remove an alias from the file, and return the model that it stood for."""
    with _changing(path) as aliases:
        found = find_alias(name, aliases)
        if found is None:
            known = f"There are: {', '.join(sorted(aliases))}." if aliases else "There are none."
            raise OptionError(f"There is no alias {name!r}.", hint=known, param="name")
        return aliases.pop(found)


@contextmanager
def _changing(path: Path) -> Iterator[dict[str, str]]:
    """Yield the aliases to be changed, and write them unless an error is raised.

    Another process that changes them waits, so that none loses what the other wrote.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, even by a crash
            aliases = load_aliases(path)
            yield aliases
            table = {"version": ALIASES_VERSION, "aliases": dict(sorted(aliases.items()))}
            replace_text(path, json.dumps(table, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise OptionError(
            f"Cannot write the aliases into {path}: {error.strerror}.",
            hint="Name another file with --aliases or HEADROOM_ALIASES.",
            param="aliases",
        ) from error


def _broken(path: Path, why: str) -> FormatError:
    return FormatError(f"{path} is not a file of aliases: {why}.", hint="Correct it, or delete it.")
