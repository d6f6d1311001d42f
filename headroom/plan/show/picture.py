"""A plan as a picture in SVG: its figures, a stacked bar and a legend for each memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from headroom.plan.layout import DevicePlan, HostPlan
from headroom.plan.lines import Line
from headroom.plan.plan import Plan
from headroom.plan.show.palette import line_looks
from headroom.plan.show.svg import (
    MARGIN,
    Drawing,
    Style,
    ink_on,
    shortened,
    text_width,
    ticks,
    wrapped,
)
from headroom.units import GIB, gib

WIDTH, ROOM = 960, 960 - 2 * MARGIN  # pixels: of the picture, and of a bar
BAR_HEIGHT, TILE_HEIGHT, GAP = 40, 74, 10
LABELLED_HEIGHT = 20  # least height of a bar with names in it
TITLE, HEADING = Style(24, bold=True), Style(15, bold=True)
BODY, SMALL, FIGURE_SIZE = Style(13), Style(12, role="soft"), 20
NAMES, SIZES, REASONS = MARGIN + 20, MARGIN + 232, MARGIN + 250  # columns of a legend


@dataclass(frozen=True, slots=True)
class Memory:
    """One memory of a plan as it is drawn: a device, or the host behind the devices."""

    name: str
    facts: str  # behind the name
    total_bytes: int
    lines: tuple[Line, ...]

    @property
    def free_bytes(self) -> int:
        """Bytes that no line takes; negative if the lines do not fit."""
        return self.total_bytes - sum(line.bytes for line in self.lines)

    @property
    def drawn_bytes(self) -> int:
        """What a bar stands for: the whole memory, or the lines if they take more."""
        return max(self.total_bytes, self.total_bytes - self.free_bytes, 1)

    @property
    def rest(self) -> str:
        """What is free, or missing."""
        word = "free" if self.free_bytes >= 0 else "missing"
        return f"{gib(abs(self.free_bytes))} {word}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure above the bars, with what it is and what holds for it."""

    label: str
    value: str
    below: str
    role: str = "ink"


def plan_svg(plan: Plan) -> str:
    """Return the plan as an SVG document."""
    title = f"{plan.model}: {verdict(plan)}"
    drawing = Drawing(WIDTH, title)
    role = "good" if plan.fits else "alarm"
    y = draw_heading(drawing, plan.model, where(plan), verdict(plan), role)
    y = draw_figures(drawing, figures(plan), y)
    for memory in memories(plan):
        y = _draw_memory(drawing, memory, y + 36)
    return drawing.finish(_draw_notes(drawing, plan, y + 14) + MARGIN - 12)


def memories(plan: Plan) -> list[Memory]:
    """Return every memory that a plan uses."""
    found = [_device(device) for device in plan.devices]
    return [*found, _host(plan.host)] if plan.host.lines else found


def _device(device: DevicePlan) -> Memory:
    facts = device.layers.words
    if not _named_by_size(device):
        facts = f"{gib(device.total_bytes)}, {facts}"
    if device.total_experts:
        facts += f", {device.hot_experts} of {device.total_experts} experts hot"
    return Memory(device.name, facts, device.total_bytes, device.lines)


def _named_by_size(device: DevicePlan) -> bool:
    """Return whether a device's name is its size, as of one that was given as 24GiB."""
    return device.name.partition("#")[0] == gib(device.total_bytes).replace(" ", "")


def _host(host: HostPlan) -> Memory:
    return Memory("host memory", gib(host.total_bytes), host.total_bytes, host.lines)


def verdict(plan: Plan) -> str:
    """Return whether the plan fits or, if not, how much is missing."""
    return "fits" if plan.fits else f"does not fit: {gib(plan.missing_bytes)} missing"


