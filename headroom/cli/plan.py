"""`headroom plan`: show what would go where, load nothing."""

import json
from typing import Annotated

import typer
from rich.console import Console

from headroom.cli.loading import ready_model
from headroom.cli.settings import with_settings
from headroom.formats.checkpoint import open_checkpoint
from headroom.memory.plan import DoesNotFitError, Plan, make_plan
from headroom.memory.report import plan_json, plan_table, plan_text
from headroom.memory.targets import plan_devices
from headroom.options import Options


@with_settings("model", "engine", "plan", "program", log_level="warning")
def plan(
    options: Options,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show what would go where in memory; nothing is loaded."""
    path = ready_model(options)
    from headroom.models.describe import describe  # torch: --help must not wait for it

    shape = describe(open_checkpoint(path)).shape
    try:
        show_plan(make_plan([shape], plan_devices(options), options), as_json)
    except DoesNotFitError as error:
        show_plan(error.plan, as_json)
        raise


def show_plan(made: Plan, as_json: bool) -> None:
    """Print a plan: as one JSON object, as a table in colours, or as plain text for a pipe."""
    console = Console(highlight=False)
    if as_json:
        print(json.dumps(plan_json(made)))
    elif console.is_terminal:
        console.print(plan_table(made))
    else:
        print(plan_text(made), end="")
