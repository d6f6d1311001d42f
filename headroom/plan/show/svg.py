"""Drawing: boxes and texts of an SVG picture that is readable on light and on dark pages."""

import re
from dataclasses import dataclass
from html import escape
from math import floor, log10

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MARGIN = 32  # pixels around everything
BOLD = 1.08  # how much wider bold letters are

# Colours by role: on a light page, and on a dark one. Programs that know no media queries draw the
# light ones; the card behind everything keeps them readable there, too.
ROLE_COLOURS = {
    "card": ("#ffffff", "#12171f"),
    "panel": ("#f2f4f8", "#1d2530"),
    "rule": ("#cfd6e0", "#3a4554"),
    "ink": ("#1b2430", "#e9edf3"),
    "soft": ("#566273", "#a6b1c0"),
    "good": ("#1d7a3a", "#6fd08a"),
    "alarm": ("#bf2f24", "#ff8a7d"),
}

_WORDS = re.compile(r"[\d.,]+ [KMGT]?i?B\b\S*|\S+")

# Widths of characters in ems, those of a wide sans-serif font.
_NARROW, _SLIM, _WIDE = frozenset("iljI.,:;'|!"), frozenset('frt()[]{}/ -"*'), frozenset("mwMW@%")


@dataclass(frozen=True, slots=True)
class Style:
    """How a text is written."""

    size: float = 13  # pixels
    bold: bool = False
    role: str = "ink"
    anchor: str = "start"  # or "middle" or "end"


PLAIN_STYLE = Style()


def text_width(words: str, style: Style = PLAIN_STYLE) -> float:
    """Return about how many pixels a text takes; hardly any font is wider."""
    ems = sum(_ems(character) for character in words)
    return ems * style.size * (BOLD if style.bold else 1.0)


def _ems(character: str) -> float:
    if character in _NARROW:
        return 0.34
    if character in _SLIM:
        return 0.4
    if character in _WIDE:
        return 1.02
    if character.isupper() or character == "&":
        return 0.78
    return 0.62 if ord(character) < 0x1100 else 1.05  # later letters may be as wide as high


def wrapped(words: str, room: float, style: Style = PLAIN_STYLE) -> list[str]:
    """Return a text in lines that are at most `room` pixels wide; long words are cut.

    A size and its unit count as one word.
    """
    lines = [""]
    for word in _WORDS.findall(words):
        joined = f"{lines[-1]} {word}".strip()
        if text_width(joined, style) <= room:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for character in word:
            if lines[-1] and text_width(lines[-1] + character, style) > room:
                lines.append("")
            lines[-1] += character
    return lines


def shortened(words: str, room: float, style: Style = PLAIN_STYLE) -> str:
    """Return a text that is at most `room` pixels wide: whole, or its beginning and a mark."""
    if text_width(words, style) <= room:
        return words
    while words and text_width(words + "…", style) > room:
        words = words[:-1].rstrip()
    return words + "…" if words else ""


def ticks(most: float, count: int) -> list[float]:
    """Return round numbers from 0 to `most`, about `count` of them."""
    if most <= 0:
        return [0.0]
    rough = most / count
    power = 10.0 ** floor(log10(rough))
    step = next(x * power for x in (1, 2, 5, 10) if x * power >= rough * 0.999)
    return [index * step for index in range(int(most / step + 1e-9) + 1)]


class Drawing:
    """Collects the elements of a picture from top to bottom."""

    def __init__(self, width: int, title: str) -> None:
        self.width = width
        self._title = title
        self._body: list[str] = []

    def box(
        self,
        left: float,
        top: float,
        width: float,
        height: float,
        *,
        fill: str = "",
        role: str = "",
        radius: float = 0,
        opacity: float = 1.0,
        data: str = "",
        hover: str = "",
    ) -> None:
        """Draw a filled box: in a colour of its own, or in that of a role.

        `data` are further attributes, `hover` is the text under the pointer.
        """
        paint = f'fill="{fill}"' if fill else f'class="{role}" fill="{ROLE_COLOURS[role][0]}"'
        rounded = f' rx="{radius:g}"' if radius else ""
        if opacity < 1:
            paint += f' fill-opacity="{opacity:.3f}"'
        more = f" {data}" if data else ""
        place = f'x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{height:g}"'
        inside = f"><title>{escape(hover)}</title></rect>" if hover else "/>"
        self._body.append(f"<rect {place}{rounded} {paint}{more}{inside}")

    def rule(
        self, left: float, top: float, right: float, bottom: float, role: str = "rule"
    ) -> None:
        """Draw a thin line."""
        place = f'x1="{left:.2f}" y1="{top:g}" x2="{right:.2f}" y2="{bottom:g}"'
        self._body.append(f'<line {place} class="{role}-line" stroke="{ROLE_COLOURS[role][0]}"/>')

    def text(
        self, x: float, y: float, words: str, style: Style = PLAIN_STYLE, *, fill: str = ""
    ) -> None:
        """Write one line of text whose letters stand on `y`."""
        paint = (
            f'fill="{fill}"'
            if fill
            else f'class="{style.role}" fill="{ROLE_COLOURS[style.role][0]}"'
        )
        weight = ' font-weight="600"' if style.bold else ""
        anchor = f' text-anchor="{style.anchor}"' if style.anchor != "start" else ""
        self._body.append(
            f'<text x="{x:.2f}" y="{y:g}" font-size="{style.size:g}"{weight}{anchor} {paint}>'
            f"{escape(words)}</text>"
        )

    def paragraph(
        self, x: float, y: float, words: str, room: float, style: Style = PLAIN_STYLE
    ) -> float:
        """Write a text in lines of at most `room` pixels; return where the next line stands."""
        for line in wrapped(words, room, style):
            self.text(x, y, line, style)
            y += style.size * 1.35
        return y

    def hatch(self, left: float, top: float, width: float, height: float) -> None:
        """Cover a box with stripes in the colour of alarm."""
        place = f'x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{height:g}"'
        self._body.append(f'<rect class="missing" {place} fill="url(#missing)"/>')

    def finish(self, height: float) -> str:
        """Return the whole document, with the card behind everything."""
        size = f'width="{self.width}" height="{height:.0f}"'
        dark = "".join(
            f".{role}{{fill:{colour}}}.{role}-line{{stroke:{colour}}}"
            for role, (_, colour) in ROLE_COLOURS.items()
        )
        stripes = (
            '<pattern id="missing" width="8" height="8" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="3" height="8" fill="#bf2f24" '
            'fill-opacity="0.75"/></pattern>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {self.width} {height:.0f}" role="img" font-family="{FONT}">\n'
            f"<title>{escape(self._title)}</title>\n"
            f"<style>@media (prefers-color-scheme: dark) {{{dark}}}</style>\n"
            f"<defs>{stripes}</defs>\n"
            f'<rect class="card rule-line" x="0.5" y="0.5" width="{self.width - 1}" '
            f'height="{height - 1:.0f}" rx="12" fill="{ROLE_COLOURS["card"][0]}" '
            f'stroke="{ROLE_COLOURS["rule"][0]}"/>\n' + "\n".join(self._body) + "\n</svg>\n"
        )


def ink_on(fill: str) -> str:
    """Return black or white, whichever is easier to read on a colour like #3b6fb5."""
    red, green, blue = (int(fill[at : at + 2], 16) for at in (1, 3, 5))
    return "#101418" if 299 * red + 587 * green + 114 * blue > 128_000 else "#ffffff"
