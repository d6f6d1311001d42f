"""`headroom plan`: show what would go where in memory, without loading anything."""

import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headroom.cli.settings import with_settings
from headroom.errors import FormatError, OptionError
from headroom.families.registry import is_known
from headroom.formats.json_files import check_replaceable
from headroom.machine.targets import plan_devices
from headroom.options import OFF, Options
from headroom.plan.alternatives import alternatives
from headroom.plan.known import known_shape
from headroom.plan.plan import DoesNotFitError, Plan, make_plan
from headroom.plan.shape import ModelShape
from headroom.plan.show.emit import llama_server_command
from headroom.plan.show.picture import plan_svg
from headroom.plan.show.report import explain_line, plan_json
from headroom.split.unused import tell_unused
from headroom.split.upkeep_rules import upkeep_rules

log = logging.getLogger(__name__)

NEAREST = 3  # proposals if a plan does not fit
COMPARED_COLUMNS = 32  # width of a column if the output is not a terminal

AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Svg = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="also draw the plan into a file")
]
Explain = Annotated[
    str | None,
    typer.Option("--explain", metavar="LINE", help="say only how one line came about"),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        "--compare",
        metavar="LIST",
        help="plans side by side: contexts as 8192,32768, devices as 12GiB,24GiB or both; "
        "several devices of one plan are joined by +",
    ),
]
Emit = Annotated[
    Literal["llama.cpp"] | None,
    typer.Option("--emit", help="print only the nearest command of another program"),
]


@with_settings("model", "engine", "plan", "program", log_level="warning")
def plan(
    options: Options,
    as_json: AsJson = False,
    svg: Svg = None,
    explain: Explain = None,
    compare: Compare = None,
    emit: Emit = None,
) -> None:
    """Show what would go where in memory; nothing is loaded.

    MODEL may also be a built-in name with a mix, as in qwen3.6-35b-a3b:q4_k_m, a config.json, or
    a URL or hub name, of which only the header is read.
    """
    if svg is not None:
        check_replaceable(svg, "picture", "svg")
    upkeep_rules(options)  # refuses wrong options of exchanges, as a run does
    shapes = read_shapes(options)
    if compare:
        show_comparison(shapes, options, ",".join(compare), as_json)
        return
    refusal, made = None, None
    try:
        made = make_plan(shapes, plan_devices(options), options)
    except DoesNotFitError as error:
        refusal, made = error, error.plan
    made = with_expert_files(made, options)
    if svg is not None:
        write_picture(made, svg)
    if explain is not None:
        print(explain_line(made, explain))
    elif emit is not None:
        if refusal is None:
            print(llama_server_command(made, gguf_path(options)))
    else:
        show_plan(made, as_json)
    if refusal is not None:
        raise with_alternatives(refusal, shapes, options)


def gguf_path(options: Options) -> Path | None:
    """Return the model's GGUF file; None if the model is a name, a URL or another kind of file."""
    # Imports huggingface_hub and numpy, which take longer than a plan.
    from headroom.formats.checkpoint import gguf_file
    from headroom.formats.hub import find_model

    try:
        return gguf_file(find_model(options.model, options.home_path))
    except FormatError:
        return None


def read_shapes(options: Options) -> list[ModelShape]:
    """Return the shapes of the model and of its draft, if one is named."""
    if is_known(options.model) and options.draft is None:
        return [known_shape(options.model)]
    # Readers of files import numpy, which plans of built-in models do not need.
    from headroom.cli.loading import is_default, ready_model, refuse_synth
    from headroom.plan.sources import draft_shape, find_shape

    refuse_synth(options.model, options.home_path)
    name = str(ready_model(options)) if is_default(options.model) else options.model
    shapes = [find_shape(name, options.home_path)]
    if options.draft:
        shapes.append(draft_shape(options.draft, shapes[0], options.home_path))
    return shapes


