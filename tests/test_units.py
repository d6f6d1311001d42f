"""Sizes as people read and write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import OptionError
from headroom.units import GIB, KIB, MIB, counted, gib, parse_size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (20 * MIB, "20.0 MiB"),
        (GIB, "1.00 GiB"),
        (6.64 * GIB, "6.64 GiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_unit_that_keeps_it_above_one(
    size: float, text: str
) -> None:
    assert gib(size) == text


def test_one_of_a_kind_is_named_in_the_singular() -> None:
    assert [counted(number, "thread") for number in (0, 1, 2)] == [
        "0 threads", "1 thread", "2 threads",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("4k", 4 * KIB),
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("8GB", 8 * 1000**3),
        ("1.5G", 3 * GIB // 2),
        ("2T", 2 << 40),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24 XB", "-1G", "1,5G", "1e9", "nan", "12 3"])
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_size(text)
    assert str(refused.value) == (
        f"{text!r} is not a size. Write a number and a unit, as in 24GiB, 512MiB or 8GB."
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "lots",
            "--swap-bytes is 'lots', which is not a size. "
            "Write a number and a unit, as in 24GiB, 512MiB or 8GB.",
        ),
        (
            "64",
            "--swap-bytes is '64', a number without a unit. Write 64GiB, 64MiB, or 64B for bytes.",
        ),
    ],
)
def test_a_setting_is_named_by_its_error_and_needs_a_unit(text: str, told: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_size(text, "swap_bytes")
    assert str(refused.value) == told
    assert refused.value.param == "swap_bytes"
    assert (parse_size("0", "swap_bytes"), parse_size("64B", "swap_bytes")) == (0, 64)


@given(st.integers(0, 1 << 44))
def test_a_size_that_is_shown_reads_back_within_its_last_digit(size: int) -> None:
    assert abs(parse_size(gib(size)) - size) <= max(1, size / 20)
