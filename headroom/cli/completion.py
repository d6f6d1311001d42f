"""Completion in a shell: names of models and values of settings, without importing torch."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from typer._completion_classes import BashComplete

from headroom.errors import HeadroomError
from headroom.options import Options, load_options

BREAKS = frozenset(":=")  # where bash breaks the words of a command line
# Commands that plan a model without its weights: they know published models and catalogued devices.
PLANNING = ("plan", "experts")

Completer = Callable[[click.Context, str], list[str]]


class BashWords(BashComplete):
    """Bash's completion of words with colons and equals signs, at which bash breaks them."""

    def complete(self) -> str:
        """Return the completions, one a line, each without what stands before bash's last break."""
        args, part = super().get_completion_args()
        words = join_words([*args, part] if part else args)
        whole = words.pop() if part else ""
        kept = whole if part and BREAKS.issuperset(part) else whole.removesuffix(part)
        if kept.startswith("-"):  # click completes the value of --flag=value alone
            kept = kept.partition("=")[2]
        found = self.get_completions(words, whole)
        return "\n".join(item.value.removeprefix(kept) for item in found)


def join_words(parts: Iterable[str]) -> list[str]:
    """Return the words as they were typed: parts that colons and equals signs join are one word."""
    words: list[str] = []
    glued = False  # the last part was a break, so that the next one belongs to the same word
    for part in parts:
        is_break = BREAKS.issuperset(part)
        if words and (glued or is_break):
            words[-1] += part
        else:
            words.append(part)
        glued = is_break
    return words


def one_of(choices: Iterable[str]) -> Completer:
    """Return a completer of fixed values."""
    values = [*choices]

    def complete(ctx: click.Context, incomplete: str) -> list[str]:
        return values

    return complete


def model_names(ctx: click.Context, incomplete: str) -> list[str]:
    """Return what MODEL may be: pulled and known models, aliases, and GGUF files in a folder.

    If none of them begins with `incomplete`, the shell completes files and folders itself.
    """
    from headroom.formats.hub import KNOWN_MODELS  # imports numpy; --help must not wait for it

    options = _options(ctx)
    names = [*KNOWN_MODELS, *_pulled(options), *_aliases(options), *_files(incomplete)]
    if ctx.info_name in (*PLANNING, "synth-trace"):
        names += _published(incomplete)
    if ctx.info_name == "bench":
        from headroom.cli.bench import CPU_KERNELS

        names.append(CPU_KERNELS)
    if ctx.info_name in ("bench", "synth-trace"):
        from headroom.bench.models import PREFIX

        names += [PREFIX + name for name in _published(incomplete[len(PREFIX) :])]
    return _typeable(names)


def first_model_name(ctx: click.Context, incomplete: str) -> list[str]:
    """Return what the first word may be if it is a model; later words are texts."""
    return [] if ctx.params.get("words") else model_names(ctx, incomplete)


def stored_names(ctx: click.Context, incomplete: str) -> list[str]:
    """Return the models on this disk and the aliases: what `headroom rm` takes."""
    options = _options(ctx)
    return _typeable([*_pulled(options, all_of_them=True), *_aliases(options)])


def alias_names(ctx: click.Context, incomplete: str) -> list[str]:
    """Return the aliases."""
    return _typeable(_aliases(_options(ctx)))


def device_names(ctx: click.Context, incomplete: str) -> list[str]:
    """Return names of devices; a plan also knows those of the catalogue."""
    names = ["cpu", "cuda:0"]
    if ctx.info_name in PLANNING:
        from headroom.machine.catalogue import CATALOGUE

        names += [entry.name for entry in CATALOGUE]
    return names


# Settings whose values are names; those with fixed choices are completed by their declaration.
NAME_COMPLETERS: dict[str, Completer] = {"device": device_names, "draft": model_names}


def _options(ctx: click.Context) -> Options:
    """Return the settings that say where models and aliases are; broken ones count as left out."""
    given = {name: ctx.params.get(name) for name in ("home", "aliases")}
    try:
        return load_options(given)
    except HeadroomError:
        return Options(**{name: value for name, value in given.items() if value is not None})


def _pulled(options: Options, *, all_of_them: bool = False) -> Iterator[str]:
    # Imports numpy; --help must not wait for it.
    from headroom.formats.pulled import other_models, stored_models

    try:
        found = stored_models(options.home_path)
        if not all_of_them:
            found += other_models()
    except (HeadroomError, OSError):
        return
    yield from (model.name for model in found if model.complete or all_of_them)


def _aliases(options: Options) -> list[str]:
    from headroom.formats.aliases import load_aliases

    try:
        return [*load_aliases(options.aliases_path)]
    except HeadroomError:
        return []


def _published(incomplete: str) -> list[str]:
    """Return the names of published models; after a colon, with the mixes that it may be."""
    from headroom.families.registry import KNOWN
    from headroom.formats.mixes import MIXES

    if ":" in incomplete:
        return [f"{name}:{mix}" for name in KNOWN for mix in MIXES]
    return [*KNOWN]


def _files(incomplete: str) -> Iterator[str]:
    """Yield the GGUF files in the folder that `incomplete` names, as the user would write them."""
    folder = incomplete[: incomplete.rfind("/") + 1]
    try:
        found = sorted(path.name for path in Path(folder).expanduser().glob("*.gguf"))
    except (OSError, RuntimeError):  # ~ of a user that is not there
        return
    yield from (folder + name for name in found)


def _typeable(names: Iterable[str]) -> list[str]:
    """Return names once each, without those that a shell would break at blanks or quotes."""
    return [name for name in dict.fromkeys(names) if not set(name) & set(" \t\n'\"\\$`")]
