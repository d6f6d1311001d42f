"""The heat map has every expert once, in a colour by its choices, and scales with numbers."""

import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from headroom.experts.picture import DEEPEST, FAINTEST, PlannedResidency, experts_svg
from headroom.experts.placement import ExpertPlacement
from tests.plan.show.pictures import SVG, check_texts, number, read_picture, written

COUNTS = ((), (0.0, 4.0, 100.0), (0.0, 0.0, 0.0))
PLACEMENT = ExpertPlacement(((), (2,), (0, 1)), 'a <file> & "more"')
USE = PlannedResidency("m", "24GiB", COUNTS, PLACEMENT)


def boxes(root: ElementTree.Element) -> list[ElementTree.Element]:
    """Return the boxes of experts, in the order of layers and ids."""
    return [box for box in root.iter(f"{SVG}rect") if box.get("data-expert")]


def texts(use: PlannedResidency) -> list[str]:
    root = read_picture(experts_svg(use))
    check_texts(root)
    return [text.words for text in written(root)]


def test_every_expert_is_a_box_that_says_where_it_is() -> None:
    found = boxes(read_picture(experts_svg(USE)))
    words = [box.get("data-expert") for box in found]
    assert words == ["cold", "cold", "hot", "hot", "hot", "cold"]
    titles = [str(box.findtext(f"{SVG}title")) for box in found]
    assert titles[1] == "layer 1, expert 1: 4 choices, 3.85 %, cold"
    assert titles[2] == "layer 1, expert 2: 100 choices, 96.15 %, hot"
    assert titles[5] == "layer 2, expert 2: 0 choices, 0.00 %, cold"


def test_rows_follow_each_other_and_colours_deepen_with_the_square_root_of_the_share() -> None:
    found = boxes(read_picture(experts_svg(USE)))
    cell = number(found[0], "width")
    for index, box in enumerate(found):
        row, expert = divmod(index, 3)
        assert number(box, "x") == pytest.approx(number(found[0], "x") + expert * cell, abs=0.02)
        assert number(box, "y") == number(found[0], "y") + 14 * row
        assert box.get("fill") == ("#c8441c" if box.get("data-expert") == "hot" else "#2f66b8")
        share = COUNTS[row + 1][expert] / 104
        depth = FAINTEST + (1 - FAINTEST) * (share * 3 / DEEPEST) ** 0.5
        assert float(box.get("fill-opacity", "1")) == pytest.approx(depth, abs=0.001)


def test_scales_have_numbers_and_each_layer_its_hot_experts_and_hit_rate() -> None:
    use = PlannedResidency(
        "m", "24GiB", ((1.0, 3.0), (2.0, 2.0)), ExpertPlacement(((1,), (0,)), "even")
    )
    shown = texts(use)
    assert shown.count("8 and more") == 2
    assert {"hot, 2", "cold, 2", "hot experts", "hit rate", "layer"} <= set(shown)
    assert shown[shown.index("hit rate") + 1] == "62.5 %"  # (3 + 2) of 8
    assert shown[shown.index("choices counted") + 1] == "8"
    assert shown[shown.index("most chosen expert") + 1] == "1.5 x"
    assert shown[-6:] == ["0", "1", "75.0 %", "1", "1", "50.0 %"]


@pytest.mark.parametrize(("experts", "step"), [(16, 1), (17, 2), (40, 4), (128, 8), (512, 32)])
def test_numbers_above_the_map_are_a_power_of_two_apart(experts: int, step: int) -> None:
    use = PlannedResidency("m", "24GiB", ((1.0,) * experts,), ExpertPlacement(((),), "even"))
    root = read_picture(experts_svg(use))
    shown = [text for text in written(root) if text.words.isdigit()]
    ((line, _),) = Counter(text.y for text in shown).most_common(1)
    numbers = [int(text.words) for text in shown if text.y == line]
    assert numbers == list(range(0, experts, step))


def test_the_bar_of_a_hit_rate_fills_its_share_of_a_box_within_the_row() -> None:
    root = read_picture(experts_svg(USE))
    row = boxes(root)[0]  # of layer 1, whose hit rate is 100 of 104
    top, height = number(row, "y"), number(row, "height")
    others = [box for box in root.iter(f"{SVG}rect") if not box.get("data-expert")]
    whole, rate = [box for box in others if top < number(box, "y") < top + height]
    assert number(rate, "width") == pytest.approx(number(whole, "width") * 100 / 104, abs=0.01)
    for box in (whole, rate):
        assert number(box, "y") + number(box, "height") < top + height


def test_without_statistics_places_are_drawn_and_no_rates() -> None:
    use = PlannedResidency("m", "24GiB", ((0.0, 0.0),), ExpertPlacement(((1,),), "even"))
    shown = texts(use)
    assert shown[shown.index("choices counted") + 1] == "none"
    assert "hit rate" not in shown
    assert "8 and more" not in shown
    faint = {box.get("fill-opacity") for box in boxes(read_picture(experts_svg(use)))}
    assert len(faint) == 1


def test_a_model_without_experts_has_no_boxes() -> None:
    use = PlannedResidency("m", "24GiB", ((), ()), ExpertPlacement(((), ()), "even"))
    assert boxes(read_picture(experts_svg(use))) == []
    texts(use)


def test_names_are_shown_as_they_are() -> None:
    use = PlannedResidency("a <b> & 'c' \"d\"", "24GiB", COUNTS, PLACEMENT)
    shown = texts(use)
    assert use.model in shown
    assert PLACEMENT.source in shown


@st.composite
def uses(draw: st.DrawFn) -> PlannedResidency:
    """Draw counts of some layers, of which some experts are hot."""
    experts = draw(st.sampled_from([2, 8, 128, 512]))
    layers = draw(st.integers(1, 4))
    counts = tuple(
        tuple(draw(st.lists(st.floats(0, 1e6), min_size=experts, max_size=experts)))
        for _ in range(layers)
    )
    hot = tuple(tuple(range(draw(st.integers(0, experts)))) for _ in counts)
    return PlannedResidency(
        "model-" * 9, "rtx3060-12gb", counts, ExpertPlacement(hot, "statistics")
    )


@example_settings(max_examples=15)
@given(uses())
def test_boxes_and_texts_stay_inside_the_picture(use: PlannedResidency) -> None:
    root = read_picture(experts_svg(use))
    check_texts(root)
    found = boxes(root)
    assert len(found) == use.total
    assert sum(box.get("data-expert") == "hot" for box in found) == use.placement.total
    for box in found:
        assert number(box, "x") + number(box, "width") <= number(root, "width") - 32
        assert 0 < float(box.get("fill-opacity", "1")) <= 1
