"""Texts in pictures: wrapped and shortened by widths that no usual font exceeds."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.plan.show.svg import (
    ROLE_COLOURS,
    Drawing,
    Style,
    ink_on,
    shortened,
    text_width,
    ticks,
    wrapped,
)
from tests.plan.show.pictures import SVG, WIDTHS, read_picture

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=80)


def test_every_character_is_taken_to_be_at_least_as_wide_as_in_helvetica() -> None:
    for letter in string.ascii_letters + string.digits + string.punctuation + " ":
        assert text_width(letter, Style(1000)) >= WIDTHS.get(letter, 600), letter


@given(words, st.floats(40, 400), st.booleans())
def test_wrapped_lines_keep_every_character_and_stay_within_their_room(
    text: str, room: float, bold: bool
) -> None:
    style = Style(12, bold=bold)
    lines = wrapped(text, room, style)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(text_width(line, style) <= room for line in lines)


def test_a_size_and_its_unit_stay_on_one_line() -> None:
    text = "attention 184.1 MiB, loading 128.0 MiB, 12 KiB"
    for room in range(90, 400, 5):
        lines = wrapped(text, room)
        assert " ".join(lines) == text
        assert all(line[0] not in "MK" for line in lines), lines


@given(words, st.floats(0, 400))
def test_a_shortened_text_is_whole_or_begins_like_it(text: str, room: float) -> None:
    short = shortened(text, room)
    assert text_width(short) <= room
    assert short == text or text.startswith(short.removesuffix("…"))


@given(st.floats(1e-3, 1e6), st.integers(3, 12))
def test_ticks_are_round_evenly_spaced_and_reach_as_far_as_they_can(
    most: float, count: int
) -> None:
    found = ticks(most, count)
    step = found[1] - found[0] if len(found) > 1 else most
    assert found[0] == 0
    assert found[-1] <= most * (1 + 1e-6)
    assert found[-1] + step > most * (1 - 1e-6)
    assert len(found) <= count + 1
    assert f"{step:.0e}"[0] in "125"


def test_a_picture_of_nothing_has_one_tick() -> None:
    assert ticks(0, 8) == [0.0]


def brightness(colour: str) -> float:
    """Return the relative luminance that the accessibility guidelines define."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((brightness(one), brightness(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("page", [0, 1])
def test_texts_are_readable_on_light_and_dark_cards(page: int) -> None:
    for role in ("ink", "soft", "good", "alarm"):
        for behind in ("card", "panel"):
            assert contrast(ROLE_COLOURS[role][page], ROLE_COLOURS[behind][page]) >= 4.5, (
                role,
                behind,
            )


def test_letters_on_a_colour_are_black_or_white_whichever_is_clearer() -> None:
    assert ink_on("#000000") == "#ffffff"
    assert ink_on("#ffffff") == "#101418"
    assert contrast(ink_on("#3b6fb5"), "#3b6fb5") > 4


def test_markup_in_texts_is_shown_as_it_is() -> None:
    drawing = Drawing(200, '<a & "b">')
    drawing.text(20, 30, "1 < 2 & 3")
    drawing.box(20, 40, 10, 10, role="panel", hover="<b>")
    root = read_picture(drawing.finish(100))
    assert [x.text for x in root.iter(f"{SVG}title")] == ['<a & "b">', "<b>"]
    assert [x.text for x in root.iter(f"{SVG}text")] == ["1 < 2 & 3"]
    assert root.get("viewBox") == "0 0 200 100"
