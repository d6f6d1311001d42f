"""Skew: what the most chosen experts take."""

import pytest

from headroom.experts.placement import measure_skew


def test_the_most_chosen_experts_are_counted_wherever_they_stand() -> None:
    row = [1.0, 50.0, 1.0, 20.0, 1.0, 20.0, 1.0, 3.0, 2.0, 1.0]
    (found,) = measure_skew([[], row, [0.0] * 10])
    assert (found.layer, found.experts, found.choices) == (1, 10, 100.0)
    assert found.top == pytest.approx((0.5, 0.9, 0.96))


def test_even_choices_have_no_skew() -> None:
    (found,) = measure_skew([[7.0] * 16])
    assert found.top == pytest.approx((2 / 16, 5 / 16, 10 / 16))


def test_a_share_is_one_expert_at_least() -> None:
    (found,) = measure_skew([[3.0, 1.0]])
    assert found.top == pytest.approx((0.75, 0.75, 0.75))
