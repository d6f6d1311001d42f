"""Limits of a rendering: what fits exactly is taken, one more is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from headroom.text import template_limits as limits
from headroom.text.template_limits import (
    MAX_CHARACTERS,
    MAX_INTEGER_BITS,
    MAX_ITEMS,
    MAX_MADE,
    MAX_STEPS,
    MAX_TIME_FORMAT,
    RenderBudget,
    budget,
    new_budget,
    printed_size,
)
from tests.text.budgets import taken


@pytest.fixture(autouse=True)
def rendering() -> Iterator[None]:
    with new_budget():
        yield


def test_the_last_step_is_taken_and_the_next_one_refused() -> None:
    spent = RenderBudget()
    spent.step(MAX_STEPS - 1)
    spent.step(1)
    with pytest.raises(SecurityError, match=f"more than {MAX_STEPS} steps"):
        spent.step(1)


def test_a_text_may_have_the_limit_and_no_character_more() -> None:
    RenderBudget().make(MAX_CHARACTERS)
    with pytest.raises(SecurityError, match=f"a text of more than {MAX_CHARACTERS} characters"):
        RenderBudget().make(MAX_CHARACTERS + 1)


def test_all_texts_together_may_have_the_limit_and_no_character_more() -> None:
    spent = RenderBudget()
    for _ in range(MAX_MADE // MAX_CHARACTERS):
        spent.make(MAX_CHARACTERS)
    spent.make(0)
    with pytest.raises(SecurityError, match=f"texts of more than {MAX_MADE} characters together"):
        spent.make(1)


def test_a_list_may_have_the_limit_and_no_item_more() -> None:
    RenderBudget().make_items(MAX_ITEMS)
    with pytest.raises(SecurityError, match=f"a list of more than {MAX_ITEMS} items"):
        RenderBudget().make_items(MAX_ITEMS + 1)
    assert taken(lambda: budget().make_items(5)) == 5 * 16


def test_each_rendering_has_a_budget_of_its_own() -> None:
    outer = budget()
    with new_budget():
        assert budget() is not outer
        budget().step(MAX_STEPS)
    assert budget() is outer
    outer.step(MAX_STEPS)  # nothing of it was used


@pytest.mark.parametrize(
    ("value", "characters"),
    [("abc", 3), (b"ab", 2), ([1, 2], 32), ((1,), 16), ({1: 2}, 16), ({1, 2, 3}, 48), (7, 0)],
)
def test_a_value_that_was_made_is_counted_by_its_size(value: object, characters: int) -> None:
    assert limits.made(value) is value
    assert taken(limits.made, value) == characters


@pytest.mark.parametrize(
    ("value", "characters"), [("x" * 33, 2), (["x" * 28, "y"], 2), ({"k": "v" * 40}, 2), (7, 0)]
)
def test_a_comparison_costs_a_sixteenth_of_what_it_reads(value: object, characters: int) -> None:
    assert limits.compared(value) is value
    assert taken(limits.compared, value) == characters


@pytest.mark.parametrize(
    "value",
    ["text", 12, -1.5, True, None, [1, "a"], {"key": ["a", {"b": 2}]}, (1, 2), [[[]]], {}],
    ids=repr,
)
def test_the_printed_size_is_at_least_what_python_prints(value: object) -> None:
    assert len(str(value)) <= printed_size(value)


def test_the_printed_size_counts_characters_numbers_and_marks() -> None:
    assert printed_size("text") == 2 + 4
    assert printed_size(12) == 2 + 80
    assert printed_size([1, "a"]) == 2 + (2 + 80) + (2 + 1)
    assert printed_size({"k": ("v",)}) == 2 + (2 + 1) + 2 + (2 + 1)


def test_a_list_within_itself_many_times_is_refused_before_it_is_printed() -> None:
    doubled: list[Any] = [0]
    for _ in range(60):
        doubled = [doubled, doubled]
    with pytest.raises(SecurityError, match=f"a list of more than {MAX_ITEMS} items"):
        printed_size(doubled)
    long = "x" * (MAX_CHARACTERS // 4)
    assert printed_size([long] * 3) < MAX_CHARACTERS
    with pytest.raises(SecurityError, match=f"a text of more than {MAX_CHARACTERS} characters"):
        printed_size([long] * 4)


def test_indentation_counts_for_each_level() -> None:
    value = ["a", ["b", ["c"]]]
    assert printed_size(value, indent=10) - printed_size(value) == 10 * (1 + 1 + 2 + 2 + 3)


def test_joined_values_are_one_text_that_is_counted() -> None:
    parts = ["a", 1, None, [2]]
    assert limits.joined(iter(parts)) == "a1None[2]"
    # The text itself, and the sizes of the values that were printed.
    assert taken(limits.joined, parts) == len("a1None[2]") + sum(map(printed_size, parts[1:]))
    half = "x" * (MAX_CHARACTERS // 2)
    assert len(limits.joined([half, half])) == MAX_CHARACTERS
    with pytest.raises(SecurityError, match="a text of more than"):
        limits.joined([half, half, "x"])


def test_only_values_that_are_not_texts_are_counted_before_they_are_printed() -> None:
    assert limits.printable("text") == "text"
    assert taken(limits.printable, "x" * 1000) == 0
    assert taken(limits.printable, [1]) == printed_size([1])


REFUSED = [
    (limits.bound_format, ("%1000000d", [1], "%"), "huge width"),
    (limits.bound_format, ("%*d", [MAX_CHARACTERS + 1, 1], "%"), "huge width"),
    (limits.bound_format, ("{:{}}", ["x", MAX_CHARACTERS + 1], "{"), "huge width"),
    (limits.bound_format, ("{}" * 40, ["x" * (1 << 20)], "{"), "a text of more than"),
    (limits.bound_widths, ([-MAX_CHARACTERS - 1],), "huge width"),
    (limits.bound_bits, (MAX_INTEGER_BITS + 1,), f"a number of {MAX_INTEGER_BITS + 1} bits"),
    (limits.bound_sum, ("x" * MAX_CHARACTERS, "x"), "a text of more than"),
    (limits.bound_sum, ([0] * MAX_ITEMS, [0]), "a list of more than"),
    (limits.bound_product, ("ab", MAX_CHARACTERS // 2 + 1), f"into {MAX_CHARACTERS + 2} items"),
    (limits.bound_product, (MAX_ITEMS + 1, [0]), f"into {MAX_ITEMS + 1} items"),
    (limits.bound_product, (1 << 128, 1 << 127), "a number of 257 bits"),
    (limits.bound_replacement, ("a" * 64, "a", "b" * (1 << 20)), "a text of more than"),
    (limits.bound_time, ("%Y" * (MAX_TIME_FORMAT // 2) + "%",), "a time to a huge width"),
    (limits.bound_time, ("%100Y",), "a time to a huge width"),
]
TAKEN = [
    (limits.bound_format, ("%999999d", [1], "%"), len("%999999d") + printed_size(1)),
    (limits.bound_format, ("%*d", [MAX_CHARACTERS, 1], "%"), 3 + printed_size(1)),
    (limits.bound_format, ("{}-{}", ["abc", "d"], "{"), 5 + 2 * printed_size("abc")),
    (limits.bound_format, ("plain", [], "%"), 5),
    (limits.bound_widths, ([MAX_CHARACTERS, "x", None],), 0),
    (limits.bound_bits, (MAX_INTEGER_BITS,), 0),
    (limits.bound_sum, ("abc", "de"), 5),
    (limits.bound_sum, ([1, 2], (3,)), 48),
    (limits.bound_sum, ("abc", [1]), 0),
    (limits.bound_product, ("ab", 3), 6),
    (limits.bound_product, (3, [0, 1]), 96),
    (limits.bound_product, ("ab", -3), 0),
    (limits.bound_product, (1 << 127, 1 << 127), 0),
    (limits.bound_replacement, ("banana", "a", "xyz"), 6 + 3 * 2),
    (limits.bound_replacement, ("banana", "an", "x"), 6),
    (limits.bound_time, ("%Y" * (MAX_TIME_FORMAT // 2),), 0),
    (limits.bound_time, ("%99Y 1999",), 0),
]


@pytest.mark.parametrize(("bound", "arguments", "reason"), REFUSED)
def test_what_would_be_too_large_is_refused(
    bound: Callable[..., None], arguments: tuple[Any, ...], reason: str
) -> None:
    with pytest.raises(SecurityError, match=reason):
        bound(*arguments)


@pytest.mark.parametrize(("bound", "arguments", "characters"), TAKEN)
def test_what_fits_is_counted(
    bound: Callable[..., None], arguments: tuple[Any, ...], characters: int
) -> None:
    assert taken(bound, *arguments) == characters


METHODS: list[tuple[str, str, tuple[Any, ...], int]] = [
    ("{}!", "format", ("abc",), 3 + printed_size("abc")),
    ("{a}", "format_map", ({"a": 1},), 3 + printed_size({"a": 1})),
    ("banana", "replace", ("a", "xyz"), 12),
    (", ", "join", (["a", "b"],), printed_size(["a", "b"]) + 4),
    (", ", "join", (), printed_size(())),
    ("a\tb\tc", "expandtabs", (4,), 5 + 2 * 4),
    ("a\tb\tc", "expandtabs", (), 5 + 2 * 8),
    ("abc", "translate", ({97: "xyz"},), 3 * printed_size({97: "xyz"})),
    ("abc", "translate", (), 3),
    ("a,b,c", "split", (",",), 3 * 16),
    ("a b c", "split", (), 3 * 16),
    ("a b c", "rsplit", (None,), 3 * 16),
    ("a\nb\r\nc", "splitlines", (), 4 * 16),
    ("x" * 40, "upper", (), 2),
    ("x" * 40, "startswith", ("x",), 2),
]


@pytest.mark.parametrize(("text", "name", "arguments", "characters"), METHODS)
def test_a_method_is_counted_by_the_size_of_its_result(
    text: str, name: str, arguments: tuple[Any, ...], characters: int
) -> None:
    assert taken(limits.bound_method, text, name, arguments, {}) == characters


def test_a_method_may_make_a_list_of_the_limit_and_no_item_more() -> None:
    commas = "," * (MAX_ITEMS - 1)
    limits.bound_method(commas, "split", (",",), {})
    with pytest.raises(SecurityError, match="a list of more than"):
        limits.bound_method(commas + ",", "split", (",",), {})
    lines = "\n" * (MAX_ITEMS - 1)
    limits.bound_method(lines, "splitlines", (), {})
    with pytest.raises(SecurityError, match="a list of more than"):
        limits.bound_method(lines + "\n", "splitlines", (), {})
    with pytest.raises(SecurityError, match="a list of more than"):
        limits.bound_method("x " * (MAX_ITEMS + 1), "split", (), {})
    limits.bound_method("x" * (3 * MAX_ITEMS), "split", (), {})  # one long word
    with pytest.raises(SecurityError, match="huge width"):
        limits.bound_method("x", "center", (MAX_CHARACTERS + 1,), {})
    with pytest.raises(SecurityError, match="huge width"):
        limits.bound_method("\t", "expandtabs", (), {"tabsize": MAX_CHARACTERS + 1})
