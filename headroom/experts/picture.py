"""experts_svg(): a heat map of how often experts are chosen, and which of them are hot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from headroom.experts.placement import ExpertCounts, ExpertPlacement
from headroom.plan.show.picture import Figure, draw_figures, draw_heading
from headroom.plan.show.svg import MARGIN, Drawing, Style

WIDTH, LABEL, RATES, ROW = 1200, 40, 150, 14  # pixels; RATES: room for the hit rates
MAP = WIDTH - 2 * MARGIN - LABEL - RATES
HOT, COLD = "#c8441c", "#2f66b8"
FAINTEST = 0.08  # opacity of an expert that was never chosen
UNCOUNTED = 0.55  # opacity of all experts without statistics
SCALE, SCALE_STEPS = 240, 40  # pixels and boxes of a colour scale
DEEPEST = 8  # times the even share: experts that are chosen as often or more have full colour
MARKS = {0: "0", 1: "1", 2: "2", 4: "4", DEEPEST: f"{DEEPEST} and more"}
SOURCE_NOTES = {
    "all": "no expert is cold",
    "even": "without statistics",
    "statistics": "by counted choices",
}
SMALL, SMALL_END = Style(11, role="soft"), Style(11, role="soft", anchor="end")


@dataclass(frozen=True, slots=True)
class PlannedResidency:
    """The experts of a planned model: how often each was chosen, and which are hot."""

    model: str
    device: str
    counts: ExpertCounts  # choices by layer and expert
    placement: ExpertPlacement  # which experts are hot

    @property
    def total(self) -> int:
        """Routed experts of all layers."""
        return sum(len(row) for row in self.counts)

    @property
    def choices(self) -> float:
        """All choices that were counted."""
        return sum(map(sum, self.counts))

    def hit_rate(self, layer: int) -> float | None:
        """Return the share of a layer's choices that would be hot; None without choices."""
        row = self.counts[layer]
        total = sum(row)
        return sum(row[expert] for expert in self.placement.hot[layer]) / total if total else None

    @property
    def total_hit_rate(self) -> float | None:
        """The share of all choices that would be hot; None without choices."""
        layers = range(len(self.counts))
        hot = sum((self.hit_rate(layer) or 0.0) * sum(self.counts[layer]) for layer in layers)
        return hot / self.choices if self.choices else None

    @property
    def peak(self) -> float:
        """How many times the even share the most chosen expert of any layer has."""
        return max((max(row) * len(row) / sum(row) for row in self.counts if sum(row)), default=0.0)


def experts_svg(use: PlannedResidency) -> str:
    """Return an SVG with one row for each layer and one box for each expert.

    The more often an expert is chosen the deeper its colour, by one scale for all pictures. Experts
    stand in the order of their ids, so that two pictures can be compared.
    """
    drawing = Drawing(WIDTH, f"{use.model} on {use.device}: routed experts")
    below = f"routed experts on {use.device}: which are chosen, and which are hot"
    y = draw_heading(drawing, use.model, below)
    y = draw_figures(drawing, _figures(use), y)
    y = _draw_scales(drawing, use, y + 34)
    rows = [(layer, row) for layer, row in enumerate(use.counts) if row]
    if not rows:
        return drawing.finish(y + MARGIN)
    most = max(len(row) for _, row in rows)
    cell, left, top = MAP / most, MARGIN + LABEL, y + 34
    drawing.text(left - 8, top - 8, "layer", SMALL_END)
    for expert in range(0, most, _step(most)):
        drawing.text(left + expert * cell, top - 8, str(expert), SMALL)
    drawing.text(left + MAP + 50, top - 8, "hot", SMALL_END)
    if use.choices:
        drawing.text(left + MAP + RATES, top - 8, "hit rate", SMALL_END)
    for index, (layer, row) in enumerate(rows):
        y = top + ROW * index
        drawing.text(left - 8, y + ROW - 3.5, str(layer), SMALL_END)
        _draw_row(drawing, use, layer, row, y, cell)
        _draw_rate(drawing, use, layer, left + MAP, y)
    return drawing.finish(top + ROW * len(rows) + MARGIN)


