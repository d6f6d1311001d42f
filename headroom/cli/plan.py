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
from headroom.errors import OptionError, PlanError
from headroom.families.registry import is_known
from headroom.formats.atomic import replace_text
from headroom.formats.json_files import check_folder, check_replaceable
from headroom.machine.catalogue import catalogue_devices
from headroom.machine.devices import DeviceSpec
from headroom.machine.targets import plan_devices
from headroom.options import MTP, OFF, Options
from headroom.plan.alternatives import alternatives
from headroom.plan.known import known_shape
from headroom.plan.plan import DoesNotFitError, Plan, make_plan
from headroom.plan.shape import ModelShape, PlanSource
from headroom.plan.show.report import JSON_VERSION, plan_json
from headroom.split.unused import tell_unused
from headroom.split.upkeep_rules import upkeep_rules
from headroom.units import gib

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
Devices = Annotated[
    bool,
    typer.Option("--devices", help="list the devices that --device knows by name; plan nothing"),
]


@with_settings("model", "engine", "plan", "program", log_level="warning")
def plan(
    options: Options,
    as_json: AsJson = False,
    svg: Svg = None,
    explain: Explain = None,
    compare: Compare = None,
    emit: Emit = None,
    devices: Devices = False,
) -> None:
    """Show what would go where in memory; nothing is loaded.

    MODEL may also be a built-in name with a mix, as in qwen3.6-35b-a3b:q4_k_m, a config.json, or
    a URL or hub name, of which only the header is read.
    """
    if devices:
        show_devices(as_json)
        return
    refuse_idle_flags(as_json=as_json, svg=svg, explain=explain, compare=compare, emit=emit)
    if svg is not None:
        check_folder(svg, "svg")
        check_replaceable(svg, "picture", "svg")
    upkeep_rules(options)  # refuses wrong options of exchanges, as a run does
    if show_repository(options, as_json=as_json, svg=svg, others=(explain, compare, emit)):
        return
    source = find_plan_source(options)
    shapes = with_draft(source.shape, options)
    if compare:
        show_comparison(shapes, options, ",".join(compare), as_json, svg)
        return
    refusal, made = None, None
    try:
        made = make_plan(shapes, plan_devices(options), options)
    except DoesNotFitError as error:
        refusal, made = error, error.plan
    made = with_expert_files(made, source, options)
    # Each form imports what it shows a plan by: a plan takes less than a third of a second.
    if svg is not None:
        from headroom.plan.show.picture import plan_svg

        write_picture(plan_svg(made), svg)
    if explain is not None:
        from headroom.plan.show.explain import explain_line

        print(explain_line(made, explain))
    elif emit is not None:
        if refusal is None:
            from headroom.plan.show.emit import llama_server_command

            print(llama_server_command(made, source.gguf_path))
    else:
        show_plan(made, as_json)
    if refusal is not None:
        raise with_alternatives(refusal, shapes, options)


def refuse_idle_flags(
    *, as_json: bool, svg: Path | None, explain: str | None, compare: object, emit: str | None
) -> None:
    """Refuse a flag that another one would leave without effect."""
    alone = {"--explain": explain, "--emit": emit}
    for flag in (name for name, value in alone.items() if value is not None):
        others = {"--json": as_json, "--svg": svg, "--compare": compare, **alone}
        del others[flag]
        for other in (name for name, value in others.items() if value):
            raise OptionError(
                f"{flag} prints one thing alone: {other} would have no effect.",
                hint=f"Leave out {other} or {flag}.",
            )


