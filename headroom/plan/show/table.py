"""A plan as a table with a memory map, for a terminal or as plain text."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headroom.machine.precision import device_precision
from headroom.options import EXACT_TYPE
from headroom.plan.layout import DevicePlan, HostPlan
from headroom.plan.plan import Plan
from headroom.plan.show.palette import FREE_LETTER, line_looks
from headroom.units import counted, gib

if TYPE_CHECKING:
    from headroom.plan.repository import OfferedPlan  # imports readers of files

BAR_WIDTH = 60  # columns of a memory map
OVER = "|"  # in a map: what is to the right of it is missing


def plan_text(plan: Plan, width: int = 120) -> str:
    """Return the plan as plain text without colours, for pipes and logs."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, legacy_windows=False).print(plan_table(plan))
    return "\n".join(row.rstrip() for row in out.getvalue().splitlines()) + "\n"


def plan_table(plan: Plan) -> RenderableType:
    """Return the plan for a rich console: a table and a memory map for each device."""
    parts: list[RenderableType] = [Text(_headline(plan), style="bold")]
    for device in plan.devices:
        parts += [_table(_title(device), device), _map(device)]
    if plan.host.lines:
        title = f"host memory, {gib(plan.host.total_bytes)}"
        parts += [_table(title, plan.host), _map(plan.host)]
    parts += [Text(row) for row in _footer(plan)]
    return Group(*parts)


def compare_table(plans: Mapping[str, Plan]) -> Table:
    """Return several plans side by side; a line counts all devices and the host together."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for label in plans:
        table.add_column(label, justify="right", overflow="fold")
    made = list(plans.values())
    for word in ("context", "parallel", "chunk", "cache_tokens"):
        table.add_row(word, *(str(getattr(plan.settings, word)) for plan in made))
    totals = [_line_totals(plan) for plan in made]
    for name in dict.fromkeys(name for total in totals for name in total):
        table.add_row(name, *(gib(total[name]) if name in total else "-" for total in totals))
    table.add_row("hot experts", *(_hot_share(plan) for plan in made))
    table.add_row("fits", *("yes" if plan.fits else "no" for plan in made))
    if not all(plan.fits for plan in made):
        table.add_row("missing", *("-" if x.fits else gib(x.missing_bytes) for x in made))
    speeds = (f"{x.predicted.decode_tokens_per_s:.1f}" if x.fits else "-" for x in made)
    table.add_row("decode tokens/s", *speeds)
    return table


def offered_table(found: "Sequence[OfferedPlan]") -> Table:
    """Return one row for each model that a repository offers."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for head in ("size", "fits", "free", "context", "hot experts", "decode tok/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in found:
        cells = ["cannot run", "-", "-", "-", "-"]
        if (plan := one.plan) is not None:
            free = min(device.free_bytes for device in plan.devices)
            cells = [
                "yes" if plan.fits else "no",
                gib(free) if plan.fits else "-",
                f"{plan.settings.context:,}",
                _hot_share(plan),
                f"{plan.predicted.decode_tokens_per_s:.1f}" if plan.fits else "-",
            ]
        table.add_row(one.offered.quant, gib(one.offered.size_bytes), *cells)
    return table


def _line_totals(plan: Plan) -> dict[str, int]:
    totals: dict[str, int] = {}
    for line in (*(line for device in plan.devices for line in device.lines), *plan.host.lines):
        totals[line.name] = totals.get(line.name, 0) + line.bytes
    return totals


def _hot_share(plan: Plan) -> str:
    total = sum(device.total_experts for device in plan.devices)
    hot = sum(device.hot_experts for device in plan.devices)
    return f"{hot} of {total}" if total else "-"


def _headline(plan: Plan) -> str:
    settings = plan.settings
    verdict = "fits" if plan.fits else f"does not fit, {gib(plan.missing_bytes)} are missing"
    types = "; ".join(
        dict.fromkeys(
            f"keys {device.settings.k_type}, values {device.settings.v_type}"
            for device in plan.devices
        )
    )
    return (
        f"{plan.model} {verdict}: context {settings.context}, parallel {settings.parallel}, "
        f"chunk {settings.chunk}, cache of {settings.cache_tokens} tokens ({types})"
    )


