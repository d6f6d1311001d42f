"""A plan as a picture: one stacked bar for each device, in SVG."""

from collections.abc import Iterable, Sequence
from html import escape

from headroom.plan.lines import Line
from headroom.plan.plan import Plan
from headroom.units import gib

WIDTH, BAR_HEIGHT, MARGIN, ROW = 960, 36, 20, 18  # pixels
_COLOURS = {
    "core_weights": "#3b6fb5", "hot_experts": "#2a9d8f", "cold_experts": "#8fd3c8",
    "expert_staging": "#e8c24f", "expert_spare": "#e8c24f",
    "embeddings": "#6fa0dd", "head": "#89b4e8", "kv": "#57a639", "recurrent_state": "#8cc870",
    "verify_scratch": "#c9a227", "staging": "#e0b93c", "workspace": "#f0cf65",
    "logits": "#f6e09a", "draft_weights": "#9d5bb5", "draft_kv": "#b985cc",
    "feature_ring": "#d0aede", "graphs": "#a3a3a3", "runtime": "#8a8a8a", "reserve": "#c8c8c8",
    "snapshots": "#b7dba6",
}  # fmt: skip


def plan_svg(plan: Plan) -> str:
    """Return the plan as an SVG document with a bar and a legend for each device."""
    places = [(device.name, device.total_bytes, device.lines) for device in plan.devices]
    if plan.host.lines:
        places.append(("host memory", plan.host.total_bytes, plan.host.lines))
    body: list[str] = []
    y = MARGIN
    for name, total, lines in places:
        body += _bar(f"{name}, {gib(total)}", total, lines, y)
        y += BAR_HEIGHT + ROW * (len(lines) + 2) + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
        f'viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="13">\n'
        f"<title>{escape(plan.model)}</title>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _bar(title: str, total: int, lines: Sequence[Line], top: int) -> Iterable[str]:
    """Yield one bar and the rows of its legend."""
    whole, room = max(total, sum(line.bytes for line in lines), 1), WIDTH - 2 * MARGIN
    yield f'<text x="{MARGIN}" y="{top + 13}" font-weight="bold">{escape(title)}</text>'
    bar_top, reached = top + ROW, 0
    yield _box(MARGIN, bar_top, room, BAR_HEIGHT, "#f4f4f4", "free")
    for index, line in enumerate(lines):
        left = MARGIN + room * reached / whole
        colour = _COLOURS.get(line.name, "#000000")
        label = f"{line.name} {gib(line.bytes)}: {line.why}"
        yield _box(left, bar_top, room * line.bytes / whole, BAR_HEIGHT, colour, label)
        y = bar_top + BAR_HEIGHT + ROW * (index + 1)
        yield _box(MARGIN, y - 11, 12, 12, colour, line.name)
        yield f'<text x="{MARGIN + 20}" y="{y}">{escape(label)}</text>'
        reached += line.bytes


def _box(left: float, top: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )
