"""`headroom synth`: write a checkpoint with random weights."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from headroom.cli.completion import one_of
from headroom.cli.settings import add_flags
from headroom.errors import OptionError
from headroom.families.family import Recipe
from headroom.families.registry import FAMILIES
from headroom.families.synth.recipe import chosen_family, find_recipe, read_recipe, with_mtp
from headroom.families.synth.routing import make_skew
from headroom.families.synth.values import Source
from headroom.families.synth.write import (
    WriteSettings,
    checkpoint_bytes,
    mix_name,
    safetensors_type,
    write_gguf,
    write_safetensors,
)
from headroom.machine.cgroups import read_limits
from headroom.machine.devices import usable_cores
from headroom.text.tokenizer_file import tokenizer_file
from headroom.units import gib

MAX_THREADS = 16  # more threads would wait for the disk

HOT_SHARE = 0.6  # share of experts that are hot if --skew-hot is not given


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """What to write; the flags of the command are made from these fields."""

    size: Annotated[
        str | None,
        typer.Option(help="tiny (the default), a variant of tiny, or a known model of the family"),
    ] = None
    config: Annotated[
        Path | None, typer.Option(help="a config.json to take the dimensions from, not --size")
    ] = None
    layers: Annotated[int, typer.Option(min=0, help="only so many first layers; 0: all")] = 0
    mtp: Annotated[
        bool, typer.Option("--mtp", help="with a prediction head, in families that have them")
    ] = False
    quant: Annotated[
        str, typer.Option(help="mix of types (default: Q4_K_M; BF16 for drafts and safetensors)")
    ] = ""
    seed: Annotated[int, typer.Option(min=0, help="the same seed gives the same file")] = 0
    format: Annotated[Literal["gguf", "safetensors"], typer.Option(help="what to write")] = "gguf"
    routing_skew: Annotated[
        float, typer.Option(help="share of choices that hot experts take; 0: no experts are hot")
    ] = 0.0
    skew_hot: Annotated[
        float | None,
        typer.Option(help=f"share of experts that are hot, drawn for each layer ({HOT_SHARE})"),
    ] = None
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all cores")] = 0
    force: Annotated[bool, typer.Option("--force", help="replace what is there")] = False


def synth(
    family: Annotated[
        str,
        typer.Argument(
            help=f"one of {', '.join(FAMILIES)}",
            show_default=False,
            autocompletion=one_of(FAMILIES),
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(help="the .gguf file, or the folder of safetensors", show_default=False),
    ],
    **flags: Any,
) -> None:
    """Write a checkpoint with random weights for tests and speed measurements.

    Shapes, types, settings, tokenizer and chat template are those of the family; what the model
    answers is noise.
    """
    options = SynthOptions(**flags)
    recipe = chosen_recipe(family, options)
    default = "bf16" if options.format == "safetensors" or recipe.taps else "q4_k_m"
    mix = mix_name(options.quant or default)
    if options.format == "safetensors":
        safetensors_type(mix)
    make_room(out, options)
    source = Source(recipe, options.seed)
    if options.routing_skew:
        skew = make_skew(recipe, options.routing_skew, options.skew_hot or HOT_SHARE)
        source = Source(recipe, options.seed, skew)
    started = time.perf_counter()
    write(source, out, mix, options)
    total, taken = checkpoint_bytes(recipe, mix, options.format), time.perf_counter() - started
    print(f"{out}: {recipe.family} {recipe.name}, {mix.upper()}, {gib(total)} in {taken:.1f} s")


def chosen_recipe(family: str, options: SynthOptions) -> Recipe:
    """Return the recipe that the flags ask for."""
    if options.mtp and not chosen_family(family).has_mtp:
        able = ", ".join(name for name, known in FAMILIES.items() if known.has_mtp)
        raise OptionError(
            f"{family} models have no prediction heads.", hint=f"Families: {able}.", param="mtp"
        )
    recipe = sized_recipe(family, options)
    return with_mtp(recipe) if options.mtp else recipe


def sized_recipe(family: str, options: SynthOptions) -> Recipe:
    """Return the recipe of the size that the flags ask for."""
    chosen_family(family)
    if options.skew_hot is not None and not options.routing_skew:
        raise OptionError("--skew-hot says nothing without --routing-skew.", param="skew-hot")
    if options.config is None:
        return find_recipe(family, options.size or "tiny", options.layers)
    if options.size is not None:
        raise OptionError("--size and --config exclude each other.", param="config")
    return read_recipe(family, options.config, options.layers)


def make_room(out: Path, options: SynthOptions) -> None:
    """Refuse to replace files without --force; with it, delete another model's weights."""
    if out.is_dir() and options.format == "gguf":
        raise OptionError(f"{out} is a folder.", hint=f"Name a file, such as {out / 'model.gguf'}.")
    folder = out.is_dir() and any(out.iterdir())
    if (folder or out.is_file()) and not options.force:
        raise OptionError(f"{out} is there already.", hint="Use --force to replace it.")
    if out.is_file() and options.format == "safetensors":
        raise OptionError(f"{out} is a file.", hint="Safetensors are written into a folder.")
    if folder:
        for file in out.glob("model*.safetensors*"):
            file.unlink()


def write(source: Source, out: Path, mix: str, options: SynthOptions) -> None:
    """Write the checkpoint and show a progress bar."""
    threads = options.threads or min(MAX_THREADS, usable_cores(read_limits()))
    columns = (TextColumn(out.name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    quiet = not console.is_terminal  # a pipe would get an empty line
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        total = checkpoint_bytes(source.recipe, mix, options.format)
        task = progress.add_task("", total=total)
        settings = WriteSettings(threads, lambda size: progress.advance(task, size))
        if options.format == "gguf":
            write_gguf(source, out, mix, settings)
        else:
            write_safetensors(source, out, mix, tokenizer_file, settings)


add_flags(synth, SynthOptions)
