"""experts_svg(): a heat map of how often experts are chosen, and which of them are hot."""

from collections.abc import Sequence
from html import escape

from headroom.experts.placement import ExpertCounts, ExpertPlacement

WIDTH, MARGIN, LABEL, ROW = 1200, 20, 60, 12  # pixels
HOT, COLD = (200, 60, 20), (40, 90, 180)  # RGB colour of the most chosen expert
PALE = 245  # grey towards which seldom chosen experts fade


def experts_svg(title: str, counts: ExpertCounts, placement: ExpertPlacement) -> str:
    """Return an SVG with one row for each layer and one box for each expert.

    The more often an expert is chosen the deeper its colour; hot ones are red, cold ones blue.
    Experts stand in the order of their ids, so that two pictures can be compared.
    """
    rows = [(layer, row) for layer, row in enumerate(counts) if len(row)]
    most = max((len(row) for _, row in rows), default=1)
    cell = (WIDTH - 2 * MARGIN - LABEL) / most
    height = 2 * MARGIN + ROW * (len(rows) + 4)
    body = [_text(MARGIN, MARGIN, title, ' font-weight="bold"'), *_legend(placement, counts)]
    top = MARGIN + 3 * ROW
    for number, (layer, row) in enumerate(rows):
        y = top + ROW * number
        body.append(_text(MARGIN, y + ROW - 3, f"layer {layer}"))
        body += _row(layer, row, set(placement.hot[layer]), y, cell)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="10">\n'
        f"<title>{escape(title)}</title>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _legend(placement: ExpertPlacement, counts: ExpertCounts) -> list[str]:
    total = sum(len(row) for row in counts)
    words = (
        f"red: hot, {placement.total} of {total} experts ({placement.source}); blue: cold, "
        f"{total - placement.total}; the deeper, the more often chosen in its layer"
    )
    return [_text(MARGIN, MARGIN + ROW + 2, words)]


def _row(layer: int, counts: Sequence[float], hot: set[int], top: int, cell: float) -> list[str]:
    peak, total = max(counts), sum(counts)
    boxes = []
    for expert, count in enumerate(counts):
        # Square roots keep seldom chosen experts visible beside the few that are always chosen.
        depth = (count / peak) ** 0.5 if peak else 0.0
        share = 100 * count / total if total else 0.0
        word = "hot" if expert in hot else "cold"
        boxes.append(
            f'<rect class="{word}" x="{MARGIN + LABEL + expert * cell:.2f}" y="{top}" '
            f'width="{cell:.2f}" height="{ROW - 1}" fill="{_colour(depth, word)}">'
            f"<title>layer {layer}, expert {expert}: {count:.0f} choices, {share:.2f} %, {word}"
            "</title></rect>"
        )
    return boxes


def _colour(depth: float, word: str) -> str:
    deepest = HOT if word == "hot" else COLD
    # Experts that were never chosen keep a tint, so that residency shows without statistics, too.
    depth = 0.12 + 0.88 * depth
    parts = (round(PALE + (part - PALE) * depth) for part in deepest)
    return "#" + "".join(f"{part:02x}" for part in parts)


def _text(x: int, y: int, words: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{more}>{escape(words)}</text>'
