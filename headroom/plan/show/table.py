"""A plan as a table with a memory map, for a terminal or as plain text."""

import io
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headroom.plan.layout import DevicePlan
from headroom.plan.lines import Line
from headroom.plan.plan import Plan
from headroom.units import counted, gib

BAR_WIDTH = 60  # columns of a memory map
_COLOURS = {
    "core_weights": "blue", "hot_experts": "cyan", "cold_experts": "bright_cyan",
    "expert_staging": "bright_yellow", "expert_spare": "bright_yellow",
    "embeddings": "bright_blue", "head": "bright_blue", "kv": "green",
    "recurrent_state": "bright_green", "verify_scratch": "yellow", "staging": "yellow",
    "workspace": "bright_yellow", "logits": "yellow", "draft_weights": "magenta",
    "draft_kv": "bright_magenta", "feature_ring": "magenta", "graphs": "white",
    "runtime": "white", "reserve": "bright_black", "snapshots": "bright_green",
}  # fmt: skip


def plan_text(plan: Plan, width: int = 120) -> str:
    """Return the plan as plain text without colours, for pipes and logs."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, legacy_windows=False).print(plan_table(plan))
    return "\n".join(row.rstrip() for row in out.getvalue().splitlines()) + "\n"


def plan_table(plan: Plan) -> RenderableType:
    """Return the plan for a rich console: a table and a memory map for each device."""
    parts: list[RenderableType] = [Text(_headline(plan), style="bold")]
    for device in plan.devices:
        parts += [_table(_title(device), device.lines, device.free_bytes), _map(device)]
    if plan.host.lines:
        title = f"host memory, {gib(plan.host.total_bytes)}"
        parts.append(_table(title, plan.host.lines, plan.host.free_bytes))
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
    table.add_row("decode tokens/s", *(f"{x.predicted.decode_tokens_per_s:.1f}" for x in made))
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
    verdict = "fits" if plan.fits else "does not fit"
    return (
        f"{plan.model} {verdict}: context {settings.context}, parallel {settings.parallel}, "
        f"chunk {settings.chunk}, cache of {settings.cache_tokens} tokens "
        f"(keys {settings.k_type}, values {settings.v_type})"
    )


def _title(device: DevicePlan) -> str:
    first, last = device.layers
    title = f"{device.name}, {gib(device.total_bytes)}: layers {first} to {last}"
    if device.total_experts:
        title += f", {device.hot_experts} of {device.total_experts} experts hot"
    return title


def _table(title: str, lines: Sequence[Line], free_bytes: int) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column("line", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for line in lines:
        colour = _COLOURS.get(line.name, "")
        table.add_row(Text(line.name, style=colour), gib(line.bytes), Text(line.why, style="dim"))
    word, style = ("free", "bold") if free_bytes >= 0 else ("missing", "bold red")
    table.add_row(Text(word, style=style), Text(gib(abs(free_bytes)), style=style), "")
    return table


def _map(device: DevicePlan) -> Text:
    """Return one bar in which every line has its share of the device."""
    whole = max(device.total_bytes, sum(line.bytes for line in device.lines), 1)
    bar, drawn, reached = Text("["), 0, 0
    for line in device.lines:
        reached += line.bytes
        columns = reached * BAR_WIDTH // whole - drawn
        bar.append(_letter(line.name) * columns, style=_COLOURS.get(line.name, ""))
        drawn += columns
    bar.append("." * (BAR_WIDTH - drawn))
    return bar.append("]")


def _letter(name: str) -> str:
    """Return the letter of a line in the map, so that it reads without colours as well."""
    return name[0] if name != "runtime" else "x"


def _footer(plan: Plan) -> Iterable[str]:
    settings, predicted = plan.settings, plan.predicted
    word = "estimated" if predicted.estimate else "measured speeds"
    policy = settings.compute_type == plan.precision.type
    why = plan.precision.reason if policy else "set by --dtype"
    handed = f", rows handed over in {settings.handover_type}" if len(plan.devices) > 1 else ""
    threads = ""
    if plan.known_threads is not None:
        pinned = ", pinned" if settings.pin_threads else ""
        threads = f"; {counted(plan.known_threads, 'thread')}{pinned}"
    types = f"weights {settings.weights}, computed in {settings.compute_type} ({why}){handed}"
    yield types + threads
    yield (
        f"{predicted.decode_tokens_per_s:.1f} tokens/s decode, "
        f"{predicted.prefill_tokens_per_s:.0f} tokens/s prefill ({word}), "
        f"bound by {predicted.bound_by}"
    )
    for choice in plan.lossy:
        yield f"lossy: {choice}"
    for note in plan.notes:
        yield f"note: {note}"