def where(plan: Plan) -> str:
    """Return the devices of a plan in one text, and its draft if it has one."""
    names = " + ".join(
        device.name if _named_by_size(device) else f"{device.name} ({gib(device.total_bytes)})"
        for device in plan.devices
    )
    behind = f", with {gib(plan.host.total_bytes)} of host memory" if plan.host.lines else ""
    draft = plan.problem.request.draft
    return f"on {names}{behind}" + (f", drafted by {draft.name}" if draft else "")


def figures(plan: Plan) -> Iterator[Figure]:
    """Yield the figures that people ask for first."""
    settings, predicted = plan.settings, plan.predicted
    together = "one conversation" if settings.parallel == 1 else f"{settings.parallel} at a time"
    yield Figure("context, tokens", f"{settings.context:,}", together)
    if plan.fits:
        how = "estimated" if predicted.estimate else "by measured speeds"
        decode, prefill = predicted.decode_tokens_per_s, predicted.prefill_tokens_per_s
        yield Figure("decode, tokens/s", f"{decode:,.1f}", how)
        yield Figure("prompts, tokens/s", f"{prefill:,.0f}", f"chunks of {settings.chunk:,}")
    total = sum(device.total_experts for device in plan.devices)
    if total:
        hot = sum(device.hot_experts for device in plan.devices)
        yield Figure("hot experts", f"{100 * hot / total:.0f} %", f"{hot:,} of {total:,}")
    worst = min(memories(plan), key=lambda memory: memory.free_bytes)
    if worst.free_bytes < 0:
        taken = worst.total_bytes - worst.free_bytes
        yield Figure("needed", gib(taken), f"of {worst.name}")
        yield Figure("missing", gib(-worst.free_bytes), f"of {worst.name}", "alarm")
    else:
        devices = memories(plan)[: len(plan.devices)]
        free = sum(device.free_bytes for device in devices)
        whole = gib(sum(device.total_bytes for device in devices))
        where = " in all" if len(devices) > 1 else ""
        yield Figure("free", gib(free), f"of {whole}{where}")


def draw_heading(
    drawing: Drawing, title: str, below: str, told: str = "", role: str = "good"
) -> float:
    """Write title and subtitle, with the verdict to the right; return where they end."""
    pill = Style(15, bold=True, anchor="middle", role=role)
    wide = text_width(told, pill) + 28 if told else 0.0
    right, y = drawing.width - MARGIN, MARGIN + 20.0
    if told:
        drawing.box(right - wide, y - 21, wide, 30, role="panel", radius=15)
        drawing.text(right - wide / 2, y - 1, told, pill)
    for line in wrapped(title, right - MARGIN - wide - 16, TITLE):
        drawing.text(MARGIN, y, line, TITLE)
        y += 30
    return drawing.paragraph(MARGIN, y - 6, below, right - MARGIN, Style(14, role="soft"))


def draw_figures(drawing: Drawing, shown: Iterator[Figure], top: float) -> float:
    """Draw a tile for each figure; return where they end."""
    tiles = list(shown)
    width = (drawing.width - 2 * MARGIN - GAP * (len(tiles) - 1)) / len(tiles)
    for index, figure in enumerate(tiles):
        left, room = MARGIN + index * (width + GAP), width - 24
        drawing.box(left, top, width, TILE_HEIGHT, role="panel", radius=8)
        value = Style(FIGURE_SIZE, bold=True, role=figure.role)
        drawing.text(left + 12, top + 20, figure.label, SMALL)
        drawing.text(left + 12, top + 43, shortened(figure.value, room, value), value)
        drawing.text(left + 12, top + 62, shortened(figure.below, room, SMALL), SMALL)
    return top + TILE_HEIGHT


