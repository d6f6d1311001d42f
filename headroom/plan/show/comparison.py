"""Plans side by side as a picture in SVG: one row of bars for each plan, on common scales."""

from collections.abc import Mapping

from headroom.plan.plan import Plan
from headroom.plan.show.palette import line_looks
from headroom.plan.show.picture import (
    BODY,
    HEADING,
    ROOM,
    SMALL,
    WIDTH,
    Memory,
    draw_bar,
    draw_heading,
    draw_scale,
    memories,
    verdict,
)
from headroom.plan.show.svg import MARGIN, Drawing, Style, shortened, text_width
from headroom.units import gib

LABELS, FIGURES = 170, 150  # pixels to the left and to the right of the bars
BARS = ROOM - LABELS - FIGURES
BAR_HEIGHT, HOST_HEIGHT, ROW, BETWEEN = 26, 14, 20, 22


def comparison_svg(plans: Mapping[str, Plan]) -> str:
    """Return plans by their labels as one SVG document.

    All devices share one scale, and all hosts another: bars of one kind can be compared.
    """
    models = ", ".join(dict.fromkeys(plan.model for plan in plans.values()))
    fitting = sum(plan.fits for plan in plans.values())
    told = f"{fitting} of {len(plans)} fit"
    drawing = Drawing(WIDTH, f"{models}: {told}")
    most_device = max(x.drawn_bytes for plan in plans.values() for x in _devices(plan))
    most_host = max((x.drawn_bytes for plan in plans.values() for x in _hosts(plan)), default=0)
    below = "plans side by side; every box is a line of a plan, as wide as its bytes"
    role = "good" if fitting == len(plans) else "ink" if fitting else "alarm"
    y = draw_heading(drawing, models, below, told, role)
    y += 12
    for label, plan in plans.items():
        y = _draw_plan(drawing, label, plan, y, most_device, most_host) + BETWEEN
    left, scale = MARGIN + LABELS, BARS / most_device
    drawing.text(left - 12, y + 16, "devices", Style(11, role="soft", anchor="end"))
    draw_scale(drawing, left, y, most_device, scale, 6)
    if most_host:
        y += 26
        drawing.text(left - 12, y + 16, "host memory", Style(11, role="soft", anchor="end"))
        draw_scale(drawing, left, y, most_host, BARS / most_host, 6)
    return drawing.finish(_draw_legend(drawing, plans, y + 48) + MARGIN - 8)


def _devices(plan: Plan) -> list[Memory]:
    return memories(plan)[: len(plan.devices)]


def _hosts(plan: Plan) -> list[Memory]:
    return memories(plan)[len(plan.devices) :]


def _draw_plan(
    drawing: Drawing, label: str, plan: Plan, top: float, most_device: int, most_host: int
) -> float:
    """Draw one plan's bars, what it is called and its figures; return where they end."""
    left, right = MARGIN + LABELS, WIDTH - MARGIN
    room = LABELS - 16
    drawing.rule(MARGIN, top, right, top)
    shown = label.replace("+", " + ")
    if label == str(plan.settings.context):
        shown = f"context {plan.settings.context:,}"
    below = drawing.paragraph(MARGIN, top + 36, shown, room, HEADING)
    if label != str(plan.settings.context):  # as where only devices differ
        context = f"context {plan.settings.context:,}"
        drawing.text(MARGIN, below - 2, shortened(context, room, SMALL), SMALL)
    end = Style(15, bold=True, anchor="end", role="ink" if plan.fits else "alarm")
    small = Style(12, anchor="end", role="soft" if plan.fits else "alarm")
    room = FIGURES - 12
    first, *others = _figures(plan)
    drawing.text(right, top + 36, shortened(first, room, end), end)
    lowest = top + 36.0
    for words in others:
        lowest += 18
        drawing.text(right, lowest, shortened(words, room, small), small)
    y = top + ROW
    for memory in _devices(plan):
        y = _draw_memory(drawing, memory, left, y, BARS / most_device, BAR_HEIGHT)
    for memory in _hosts(plan):
        y = _draw_memory(drawing, memory, left, y, BARS / most_host, HOST_HEIGHT)
    return max(y - 8, below + 6, lowest + 6)


def _figures(plan: Plan) -> list[str]:
    """Return what stands to the right of a plan's bars: its speed and what is free, or missing."""
    if not plan.fits:
        words, _, missing = verdict(plan).partition(": ")
        return [words, missing]
    speed = f"{plan.predicted.decode_tokens_per_s:,.1f} tok/s"
    how = ["estimated"] if plan.predicted.estimate else []
    return [speed, *how, f"{gib(_devices(plan)[0].free_bytes)} free"]


def _draw_memory(
    drawing: Drawing, memory: Memory, left: float, top: float, scale: float, height: float
) -> float:
    name = f"{memory.name}, {memory.facts}"
    drawing.text(left, top, shortened(name, BARS, SMALL), Style(11, role="soft"))
    draw_bar(drawing, memory, left, top + 5, scale, height)
    return top + 5 + height + ROW


def _draw_legend(drawing: Drawing, plans: Mapping[str, Plan], top: float) -> float:
    """Write the names of all lines that are drawn, beside their colours; return where it ends."""
    lines = [line for plan in plans.values() for x in memories(plan) for line in x.lines]
    looks = line_looks([line.name for line in lines if line.bytes])
    x, y = float(MARGIN), top
    for look in looks.values():
        width = 20 + text_width(look.title, BODY) + 18
        if x + width > WIDTH - MARGIN:
            x, y = float(MARGIN), y + ROW
        drawing.box(x, y - 10, 12, 12, fill=look.fill, radius=2)
        drawing.text(x + 20, y, look.title, BODY)
        x += width
    return y