def _title(device: DevicePlan) -> str:
    title = f"{device.name}, {gib(device.total_bytes)}: {device.layers.words}"
    if device.total_experts:
        title += f", {device.hot_experts} of {device.total_experts} experts hot"
    return title


def _table(title: str, place: DevicePlan | HostPlan) -> Table:
    """Return the lines of one memory; the first column is the legend of its map."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column("letter", no_wrap=True)
    table.add_column("line", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    looks = line_looks([line.name for line in place.lines])
    for line in place.lines:
        look = looks[line.name]
        table.add_row(
            Text(look.letter, style=look.terminal),
            Text(line.name, style=look.terminal),
            gib(line.bytes),
            Text(line.why, style="dim"),
        )
    free = place.free_bytes
    letter, word, style = (FREE_LETTER, "free", "bold")
    if free < 0:
        letter, word, style = (OVER, "missing", "bold red")
    size = Text(gib(abs(free)), style=style)
    table.add_row(Text(letter, style=style), Text(word, style=style), size, "")
    return table


def _map(place: DevicePlan | HostPlan) -> Text:
    """Return one bar in which every line has its share of the memory.

    If the lines do not fit, they fill the bar, and a mark shows where the memory ends.
    """
    whole = max(place.total_bytes, sum(line.bytes for line in place.lines), 1)
    looks = line_looks([line.name for line in place.lines])
    bar, reached = Text(), 0
    for line in place.lines:
        reached += line.bytes
        columns = reached * BAR_WIDTH // whole - len(bar)
        bar.append(looks[line.name].letter * columns, style=looks[line.name].terminal)
    bar.append(FREE_LETTER * (BAR_WIDTH - len(bar)))
    if place.free_bytes < 0:
        end = place.total_bytes * BAR_WIDTH // whole
        bar = bar[:end] + Text(OVER, style="bold red") + bar[end:]
    return Text("[") + bar + Text("]")


def _computed_in(plan: Plan) -> Iterable[str]:
    """Yield the type that each device computes in, and why."""
    for kind, device in zip(plan.problem.kinds, plan.devices, strict=True):
        policy, computed = device_precision(kind.device), device.settings.compute_type
        if plan.problem.options.dtype is not None:
            why = "set by --dtype"
        else:
            why = "as exact as f32, and faster" if computed == EXACT_TYPE else policy.explained
        yield f"{computed} ({why})"


def _footer(plan: Plan) -> Iterable[str]:
    settings, predicted = plan.settings, plan.predicted
    word = "estimated" if predicted.estimate else "measured speeds"
    computed = " and ".join(dict.fromkeys(_computed_in(plan)))
    handed = f", rows handed over in {settings.handover_type}" if len(plan.devices) > 1 else ""
    threads = ""
    if plan.known_threads is not None:
        pinned = ", pinned" if settings.pin_threads else ""
        threads = f"; {counted(plan.known_threads, 'thread')}{pinned}"
    yield f"weights {settings.weights}, computed in {computed}{handed}{threads}"
    if plan.fits:
        yield (
            f"{predicted.decode_tokens_per_s:.1f} tokens/s decode, "
            f"{predicted.prefill_tokens_per_s:.0f} tokens/s prefill ({word}), "
            f"bound by {predicted.bound_by}"
        )
    if plan.fits and len(predicted.stages) > 1:
        times = ", ".join(
            f"{1e3 * stage.decode_s:.2f} ms on {stage.device} "
            f"({100 * predicted.decode_share(stage):.0f} %)"
            for stage in predicted.stages
        )
        yield f"a token takes {times}"
    for choice in plan.lossy:
        yield f"lossy: {choice}"
    for note in plan.notes:
        yield f"note: {note}"
