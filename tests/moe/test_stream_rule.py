"""Which cold experts of a large step are streamed, and which the CPU computes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.moe import stream_rule
from headroom.moe.stream_rule import (
    HAND_OVER_S,
    ColdRates,
    ExpertSize,
    cut_pieces,
    expert_flops,
    left_to_cpu,
    pays_to_count,
    runs,
)

# An expert of Qwen3.5-35B-A3B on an H200's host.
SIZE = ExpertSize(1_900_000, expert_flops(512, 2048))
RATES = ColdRates(link=55e9, cpu_bandwidth=150e9, cpu_flops=1.5e12)


def slower_s(counts: dict[int, int], left: frozenset[int], rates: ColdRates) -> float:
    """When both sides are done."""
    link = sum(SIZE.bytes / rates.link for e, n in counts.items() if n and e not in left)
    cpu = sum(
        max(SIZE.bytes / rates.cpu_bandwidth, counts[e] * SIZE.flops / rates.cpu_flops)
        for e in left
    )
    return max(link, cpu + HAND_OVER_S if left else 0.0)


def test_without_rates_nothing_is_left_to_the_cpu() -> None:
    assert left_to_cpu({3: 1, 5: 1}, SIZE, None) == frozenset()


def test_a_few_copies_are_done_before_the_cpu_has_its_rows() -> None:
    assert left_to_cpu(dict.fromkeys(range(8), 1), SIZE, RATES) == frozenset()


def test_the_cpu_takes_those_with_the_fewest_picks() -> None:
    counts = {expert: 1 if expert % 2 else 4000 for expert in range(200)}
    left = left_to_cpu(counts, SIZE, RATES)
    assert 50 < len(left) <= 100
    assert all(counts[expert] == 1 for expert in left)


def test_experts_with_many_picks_are_streamed() -> None:
    slow = ColdRates(link=55e9, cpu_bandwidth=150e9, cpu_flops=1e10)
    assert left_to_cpu(dict.fromkeys(range(200), 64), SIZE, slow) == frozenset()


@given(
    counts=st.dictionaries(st.integers(0, 255), st.integers(0, 300), max_size=200),
    link=st.floats(1e9, 1e11),
    bandwidth=st.floats(1e9, 5e11),
    flops=st.floats(1e10, 1e13),
)
def test_what_the_cpu_takes_was_chosen_and_saves_time(
    counts: dict[int, int], link: float, bandwidth: float, flops: float
) -> None:
    rates = ColdRates(link, bandwidth, flops)
    left = left_to_cpu(counts, SIZE, rates)
    assert all(counts[expert] for expert in left)
    none = frozenset[int]()
    assert slower_s(counts, left, rates) <= slower_s(counts, none, rates) * (1 + 1e-9)
    if left:
        most = max(counts[expert] for expert in left)
        assert all(n >= most for e, n in counts.items() if n and e not in left)


@pytest.mark.parametrize(
    ("rows", "with_cpu", "counted"),
    [(33, False, True), (128, False, False), (128, True, True), (512, True, False)],
)
def test_small_steps_wait_for_the_numbers_of_picks(
    rows: int, with_cpu: bool, counted: bool
) -> None:
    assert pays_to_count(rows * 8, 256, with_cpu) == counted
    assert stream_rule.COUNTED_PICKS < stream_rule.COUNTED_PICKS_CPU


@given(rows=st.sets(st.integers(0, 300)), most=st.integers(1, 40))
def test_pieces_have_every_row_once_and_runs_are_their_neighbours(
    rows: set[int], most: int
) -> None:
    pieces = cut_pieces(list(rows), most)
    assert [row for piece in pieces for row in piece] == sorted(rows)
    assert all(0 < len(piece) <= most for piece in pieces)
    for piece in pieces:
        found = runs(piece)
        assert [row for first, end in found for row in range(first, end)] == piece
        assert all(a[1] < b[0] for a, b in pairwise(found))