def _step(most: int) -> int:
    """Return a power of two: from one number above the map to the next."""
    step = 1
    while most / step > 16:
        step *= 2
    return step


def _figures(use: PlannedResidency) -> Iterator[Figure]:
    hot = use.placement.total
    share = f"{100 * hot / use.total:.1f} %" if use.total else "-"
    yield Figure("hot experts", share, f"{hot:,} of {use.total:,}")
    source = use.placement.source
    known = source in SOURCE_NOTES
    yield Figure("placement", source if known else "file", SOURCE_NOTES.get(source, source))
    rate = use.total_hit_rate
    if rate is None:
        yield Figure("choices counted", "none", "no routing statistics")
        return
    yield Figure("hit rate", f"{100 * rate:.1f} %", "of choices are hot")
    yield Figure("choices counted", f"{use.choices:,.0f}", "by the routing statistics")
    yield Figure("most chosen expert", f"{use.peak:.1f} x", "the even share of its layer")


def _opacity(use: PlannedResidency, ratio: float) -> float:
    """Return how deep the colour is of an expert with `ratio` times the even share.

    Square roots keep seldom chosen experts visible beside the few that are always chosen.
    """
    if not use.choices:
        return UNCOUNTED
    return FAINTEST + (1 - FAINTEST) * sqrt(min(1.0, ratio / DEEPEST))


def _draw_scales(drawing: Drawing, use: PlannedResidency, top: float) -> float:
    """Draw what the colours mean, in numbers; return where the scales end."""
    hot, cold = use.placement.total, use.total - use.placement.total
    legend = ((f"hot, {hot:,}", HOT), (f"cold, {cold:,}", COLD))
    for index, (words, colour) in enumerate(legend):
        left = MARGIN + index * 500
        drawing.text(left, top + 10, words, Style(12, bold=True))
        left += 130
        if not use.choices:
            drawing.box(left, top, 14, 14, fill=colour, opacity=UNCOUNTED)
            continue
        for step in range(SCALE_STEPS):
            ratio = DEEPEST * ((step + 0.5) / SCALE_STEPS) ** 2
            x, wide = left + SCALE * step / SCALE_STEPS, SCALE / SCALE_STEPS
            drawing.box(x, top, wide, 14, fill=colour, opacity=_opacity(use, ratio))
        for mark, name in MARKS.items():
            x = left + SCALE * sqrt(mark / DEEPEST)
            drawing.rule(x, top + 14, x, top + 18)
            drawing.text(x, top + 29, name, Style(11, role="soft", anchor="middle"))
    if not use.choices:
        return top + 14
    words = "times as often as if all experts of a layer were chosen equally often"
    drawing.text(MARGIN, top + 50, words, SMALL)
    return top + 50


def _draw_row(
    drawing: Drawing,
    use: PlannedResidency,
    layer: int,
    row: Sequence[float],
    top: float,
    cell: float,
) -> None:
    total, hot = sum(row), set(use.placement.hot[layer])
    for expert, count in enumerate(row):
        share = count / total if total else 0.0
        word = "hot" if expert in hot else "cold"
        told = f"{count:.0f} choices, {100 * share:.2f} %, {word}"
        drawing.box(
            MARGIN + LABEL + expert * cell,
            top,
            cell,
            ROW - 1,
            fill=HOT if word == "hot" else COLD,
            opacity=_opacity(use, share * len(row)),
            data=f'data-expert="{word}"',
            hover=f"layer {layer}, expert {expert}: {told}",
        )


def _draw_rate(
    drawing: Drawing, use: PlannedResidency, layer: int, left: float, top: float
) -> None:
    """Write how many experts of a layer are hot, and draw their share of its choices."""
    drawing.text(left + 50, top + ROW - 3.5, str(len(use.placement.hot[layer])), SMALL_END)
    rate = use.hit_rate(layer)
    if rate is None:
        return
    drawing.box(left + 60, top + 2, 45, ROW - 5, role="panel")
    drawing.box(left + 60, top + 2, 45 * rate, ROW - 5, fill=HOT)
    drawing.text(left + RATES, top + ROW - 3.5, f"{100 * rate:.1f} %", SMALL_END)
