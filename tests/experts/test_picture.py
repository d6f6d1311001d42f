"""The heat map is valid XML and has every expert once."""

import xml.etree.ElementTree as ElementTree

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
