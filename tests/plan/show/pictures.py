"""Reads SVG pictures as a browser would: boxes, texts, and how wide texts are."""

import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

SVG = "{http://www.w3.org/2000/svg}"
# Adobe's published widths of Helvetica, in thousandths of the size, by width.
HELVETICA = {
    191: "'", 222: "ijl", 278: " !,./:;I[]\\ft|", 334: "{}", 333: "()-`r", 355: '"', 389: "*",
    469: "^", 500: "Jcksvxyz", 556: "#$0123456789?L_abdeghnopqu", 584: "+<=>~", 611: "FTZ",
    667: "&ABEKPSVXY", 722: "CDHNRUw", 778: "GOQ", 833: "Mm", 889: "%", 944: "W", 1015: "@",
}  # fmt: skip
WIDTHS = {letter: width for width, letters in HELVETICA.items() for letter in letters}
BOLD = 1.06  # Helvetica Bold is at most so much wider in running text


@dataclass(frozen=True, slots=True)
class Written:
    """One line of text in a picture."""

    words: str
    left: float
    right: float
    y: float


def read_picture(text: str) -> ET.Element:
    """Return the document, which must be well-formed XML."""
    return ET.fromstring(text)


def written(root: ET.Element) -> list[Written]:
    """Return every text with the place that it takes in Helvetica."""
    found = []
    for element in root.iter(f"{SVG}text"):
        words = element.text or ""
        width = sum(WIDTHS.get(letter, 1000) for letter in words) / 1000
        width *= float(element.get("font-size", "nan"))
        width *= BOLD if element.get("font-weight") else 1.0
        x = float(element.get("x", "nan"))
        share = {None: 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor")]
        left = x - share * width
        found.append(Written(words, left, left + width, float(element.get("y", "nan"))))
    return found


def check_texts(root: ET.Element) -> None:
    """Check that texts stay inside the picture and that none runs into the next one."""
    width, height = float(root.get("width", "nan")), float(root.get("height", "nan"))
    rows: dict[float, list[Written]] = defaultdict(list)
    for text in written(root):
        assert text.words
        assert 16 <= text.left <= text.right <= width - 16, text
        assert 16 <= text.y <= height - 10, text
        rows[text.y].append(text)
    for row in rows.values():
        row.sort(key=lambda text: text.left)
        for before, after in pairwise(row):
            assert before.right < after.left, (before, after)


def number(element: ET.Element, key: str) -> float:
    """Return an attribute that is a number."""
    return float(element.get(key, "nan"))


def bars(root: ET.Element) -> list[list[ET.Element]]:
    """Return the boxes of every bar: first what is free, then one for each line."""
    found: list[list[ET.Element]] = []
    for element in root.iter(f"{SVG}rect"):
        if element.get("data-line") == "free":
            found.append([])
        if element.get("data-line"):
            found[-1].append(element)
    return found