def show_devices(as_json: bool) -> None:
    """Print the catalogue: as one JSON object, or as a table."""
    found = catalogue_devices()
    if as_json:
        print(json.dumps({"version": JSON_VERSION, "devices": [device_json(x) for x in found]}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for head in ("memory", "bandwidth", "link", "TFLOPS"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("architecture", no_wrap=True)
    for device in found:
        table.add_row(
            device.name,
            gib(device.total_bytes),
            f"{device.bandwidth / 1e9:,.0f} GB/s",
            "shared" if device.unified else f"{device.link / 1e9:.0f} GB/s",
            f"{device.flops / 1e12:,.1f}",
            device.gfx or (f"sm{device.sm}" if device.sm else device.kind),
        )
    Console(highlight=False).print(table)
    print(
        f"{len(found)} devices, by their makers' data sheets; also cpu, cuda:0 or a size as 24GiB"
    )


def device_json(device: DeviceSpec) -> dict[str, Any]:
    """Return a device of the catalogue as plain data; `link` is null where memory is shared."""
    return {
        "name": device.name,
        "kind": device.kind,
        "architecture": device.gfx or (f"sm{device.sm}" if device.sm else device.kind),
        "memory_bytes": device.total_bytes,
        "available_bytes": device.available_bytes,
        "bandwidth_bytes_per_s": device.bandwidth,
        "link_bytes_per_s": None if device.unified else device.link,
        "operations_per_s": device.flops,
    }


def show_repository(
    options: Options, *, as_json: bool, svg: Path | None, others: Sequence[object]
) -> bool:
    """Compare all GGUF models of a repository, if the model is one; return whether it was.

    Raise an error if none of them fits.
    """
    if is_known(options.model) or "/" not in options.model:
        return False
    from headroom.plan.repository import offered_files, plan_offered

    if not (files := offered_files(options.model, options.home_path)):
        return False
    repo = files[0].name.partition(":")[0]
    if any(others) or options.draft is not None or named_files(options):
        raise OptionError(
            f"{repo} offers {len(files)} models, and this needs one.",
            hint=f"Name one, as in {files[-1].name}",
            param="model",
        )
    devices = plan_devices(options)
    found = plan_offered(repo, files, lambda shape: make_plan([shape], devices, options))
    plans = {x.offered.quant: x.plan for x in found if x.plan is not None}
    if svg is not None and plans:
        from headroom.plan.show.comparison import comparison_svg

        write_picture(comparison_svg(plans), svg)
    if as_json:
        rows = [
            {
                "name": x.offered.name,
                "file": x.offered.file,
                "size_bytes": x.offered.size_bytes,
                "error": x.error or None,
                "plan": None if x.plan is None else plan_json(x.plan),
            }
            for x in found
        ]
        print(json.dumps({"version": JSON_VERSION, "repository": repo, "models": rows}))
    else:
        from rich.console import Console

        from headroom.plan.show.table import offered_table

        console = Console(highlight=False)
        console.print(f"{repo} on {', '.join(device.name for device in devices)}", markup=False)
        console.print(offered_table(found))
        for reason in dict.fromkeys(x.error for x in found if x.plan is None):
            console.print(reason, markup=False)
        fitting = [x.offered.name for x in found if x.plan is not None and x.plan.fits]
        if fitting:
            console.print(f"headroom pull {fitting[-1]} fetches the largest that fits.")
    if not any(plan.fits for plan in plans.values()):
        raise PlanError(
            f"None of the {len(files)} models of {repo} fits.",
            hint="Name one of them to see what is missing, or another --device.",
        )
    return True


def find_plan_source(options: Options) -> PlanSource:
    """Return the model that a plan is for; the default model is downloaded if it is missing."""
    if is_known(options.model):
        return PlanSource(known_shape(options.model, mtp=options.draft == MTP))
    # Readers of files import numpy, which plans of built-in models do not need.
    from headroom.cli.loading import is_default, ready_model, refuse_synth
    from headroom.plan.sources import find_source

    refuse_synth(options.model, options.home_path)
    name = str(ready_model(options)) if is_default(options.model) else options.model
    return find_source(name, options.home_path)


def with_draft(shape: ModelShape, options: Options) -> list[ModelShape]:
    """Return the shapes of the model and of its draft, if one is named."""
    if options.draft_model is None:
        return [shape]
    from headroom.plan.drafts import draft_shape  # imports numpy, too

    return [shape, draft_shape(options.draft_model, shape, options.home_path)]


def with_expert_files(made: Plan, source: PlanSource, options: Options) -> Plan:
    """Return the plan with the placement, or with the statistics, that the options name.

    Files of another model are refused, as by a run.
    """
    if not (names := named_files(options)):
        tell_unused(made, options)
        return made
    if (checkpoint := source.checkpoint) is None:
        log.warning("plan: not read, since there are no weights to compare with: %s", names)
        return made
    # torch takes seconds to import; other plans need not wait for it.
    from headroom.split.expert_records import read_records
    from headroom.split.placing import (
        expert_layers,
        find_placement,
        named_placement,
        placed_plan,
    )

    counts = read_records(checkpoint, source.shape, options, measuring=True).file.counts
    if not made.fits:  # a file of another model is refused there, too
        named_placement(options.placement, checkpoint.identity, expert_layers(source.shape, made))
        return made
    placement = find_placement(source.shape, made, options, checkpoint.identity, counts)
    return placed_plan(made, placement)


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


def write_picture(picture: str, path: Path) -> None:
    """Write an SVG document into a file."""
    try:
        replace_text(path, picture)
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
    shapes: Sequence[ModelShape], options: Options, text: str, as_json: bool, svg: Path | None
) -> None:
    """Print one column for each context and device, and draw them if a picture is wanted.

    Raise an error if none of them fits.
    """
    if names := named_files(options):
        log.warning("plan: not read, since plans are compared: %s", names)
    plans: dict[str, Plan] = {}
    refusal: DoesNotFitError | None = None
    for label, column in column_options(options, text).items():
        try:
            plans[label] = make_plan(shapes, plan_devices(column), column)
        except DoesNotFitError as error:
            refusal, plans[label] = error, error.plan
        if len(plans[label].devices) == 1:
            tell_unused(plans[label], column, f"in column {label}")
    if svg is not None:
        from headroom.plan.show.comparison import comparison_svg

        write_picture(comparison_svg(plans), svg)
    if as_json:
        rows: list[dict[str, Any]] = [{"label": x, **plan_json(plans[x])} for x in plans]
        print(json.dumps({"version": rows[0]["version"], "plans": rows}))
    else:
        from rich.console import Console

        from headroom.plan.show.table import compare_table

        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=COMPARED_COLUMNS * (1 + len(plans)))
        console.print(compare_table(plans))
    if refusal is not None and not any(made.fits for made in plans.values()):
        raise refusal


def column_options(options: Options, text: str) -> dict[str, Options]:
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
