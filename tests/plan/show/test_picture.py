"""The plan's picture: every line has a box of its share, and a row of the legend."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headroom.options import Options
from headroom.plan.lines import Line
from headroom.plan.plan import Plan, make_plan
from headroom.plan.show.picture import plan_svg
from headroom.units import GIB, gib
from tests.plan.shapes import cpu, gpu, host, laguna, smollm2

SVG = "{http://www.w3.org/2000/svg}"
# Pixels: width of the picture and of a bar, height of a bar, of a row, and the free space around.
WIDTH, ROOM, BAR, ROW, MARGIN = 960, 920, 36, 18, 20


def box(element: ET.Element) -> tuple[float, float, float, float]:
    """Return left, top, width and height of a box."""
    return tuple(float(element.get(key, "nan")) for key in ("x", "y", "width", "height"))  # type: ignore[return-value]


def title_of(element: ET.Element) -> str:
    """Return what is shown for an element under the pointer."""
    title = element.find(f"{SVG}title")
    assert title is not None
    return title.text or ""


def check_device(
    boxes: list[ET.Element], texts: list[ET.Element], name: str, total: int, lines: Sequence[Line],
    top: int,
) -> None:  # fmt: skip
    """Check the boxes and texts of one device, whose part of the picture begins at `top`."""
    heading, *rows = texts
    assert heading.text == f"{name}, {gib(total)}"
    assert (heading.get("x"), heading.get("y")) == ("20", str(top + 13))
    assert heading.get("font-weight") == "bold"
    whole = max(total, sum(line.bytes for line in lines))
    free, *pairs = boxes
    bar_top = top + ROW
    assert box(free) == (MARGIN, bar_top, ROOM, BAR)
    assert title_of(free) == "free"
    reached = 0
    for index, (line, text) in enumerate(zip(lines, rows, strict=True)):
        part, mark = pairs[2 * index : 2 * index + 2]
        left, width = MARGIN + ROOM * reached / whole, ROOM * line.bytes / whole
        assert box(part) == pytest.approx((left, bar_top, width, BAR), abs=0.006)
        y = bar_top + BAR + ROW * (index + 1)
        assert box(mark) == (MARGIN, y - 11, 12, 12)
        assert part.get("fill") == mark.get("fill") != "#000000"
        label = f"{line.name} {gib(line.bytes)}: {line.why}"
        assert (title_of(part), title_of(mark), text.text) == (label, line.name, label)
        assert (text.get("x"), text.get("y")) == (str(MARGIN + 20), str(y))
        reached += line.bytes


def check_picture(plan: Plan) -> None:
    """Check all that a picture shows against the plan's own numbers."""
    root = ET.fromstring(plan_svg(plan))
    boxes, texts = root.findall(f"{SVG}rect"), root.findall(f"{SVG}text")
    places = [(device.name, device.total_bytes, device.lines) for device in plan.devices]
    if plan.host.lines:
        places.append(("host memory", plan.host.total_bytes, plan.host.lines))
    top = MARGIN
    for name, total, lines in places:
        count = 1 + 2 * len(lines)
        check_device(boxes[:count], texts[: 1 + len(lines)], name, total, lines, top)
        boxes, texts = boxes[count:], texts[1 + len(lines) :]
        top += ROW + BAR + ROW * len(lines) + ROW + MARGIN
    assert (boxes, texts) == ([], [])
    assert title_of(root) == plan.model
    sides = (root.get("width"), root.get("height"), root.get("viewBox"))
    assert sides == (str(WIDTH), str(top), f"0 0 {WIDTH} {top}")


def test_every_line_of_every_device_has_a_box_of_its_share_and_a_row_of_the_legend() -> None:
    plan = make_plan([laguna()], [gpu(12), host(64)], Options())
    assert plan.host.lines
    check_picture(plan)
    check_picture(make_plan([smollm2()], [cpu(24)], Options()))


def test_lines_that_take_more_than_the_device_has_fill_the_bar_and_no_more() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options())
    small = replace(plan.devices[0], total_bytes=GIB // 64)
    assert sum(line.bytes for line in small.lines) > small.total_bytes
    check_picture(replace(plan, devices=(small,)))


def test_marks_of_markup_in_names_are_shown_as_they_are() -> None:
    plan = replace(make_plan([smollm2()], [cpu(24)], Options()), model='<a & "b">')
    check_picture(plan)


def test_a_line_that_has_no_colour_of_its_own_is_black() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options())
    device = plan.devices[0]
    lines = (replace(device.lines[0], name="other"),)
    root = ET.fromstring(plan_svg(replace(plan, devices=(replace(device, lines=lines),))))
    fills = [element.get("fill") for element in root.findall(f"{SVG}rect")]
    assert fills[:3] == ["#f4f4f4", "#000000", "#000000"]
