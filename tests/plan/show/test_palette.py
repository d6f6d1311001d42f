"""The looks of lines: no letter twice, in any plan."""

from hypothesis import given
from hypothesis import settings as example_settings

from headroom.plan.plan import Plan
from headroom.plan.show.palette import FREE_LETTER, LOOKS, OTHER_LETTERS, line_looks
from headroom.plan.show.table import plan_text
from tests.plan.drawn_plans import drawn_plans


def test_no_letter_and_no_colour_of_a_picture_is_used_twice() -> None:
    letters = [look.letter for look in LOOKS.values()] + [*OTHER_LETTERS, FREE_LETTER]
    assert len({letter.lower() for letter in letters}) == len(letters)
    fills = [look.fill for look in LOOKS.values()]
    assert len(set(fills)) == len(fills)


def test_lines_without_a_look_get_letters_that_are_left() -> None:
    looks = line_looks(["kv", "new_line", "newer_line", "kv"])
    assert [look.letter for look in looks.values()] == ["k", "b", "i"]
    assert looks["new_line"].title == "new line"


@example_settings(max_examples=40)
@given(drawn_plans())
def test_in_every_plan_a_map_has_the_letters_of_the_rows_above_it_in_their_order(
    plan: Plan,
) -> None:
    rows = plan_text(plan, 400).splitlines()
    places = [*plan.devices, *([plan.host] if plan.host.lines else [])]
    maps = [row for row in rows if row.startswith("[")]
    assert len(maps) == len(places)
    index = 0
    for place, drawn in zip(places, maps, strict=True):
        index = rows.index(drawn, index + 1)  # two places may look alike
        legend = rows[index - len(place.lines) - 1 : index]
        names = {row.split()[0]: row.split()[1] for row in legend}
        assert len(names) == len(place.lines) + 1
        assert list(names.values())[:-1] == [line.name for line in place.lines]
        seen = list(dict.fromkeys(drawn.strip("[]").replace("|", "")))
        assert seen == [letter for letter in names if letter in seen]
        sizes = {line.name: line.bytes for line in place.lines}
        whole = max(place.total_bytes, sum(sizes.values()))
        for letter, name in names.items():
            if name in sizes:
                assert abs(drawn.count(letter) - 60 * sizes[name] / whole) < 1
        if place.free_bytes < 0:
            beyond = len(drawn.strip("[]").partition("|")[2])
            assert abs(beyond - 60 * -place.free_bytes / whole) <= 1
