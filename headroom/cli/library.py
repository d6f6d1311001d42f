"""What `list`, `rm` and `show` share: the models on this machine, with their names and facts."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from headroom.errors import FormatError, HeadroomError
from headroom.families.files import find_weights, open_checkpoint
from headroom.formats.aliases import usable_aliases
from headroom.formats.facts import ModelFacts, model_facts
from headroom.formats.pulled import StoredModel, other_models, stored_file, stored_models
from headroom.options import Options
from headroom.units import gib


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model on this machine."""

    stored: StoredModel
    aliases: tuple[str, ...]
    facts: ModelFacts | None  # None if the files cannot be read
    error: str = ""  # why they cannot


def library(options: Options) -> list[ListedModel]:
    """Return the models in the home folder, those of other programs, and others with an alias."""
    found = [*stored_models(options.home_path), *other_models()]
    names = alias_paths(options)
    there = {model.path.absolute() for model in found}
    for path in dict.fromkeys(names.values()):
        if path is not None and path not in there:
            with suppress(FormatError):  # a folder of several models is not one of them
                found.append(stored_file(path))
    return [_listed(model, names) for model in found]


def alias_paths(options: Options) -> dict[str, Path | None]:
    """Return the absolute path of every alias's model; None if it is not on this disk."""
    found: dict[str, Path | None] = {}
    for alias, model in usable_aliases(options).items():
        try:
            found[alias] = find_weights(model, options.home_path).absolute()
        except FormatError:
            found[alias] = None
    return found


def _listed(model: StoredModel, names: dict[str, Path | None]) -> ListedModel:
    own = tuple(alias for alias, path in names.items() if path == model.path.absolute())
    if not model.complete:
        return ListedModel(model, own, None, "the download did not end")
    try:
        return ListedModel(model, own, model_facts(open_checkpoint(model.path)))
    except (HeadroomError, OSError) as error:
        return ListedModel(model, own, None, str(error))


def listed_json(listed: ListedModel) -> dict[str, Any]:
    """Return a model as plain data; what the files do not say is null."""
    facts = listed.facts
    return {
        "name": listed.stored.name,
        "aliases": [*listed.aliases],
        "path": str(listed.stored.path),
        "size_bytes": listed.stored.size_bytes,
        "format": facts.format if facts else None,
        "quantisation": facts.quant if facts else None,
        "family": facts.architecture if facts else None,
        "parameters": facts.parameters if facts else None,
        "context": (facts.trained_context or None) if facts else None,
        "modified": time_text(facts.changed) if facts else None,
        "owner": listed.stored.owner or None,
        "error": listed.error or None,
    }


def library_table(found: Sequence[ListedModel]) -> Table:
    """Return one row for each model; `problems` says why some cannot be read."""
    table = Table(box=None, pad_edge=False)
    table.add_column("name", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for head in ("quantisation", "family"):
        table.add_column(head, no_wrap=True)
    table.add_column("context", justify="right", no_wrap=True)
    table.add_column("modified", no_wrap=True)
    for listed in found:
        facts = listed.facts
        name = listed.stored.name
        if listed.aliases:
            name = f"{name} ({', '.join(listed.aliases)})"
        if listed.stored.owner:
            name = f"{name} [{listed.stored.owner}]"
        cells = ["-", "-", "-", "cannot be read" if listed.stored.complete else "incomplete"]
        if facts is not None:
            context = f"{facts.trained_context:,}" if facts.trained_context else "-"
            cells = [facts.quant, facts.architecture, context, time_text(facts.changed)[:10]]
        table.add_row(escape(name), gib(listed.stored.size_bytes), *cells)
    return table


def problems(found: Sequence[ListedModel]) -> list[str]:
    """Return what is wrong with models that cannot be read, one line each."""
    return [f"{listed.stored.name}: {listed.error}" for listed in found if listed.error]


def time_text(seconds: float) -> str:
    """Return a time as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
