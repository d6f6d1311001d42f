"""The heat map is valid XML and has every expert once."""

import xml.etree.ElementTree as ElementTree

import pytest

from headroom.experts.picture import experts_svg
from headroom.experts.placement import ExpertPlacement

SPACE = "{http://www.w3.org/2000/svg}"
COUNTS = ((), (0.0, 4.0, 100.0), (0.0, 0.0, 0.0))
PLACEMENT = ExpertPlacement(((), (2,), (0, 1)), 'a <file> & "more"')


def test_every_expert_is_a_box_that_says_where_it_is() -> None:
    root = ElementTree.fromstring(experts_svg("m", COUNTS, PLACEMENT))
    boxes = list(root.iter(f"{SPACE}rect"))
    assert [box.get("class") for box in boxes] == ["cold", "cold", "hot", "hot", "hot", "cold"]
    titles = [box.find(f"{SPACE}title") for box in boxes]
    assert titles[2] is not None
    assert titles[2].text == "layer 1, expert 2: 100 choices, 96.15 %, hot"


def number(element: ElementTree.Element, key: str) -> float:
    return float(str(element.get(key)))


def test_rows_of_layers_follow_each_other_and_every_box_has_its_place_and_colour() -> None:
    root = ElementTree.fromstring(experts_svg("m", COUNTS, PLACEMENT))
    height = 20 + 3 * 12 + 2 * 12 + 12 + 20  # title, legend, two layers, free space around
    assert (root.get("width"), root.get("height")) == ("1200", str(height))
    assert root.get("viewBox") == f"0 0 1200 {height}"
    title, legend, *labels = root.iter(f"{SPACE}text")
    assert (title.text, title.get("x"), title.get("y")) == ("m", "20", "20")
    assert title.get("font-weight") == "bold"
    assert (legend.get("x"), legend.get("y"), legend.get("font-weight")) == ("20", "34", None)
    words = str(legend.text)
    assert words.startswith("red: hot, 3 of 6 experts (")
    assert "; blue: cold, 3; " in words
    assert [(text.text, text.get("x"), text.get("y")) for text in labels] == [
        ("layer 1", "20", "65"),
        ("layer 2", "20", "77"),
    ]
    boxes = list(root.iter(f"{SPACE}rect"))
    cell = (1200 - 2 * 20 - 60) / 3
    for index, box in enumerate(boxes):
        row, expert = divmod(index, 3)
        assert number(box, "x") == pytest.approx(80 + expert * cell, abs=0.006)
        assert number(box, "width") == pytest.approx(cell, abs=0.006)
        assert (number(box, "y"), number(box, "height")) == (56 + 12 * row, 11)
        # From grey to red or blue by the square root of the share of the most chosen expert.
        depth = 0.12 + 0.88 * (COUNTS[row + 1][expert] / 100) ** 0.5
        deepest = (200, 60, 20) if box.get("class") == "hot" else (40, 90, 180)
        mixed = [round(245 * (1 - depth) + part * depth) for part in deepest]
        assert [int(str(box.get("fill"))[at : at + 2], 16) for at in (1, 3, 5)] == mixed
    titles = [str(box.findtext(f"{SPACE}title")) for box in boxes]
    assert titles[1] == "layer 1, expert 1: 4 choices, 3.85 %, cold"
    assert titles[5] == "layer 2, expert 2: 0 choices, 0.00 %, cold"


def test_a_model_without_experts_has_an_empty_picture() -> None:
    root = ElementTree.fromstring(experts_svg("m", ((), ()), ExpertPlacement(((), ()), "even")))
    assert list(root.iter(f"{SPACE}rect")) == []
    assert root.get("height") == str(2 * 20 + 4 * 12)


def test_the_more_an_expert_is_chosen_the_deeper_its_colour() -> None:
    root = ElementTree.fromstring(experts_svg("m", COUNTS, PLACEMENT))
    never, seldom = (str(box.get("fill")) for box in list(root.iter(f"{SPACE}rect"))[:2])
    assert int(never[1:3], 16) > int(seldom[1:3], 16)


def test_names_are_escaped() -> None:
    title = "a <b> & 'c' \"d\""
    root = ElementTree.fromstring(experts_svg(title, COUNTS, PLACEMENT))
    found = root.find(f"{SPACE}title")
    assert found is not None
    assert found.text == title
    assert any('a <file> & "more"' in (text.text or "") for text in root.iter(f"{SPACE}text"))


def test_boxes_stay_inside_the_picture() -> None:
    wide = ((1.0,) * 512,)
    root = ElementTree.fromstring(experts_svg("m", wide, ExpertPlacement(((0,),), "even")))
    last = list(root.iter(f"{SPACE}rect"))[-1]
    assert float(str(last.get("x"))) + float(str(last.get("width"))) <= float(
        str(root.get("width"))
    )
