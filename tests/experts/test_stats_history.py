"""Routing statistics in a file: they fade with time, and those of other models are refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import FormatError
from headroom.experts.placement import LayerExperts
from headroom.experts.stats import HALF_LIFE_S, RoutingHistory, load_history, save_history

LAYERS = [LayerExperts(3, 10), LayerExperts(0, 0)]


def test_a_saved_history_is_read_again(tmp_path: Path) -> None:
    history = RoutingHistory.empty(LAYERS, 100.0).with_choices([[5, 0, 2], [0, 0, 0]])
    save_history(tmp_path / "m.routing.json", history, "abc")
    found = load_history(tmp_path / "m.routing.json", "abc", LAYERS)
    assert found == history
    assert found.counts == ((5.0, 0.0, 2.0), ())
    assert found.total == 7


@given(st.floats(0, 1e7), st.floats(0, 1e7))
def test_counts_fade_by_half_lives_in_one_step_or_in_two(first: float, second: float) -> None:
    history = RoutingHistory(((64.0,),), 0.0)
    twice = history.decayed(first).decayed(first + second)
    once = history.decayed(first + second)
    assert twice.counts[0][0] == pytest.approx(once.counts[0][0])
    assert history.decayed(HALF_LIFE_S).counts == ((32.0,),)


def test_a_clock_that_went_back_changes_nothing() -> None:
    history = RoutingHistory(((64.0,),), 1000.0)
    assert history.decayed(10.0) == history


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"model": "other"}, "is of another model (other, not abc)"),
        ({"version": 3}, "is not a routing statistics file: it has no version 1"),
        ({"counts": [[1, 2, 3]]}, "are for 1 layer with 3 experts, the model has 2 layers with"),
        ({"counts": [[1, 2], []]}, "are for 2 layers with 0/2 experts, the model has 2 layers"),
        ({"counts": [[1, -2, 3], []]}, "its counts are not rows of numbers from 0"),
        ({"counts": [[1, "2", 3], []]}, "its counts are not rows of numbers from 0"),
        ({"counts": [[1, float("inf"), 3], []]}, "its counts are not rows of numbers from 0"),
        ({"saved_at": float("inf")}, "its saved_at is inf, not a number of seconds"),
        ({"saved_at": None}, "its saved_at is None, not a number of seconds"),
    ],
)
def test_statistics_of_something_else_are_refused(
    tmp_path: Path, table: dict[str, object], text: str
) -> None:
    path = tmp_path / "m.routing.json"
    good = {"version": 1, "model": "abc", "saved_at": 5, "counts": [[1, 2, 3], []]}
    path.write_text(json.dumps(good | table))
    with pytest.raises(FormatError) as refused:
        load_history(path, "abc", LAYERS)
    assert text in str(refused.value)


def test_a_corrupt_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.routing.json"
    for content in (b"\x00\xff", b"[" * 100_000, b"", b"[]"):
        path.write_bytes(content)
        with pytest.raises(FormatError, match="is not a routing statistics file"):
            load_history(path, "abc", LAYERS)
