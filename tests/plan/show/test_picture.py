"""The plan's picture: every line has a box of its share, and nothing runs over its room."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as example_settings

from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.lines import Line
from headroom.plan.plan import DoesNotFitError, Plan, make_plan
from headroom.plan.show.palette import LOOKS
from headroom.plan.show.picture import Figure, draw_figures, plan_svg
from headroom.plan.show.svg import Drawing
from headroom.units import gib
from tests.plan.drawn_plans import drawn_plans
from tests.plan.shapes import cpu, gpu, host, laguna, smollm2
from tests.plan.show.pictures import (
    SVG,
    bars,
    check_texts,
    number,
    read_picture,
    written,
)

ROOM, MARGIN = 896, 32  # pixels: width of a bar, and the free space around


def check_bar(boxes: Sequence[ET.Element], total: int, lines: Sequence[Line]) -> None:
    """Check that a bar's boxes follow each other and have the shares of the lines."""
    free, *parts = boxes
    taken = sum(line.bytes for line in lines)
    whole = max(total, taken)
    assert (number(free, "x"), number(free, "width")) == (MARGIN, ROOM)
    assert number(free, "data-bytes") == max(0, total - taken)
    assert [part.get("data-line") for part in parts] == [line.name for line in lines]
    assert [number(part, "data-bytes") for part in parts] == [line.bytes for line in lines]
    reached = 0
    for part, line in zip(parts, lines, strict=True):
        assert number(part, "x") == pytest.approx(MARGIN + ROOM * reached / whole, abs=0.006)
        assert number(part, "width") == pytest.approx(ROOM * line.bytes / whole, abs=0.006)
        assert part.get("fill") == LOOKS[line.name].fill
        reached += line.bytes


def check_picture(plan: Plan) -> list[str]:
    """Check all that a picture shows against the plan's own numbers; return its texts."""
    root = read_picture(plan_svg(plan))
    check_texts(root)
    places = [(device.total_bytes, device.lines) for device in plan.devices]
    if plan.host.lines:
        places.append((plan.host.total_bytes, plan.host.lines))
    drawn = bars(root)
    assert len(drawn) == len(places)
    for boxes, (total, lines) in zip(drawn, places, strict=True):
        check_bar(boxes, total, lines)
    missing = [max(0, sum(x.bytes for x in lines) - total) for total, lines in places]
    hatched = [x for x in root.iter(f"{SVG}rect") if x.get("class") == "missing"]
    assert len(hatched) == len([size for size in missing if size])
    return [text.words for text in written(root)]


@example_settings(max_examples=40)
@given(drawn_plans())
def test_every_plan_is_drawn_to_its_last_byte_and_no_text_runs_over(plan: Plan) -> None:
    check_picture(plan)


def test_a_plan_shows_model_context_speed_free_memory_and_every_line() -> None:
    plan = make_plan([laguna()], [gpu(12), host(64)], Options())
    texts = check_picture(plan)
    assert texts[:2] == ["fits", "laguna-xs.2:q4_k_m"]
    assert "on cuda:0 (12.00 GiB), with 64.00 GiB of host memory" in texts
    predicted, device = plan.predicted, plan.devices[0]
    for label, value in (
        ("context, tokens", "8,192"),
        ("decode, tokens/s", f"{predicted.decode_tokens_per_s:,.1f}"),
        ("prompts, tokens/s", f"{predicted.prefill_tokens_per_s:,.0f}"),
        ("hot experts", f"{100 * device.hot_experts / device.total_experts:.0f} %"),
        ("free", gib(device.free_bytes)),
    ):
        assert texts[texts.index(label) + 1] == value
    for line in (*device.lines, *plan.host.lines):
        if line.bytes:
            assert LOOKS[line.name].title in texts
            assert gib(line.bytes) in texts
    joined = " ".join(texts)
    assert all(line.why in joined for line in device.lines if line.bytes)
    assert all(note in joined for note in plan.notes)


def test_the_texts_of_a_figure_are_inside_its_box_and_begin_at_one_edge() -> None:
    drawing = Drawing(960, "figures")
    figures = [Figure(f"label {n}", f"{n},000", f"below {n}") for n in range(3)]
    end = draw_figures(drawing, iter(figures), 100)
    root = read_picture(drawing.finish(end))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "panel"]
    texts = [text for text in written(root) if text.y > 100]
    assert len(boxes) == len(figures)
    for box, of_box in zip(boxes, zip(*[iter(texts)] * 3, strict=True), strict=True):
        left, width, top = (number(box, key) for key in ("x", "width", "y"))
        assert {text.left for text in of_box} == {left + 12}
        assert all(text.right <= left + width - 12 for text in of_box)
        assert top < of_box[0].y < of_box[1].y < of_box[2].y < top + number(box, "height") <= end


def test_a_plan_that_does_not_fit_says_what_is_missing_and_promises_no_speed() -> None:
    with pytest.raises(DoesNotFitError) as refused:
        make_plan([laguna()], [gpu(1), host(4)], Options())
    plan = refused.value.plan
    texts = check_picture(plan)
    places = {**{device.name: device for device in plan.devices}, "host memory": plan.host}
    name, worst = min(places.items(), key=lambda place: place[1].free_bytes)
    missing = sum(max(0, -place.free_bytes) for place in places.values())
    assert texts[0] == f"does not fit: {gib(missing)} missing"
    at = texts.index("missing")
    assert texts[at : at + 3] == ["missing", gib(-worst.free_bytes), f"of {name}"]
    assert f"{gib(-worst.free_bytes)} missing" in texts
    assert not any("tokens/s" in words for words in texts)


def test_what_is_free_counts_all_devices() -> None:
    options = Options(activation_dtype="bf16")
    plan = make_plan([laguna()], [gpu(9), gpu(24, "cuda:1"), host(64)], options)
    texts = check_picture(plan)
    free = sum(device.free_bytes for device in plan.devices)
    at = texts.index("free")
    assert texts[at + 1 : at + 3] == [gib(free), "of 33.00 GiB in all"]


def test_a_device_that_is_named_by_its_size_says_it_once_and_a_draft_is_named() -> None:
    shapes = [known_shape("qwen3.6-27b:q4_k_m"), known_shape("qwen3.6-27b-dflash")]
    device = replace(gpu(80), name="80.00GiB")
    texts = check_picture(make_plan(shapes, [device, host(64)], Options()))
    below = "on 80.00GiB, with 64.00 GiB of host memory, drafted by qwen3.6-27b-dflash:bf16"
    assert below in texts
    assert texts[texts.index("80.00GiB") + 1] == "layers 0 to 63"


def test_long_names_and_marks_of_markup_are_wrapped_and_shown_as_they_are() -> None:
    name = '<a & "b"> ' + "long-name-" * 12
    plan = replace(make_plan([smollm2()], [cpu(24)], Options()), model=name)
    texts = check_picture(plan)
    assert name.replace(" ", "") in "".join(texts).replace(" ", "")


def test_a_line_that_has_no_look_of_its_own_is_black() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options())
    device = plan.devices[0]
    lines = (replace(device.lines[0], name="other_line"),)
    root = read_picture(plan_svg(replace(plan, devices=(replace(device, lines=lines),))))
    assert [part.get("fill") for part in bars(root)[0][1:]] == ["#000000"]
    assert "other line" in [text.words for text in written(root)]
