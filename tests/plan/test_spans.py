"""Layer ranges for devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import OptionError, PlanError
from headroom.plan.spans import (
    Span,
    parse_split,
    split_by_balance,
    split_by_filling,
    split_by_weights,
)


@pytest.mark.parametrize(
    ("layers", "weights", "spans"),
    [
        (64, (1, 1), ((0, 31), (32, 63))),
        (40, (2, 1), ((0, 26), (27, 39))),
        (3, (1, 1), ((0, 1), (2, 2))),  # 1.5 rounds away from zero
        (4, (1000, 1, 1), ((0, 1), (2, 2), (3, 3))),  # every device has a layer
        (4, (1, 1000), ((0, 0), (1, 3))),
        (1, (5,), ((0, 0),)),
    ],
)
def test_weights_give_their_share_of_layers(
    layers: int, weights: tuple[float, ...], spans: tuple[Span, ...]
) -> None:
    assert split_by_weights(layers, weights) == spans


def test_more_devices_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="3 devices cannot share 2 layers"):
        split_by_weights(2, (1, 1, 1))


@pytest.mark.parametrize("text", ["1,0", "1,-1", "a,b", "1,,2", "nan,1", "inf,1"])
def test_shares_that_are_no_positive_numbers_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_split(text, 2)


def fullest(costs: list[int], rooms: list[int], spans: tuple[Span, ...]) -> float:
    return max(
        sum(costs[first : last + 1]) / room
        for (first, last), room in zip(spans, rooms, strict=True)
    )


@given(
    st.lists(st.integers(1, 100), min_size=2, max_size=12),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_balance_over_two_devices_is_the_best_there_is(
    costs: list[int], first: int, second: int
) -> None:
    rooms = [first * 10, second * 10]
    spans = split_by_balance(costs, rooms)
    choices = [((0, cut - 1), (cut, len(costs) - 1)) for cut in range(1, len(costs))]
    best = min(fullest(costs, rooms, choice) for choice in choices)
    assert fullest(costs, rooms, spans) == pytest.approx(best)


@given(
    st.lists(st.integers(1, 100), min_size=4, max_size=20),
    st.lists(st.integers(1, 100), min_size=1, max_size=4),
)
def test_spans_cover_every_layer_once(costs: list[int], rooms: list[int]) -> None:
    spans = split_by_balance(costs, rooms)
    covered = [index for first, last in spans for index in range(first, last + 1)]
    assert covered == list(range(len(costs)))
    assert all(first <= last for first, last in spans)


def test_the_first_or_the_last_devices_are_filled() -> None:
    costs, rooms = [10] * 6, [35, 45]
    assert split_by_filling(costs, rooms) == ((0, 2), (3, 5))
    assert split_by_filling(costs, rooms, backwards=True) == ((0, 1), (2, 5))
    assert split_by_filling(costs, [100, 100]) == ((0, 4), (5, 5))
    assert split_by_filling(costs, [25, 25]) is None
