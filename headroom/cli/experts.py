"""`headroom experts`: which experts are chosen, and which of them a plan keeps in fast memory."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headroom.cli.loading import is_default, ready_model
from headroom.cli.policies import PolicyFlags, replay_policies, show_policies
from headroom.cli.settings import add_flags, with_settings
from headroom.errors import FormatError, ModelError, OptionError
from headroom.formats.atomic import replace_text
from headroom.formats.json_files import check_folder, check_replaceable
from headroom.options import OFF, Options

if TYPE_CHECKING:
    from headroom.experts.picture import PlannedResidency
    from headroom.experts.placement import ExpertCounts
    from headroom.formats.checkpoint import Checkpoint
    from headroom.plan.plan import Plan
    from headroom.plan.shape import ModelShape

log = logging.getLogger(__name__)


def experts(
    options: Options,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="draw layers and experts into a file"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    **flags: Any,
) -> None:
    """Show which experts are chosen and which would be hot; nothing is loaded.

    Choices come from the routing statistics of the model, if there are any. Hot experts are those
    that a run with the same options would keep in fast memory, on this machine or on --device.
    MODEL may also be a built-in name, a config.json or a URL, as for headroom plan; these have no
    statistics, so only the plan's numbers are shown. With --policies a routing trace is replayed
    through every policy of a cache of experts.
    """
    replayed = PolicyFlags(**flags)
    replayed.check()
    if svg is not None and replayed.policies:
        raise OptionError("--svg draws the hot experts, and --policies has none.", param="svg")
    if svg is not None:
        check_folder(svg, "svg")
        check_replaceable(svg, "picture", "svg")  # an SVG picture never replaces a model's file
    planned = plan_experts(options)
    if replayed.policies:
        show_policies(replay_policies(planned, replayed), as_json=as_json)
        return
    found = planned.residency()
    if svg is not None:
        draw(found, svg)
    if as_json:
        print(json.dumps(residency_json(found)))
    elif svg is None:
        Console().print(residency_table(found))
    else:
        print(f"{found.model}: {summary(found)}, drawn into {svg}")


@dataclass(frozen=True, slots=True, eq=False)
class PlannedExperts:
    """A model with experts, and the plan of a run with the same options."""

    options: Options
    shape: "ModelShape"
    plan: "Plan"
    identity: str  # of the checkpoint; "" without one
    counts: "ExpertCounts | None"  # choices of earlier runs, if they are known

    def residency(self) -> "PlannedResidency":
        """Place the experts as an engine with these options would."""
        from headroom.experts.picture import PlannedResidency
        from headroom.experts.placement import ExpertPlacement
        from headroom.split.placing import find_placement

        shape, plan = self.shape, self.plan
        placement = find_placement(shape, plan, self.options, self.identity, self.counts)
        layers = [layer.experts for layer in shape.layers]
        return PlannedResidency(
            model=plan.model,
            device=plan.devices[0].name,
            counts=self.counts or tuple((0.0,) * experts for experts in layers),
            placement=placement or ExpertPlacement(tuple(tuple(range(x)) for x in layers), "all"),
        )


def plan_experts(options: Options) -> PlannedExperts:
    """Plan a model with experts as an engine with these options would."""
    # torch takes seconds to import; --help must not wait for it.
    from headroom.plan.describe import describe
    from headroom.plan.sources import find_shape
    from headroom.split.choice import make_trial_plan
    from headroom.split.expert_records import read_records

    counts, identity = None, ""
    if (checkpoint := find_checkpoint(options)) is not None:
        model = describe(checkpoint)
        shape, identity = model.shape, checkpoint.identity
        if shape.total_experts:
            counts = read_records(checkpoint, shape, options, measuring=True).file.counts
    else:
        shape = find_shape(options.model, options.home_path)
        options = without_files(options)
    if not shape.total_experts:
        raise ModelError(
            f"{checkpoint.path if checkpoint else shape.name} has no routed experts.",
            hint="Of a dense model, headroom plan shows what goes where.",
        )
    return PlannedExperts(options, shape, make_trial_plan(shape, options), identity, counts)


def find_checkpoint(options: Options) -> "Checkpoint | None":
    """Return the model's files; None if MODEL is a built-in name, a config.json or a URL."""
    from headroom.families.files import open_checkpoint

    try:
        return open_checkpoint(ready_model(options))
    except FormatError:
        if is_default(options.model):
            raise
        return None  # the planner's reader finds it, or refuses it


def without_files(options: Options) -> Options:
    """Return the options without placement and statistics; warn that they are not read."""
    names = [x for x in (options.placement, options.routing_stats) if x not in (None, OFF)]
    if names:
        files = " and ".join(map(str, names))
        log.warning("experts: not read, since there are no weights to compare with: %s", files)
    return replace(options, placement=None, routing_stats=OFF)


def draw(found: "PlannedResidency", path: Path) -> None:
    """Draw the heat map into a file."""
    from headroom.experts.picture import experts_svg

    try:
        replace_text(path, experts_svg(found))
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.", param="svg") from error


def summary(found: "PlannedResidency") -> str:
    """Return the main figures in one line."""
    total = sum(map(len, found.counts))
    text = f"{found.placement.total} of {total} experts hot"
    if (rate := found.total_hit_rate) is not None:
        return f"{text}, {100 * rate:.1f} % of choices"
    return f"{text}, no statistics"


def residency_json(found: "PlannedResidency") -> dict[str, Any]:
    """Return all layers with experts as plain data."""
    return {
        "model": found.model,
        "device": found.device,
        "source": found.placement.source,
        "hit_rate": found.total_hit_rate,
        "layers": [
            {
                "layer": layer,
                "experts": len(row),
                "choices": sum(row),
                "hit_rate": found.hit_rate(layer),
                "hot": list(found.placement.hot[layer]),
                "counts": list(row),
            }
            for layer, row in enumerate(found.counts)
            if row
        ],
    }


def residency_table(found: "PlannedResidency") -> Table:
    """Return one line for each layer with experts."""
    from headroom.experts.placement import SHARES, measure_skew

    heads = [f"top {100 * share:.0f} % take" for share in SHARES]
    title = f"{found.model} on {found.device}: {summary(found)}"
    table = Table("layer", "experts", "hot", "choices", "hit rate", *heads, title=title)
    skews = {skew.layer: skew.top for skew in measure_skew(found.counts)}
    for layer, row in enumerate(found.counts):
        if row:
            cells = [_percent(share) for share in skews.get(layer, (None,) * len(SHARES))]
            table.add_row(
                str(layer),
                str(len(row)),
                str(len(found.placement.hot[layer])),
                f"{sum(row):.0f}",
                _percent(found.hit_rate(layer)),
                *cells,
            )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


add_flags(experts, PolicyFlags)
experts = with_settings("model", "engine", "plan", "program", log_level="warning")(experts)