def with_expert_files(made: Plan, options: Options) -> Plan:
    """Return the plan with the placement, or with the statistics, that the options name.

    Files of another model are refused, as by a run.
    """
    if not (names := named_files(options)):
        if len(made.devices) == 1:
            tell_unused(made.devices[0], options)
        return made
    # torch takes seconds to import; other plans need not wait for it.
    from headroom.families.files import open_checkpoint
    from headroom.formats.hub import find_model
    from headroom.plan.describe import describe
    from headroom.split.expert_records import read_records
    from headroom.split.placing import (
        expert_layers,
        find_placement,
        named_placement,
        placed_plan,
    )

    try:
        checkpoint = open_checkpoint(find_model(options.model, options.home_path))
    except FormatError:  # the shape was found: it is a name, a URL or a config.json
        log.warning("plan: not read, since there are no weights to compare with: %s", names)
        return made
    model = describe(checkpoint)
    counts = read_records(model, options, measuring=True).file.counts
    if made.fits and len(made.devices) == 1:
        placement = find_placement(model.shape, made, options, checkpoint.identity, counts)
        return placed_plan(made, placement)
    # No engine runs on several devices yet, but a file of another model is refused there, too.
    named_placement(options.placement, checkpoint.identity, expert_layers(model.shape, made))
    return made


def named_files(options: Options) -> str:
    """Return the files of experts that the options name, as one text."""
    return " and ".join(
        x for x in (options.placement, options.routing_stats) if x not in (None, OFF)
    )


def with_alternatives(
    refusal: DoesNotFitError, shapes: Sequence[ModelShape], options: Options
) -> DoesNotFitError:
    """Return the error with the nearest NEAREST proposals: settings, other mixes, more memory."""
    nearest = list(refusal.nearest[:NEAREST])
    if len(nearest) < NEAREST:
        wanted = NEAREST - len(nearest)
        nearest += itertools.islice(alternatives(shapes, options), wanted)
    if not nearest:
        return refusal
    hint = f"Try {' or '.join(nearest)}."
    return DoesNotFitError(refusal.message, hint=hint, plan=refusal.plan, nearest=tuple(nearest))


def write_picture(made: Plan, path: Path) -> None:
    """Draw a plan into a file."""
    try:
        path.write_text(plan_svg(made))
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.", param="svg") from error


def show_plan(made: Plan, as_json: bool) -> None:
    """Print a plan: as one JSON object, as a table in colours, or as plain text for a pipe."""
    if as_json:
        print(json.dumps(plan_json(made)))
        return
    # Its import takes as long as the plan, and --json does not need it.
    from rich.console import Console

    from headroom.plan.show.table import plan_table, plan_text

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(plan_table(made))
    else:
        print(plan_text(made), end="")


def show_comparison(
    shapes: Sequence[ModelShape], options: Options, text: str, as_json: bool
) -> None:
    """Print one column for each context and device; raise an error if none of them fits."""
    if names := named_files(options):
        log.warning("plan: not read, since plans are compared: %s", names)
    plans: dict[str, Plan] = {}
    refusal: DoesNotFitError | None = None
    for label, column in compared(options, text).items():
        try:
            plans[label] = make_plan(shapes, plan_devices(column), column)
        except DoesNotFitError as error:
            refusal, plans[label] = error, error.plan
        if len(plans[label].devices) == 1:
            tell_unused(plans[label].devices[0], column, f"in column {label}")
    if as_json:
        rows: list[dict[str, Any]] = [{"label": x, **plan_json(plans[x])} for x in plans]
        print(json.dumps({"version": rows[0]["version"], "plans": rows}))
    else:
        from rich.console import Console

        from headroom.plan.show.table import compare_table

        console = Console(highlight=False)
        wide = None if console.is_terminal else COMPARED_COLUMNS * (1 + len(plans))
        console.print(compare_table(plans), width=wide)
    if refusal is not None and not any(made.fits for made in plans.values()):
        raise refusal


def compared(options: Options, text: str) -> dict[str, Options]:
    """Return the options of every column: whole numbers are contexts, other words devices."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise OptionError(
            f"--compare is {text!r}.",
            hint="Write contexts and devices, as in 8192,32768 or 12GiB,24GiB.",
        )
    contexts: list[int | None] = [int(word) for word in words if word.isdigit()]
    devices: list[str | None] = [word for word in words if not word.isdigit()]
    contexts, devices = contexts or [options.context], devices or [options.device]
    columns = {}
    for device, context in itertools.product(devices, contexts):
        named = [device if len(devices) > 1 else None, context if len(contexts) > 1 else None]
        label = " ".join(str(word) for word in named if word) or str(device or context)
        joined = device.replace("+", ",") if device else None
        columns[label] = replace(options, device=joined, context=context)
    return columns