def draw_bar(
    drawing: Drawing, memory: Memory, left: float, top: float, scale: float, height: float
) -> None:
    """Draw a memory's stacked bar; `scale` is pixels per byte."""
    looks = line_looks([line.name for line in memory.lines])
    width = memory.drawn_bytes * scale
    free = max(memory.free_bytes, 0)
    data = f'data-bytes="{free}" data-line="free"'
    drawing.box(left, top, width, height, role="panel", data=data, hover=memory.rest)
    reached = 0
    for line in memory.lines:
        x, size = left + reached * scale, line.bytes * scale
        look = looks[line.name]
        data = f'data-bytes="{line.bytes}" data-line="{line.name}"'
        hover = f"{look.title}, {gib(line.bytes)}: {line.why}"
        drawing.box(x, top, size, height, fill=look.fill, data=data, hover=hover)
        label = Style(12, bold=True)
        if height >= LABELLED_HEIGHT and text_width(look.title, label) < size - 12:
            drawing.text(x + 6, top + height / 2 + 4.5, look.title, label, fill=ink_on(look.fill))
        reached += line.bytes
    if memory.free_bytes < 0:
        end = left + memory.total_bytes * scale
        drawing.hatch(end, top, width - memory.total_bytes * scale, height)
        drawing.box(end - 1.5, top - 4, 3, height + 8, role="alarm")


def draw_scale(
    drawing: Drawing, left: float, top: float, most_bytes: int, scale: float, count: int = 8
) -> None:
    """Write round numbers of GiB below a bar of `most_bytes`; `scale` is pixels per byte."""
    unit, word = (GIB, "GiB") if most_bytes >= GIB else (1 << 20, "MiB")
    places = ticks(most_bytes / unit, count)
    for value in places:
        x = left + value * unit * scale
        drawing.rule(x, top, x, top + 4)
        name = f"{value:g} {word}" if value == places[-1] else f"{value:g}"
        anchor = "start" if value == 0 else "end" if x > WIDTH - MARGIN - 20 else "middle"
        drawing.text(x, top + 16, name, Style(11, role="soft", anchor=anchor))


def _draw_memory(drawing: Drawing, memory: Memory, top: float) -> float:
    """Draw one memory: heading, bar, scale and legend; return where it ends."""
    rest = Style(13, bold=True, anchor="end", role="ink" if memory.free_bytes >= 0 else "alarm")
    room = ROOM - text_width(memory.rest, rest) - 16
    heading = shortened(memory.name, room / 2, HEADING)
    drawing.text(MARGIN, top, heading, HEADING)
    behind = MARGIN + text_width(heading, HEADING) + 10
    drawing.text(behind, top, shortened(memory.facts, MARGIN + room - behind, BODY), SMALL)
    drawing.text(WIDTH - MARGIN, top, memory.rest, rest)
    scale, bar_top = ROOM / memory.drawn_bytes, top + 12
    draw_bar(drawing, memory, MARGIN, bar_top, scale, BAR_HEIGHT)
    draw_scale(drawing, MARGIN, bar_top + BAR_HEIGHT + 4, memory.drawn_bytes, scale)
    y = bar_top + BAR_HEIGHT + 46
    looks = line_looks([line.name for line in memory.lines])
    for line in (line for line in memory.lines if line.bytes):
        look = looks[line.name]
        drawing.box(MARGIN, y - 10, 12, 12, fill=look.fill, radius=2)
        drawing.text(NAMES, y, look.title, BODY)
        drawing.text(SIZES, y, gib(line.bytes), Style(13, bold=True, anchor="end"))
        y = drawing.paragraph(REASONS, y, line.why, WIDTH - MARGIN - REASONS, SMALL) + 5
    return y - 5


def _draw_notes(drawing: Drawing, plan: Plan, top: float) -> float:
    """Write what no line says; return where it ends."""
    settings = plan.settings
    told = [
        f"weights {settings.weights}, computed in {settings.compute_type}; cached keys "
        f"{settings.k_type}, values {settings.v_type}"
        + (f"; bound by {plan.predicted.bound_by}" if plan.fits else ""),
        *(f"lossy: {choice}" for choice in plan.lossy),
        *plan.notes,
    ]
    drawing.rule(MARGIN, top, WIDTH - MARGIN, top)
    y = top + 20.0
    for words in told:
        y = drawing.paragraph(MARGIN, y, words, ROOM, SMALL) + 2
    return y
