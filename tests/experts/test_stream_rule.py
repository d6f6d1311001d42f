"""Which cold experts of a large step are streamed, and which the CPU computes."""

from itertools import pairwise
from math import exp, log

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headroom.experts.prefill import cut_pieces
from headroom.experts.store import runs
from headroom.plan import cost_model
from headroom.plan.cost_model import (
    HAND_OVER_S,
    ColdLayer,
    ColdRates,
    ExpertSize,
    expected_counts,
    expert_flops,
    left_to_cpu,
    most_counted_rows,
    pays_to_count,
)

# An expert of Qwen3.5-35B-A3B on an H200's host.
SIZE = ExpertSize(1_900_000, expert_flops(512, 2048))
RATES = ColdRates(link=55e9, cpu_bandwidth=150e9, cpu_flops=1.5e12)
MEASURED = ColdRates(link=55e9, cpu_bandwidth=77e9, cpu_flops=725e9)


def slower_s(counts: dict[int, int], left: frozenset[int], rates: ColdRates) -> float:
    """When both sides are done."""
    link = sum(SIZE.bytes / rates.link for e, n in counts.items() if n and e not in left)
    read = SIZE.bytes / cost_model.READ_SHARE / rates.cpu_bandwidth
    pick = SIZE.flops / cost_model.FLOPS_SHARE / rates.cpu_flops
    cpu = HAND_OVER_S + sum(max(read, counts[e] * pick) for e in left)
    return max(link, cpu if left else 0.0)


def test_without_a_cpu_nothing_is_left_to_it() -> None:
    counts = dict.fromkeys(range(200), 1)
    assert left_to_cpu(counts, SIZE, RATES)
    assert left_to_cpu(counts, SIZE, RATES.without_cpu) == frozenset()


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


def cold_layer(hits: float, experts: int = 102) -> ColdLayer:
    """A layer of Qwen3.5-35B-A3B of which 102 experts are cold."""
    return ColdLayer(SIZE, experts, 8 * (1 - hits), 2 * 35 * SIZE.bytes)


@pytest.mark.parametrize(
    ("rows", "hits", "with_cpu", "counted"),
    [
        (16, 0.6, False, True),
        (40, 0.6, False, False),
        (128, 0.95, False, True),
        (128, 0.9, False, False),
        (40, 0.6, True, True),
        (128, 0.6, True, False),
        (128, 0.9, True, True),
        (256, 0.9, True, False),
        (256, 0.95, True, True),
        (2048, 0.95, True, False),
    ],
)
def test_steps_wait_for_the_numbers_of_picks_where_cold_experts_have_few(
    rows: int, hits: float, with_cpu: bool, counted: bool
) -> None:
    rates = MEASURED if with_cpu else MEASURED.without_cpu
    assert pays_to_count(rows, cold_layer(hits), rates) == counted


@pytest.mark.parametrize(
    ("rows", "cold", "picks", "counted"),
    [
        # In comments: ms a layer, counted and with all experts copied.
        (512, 102, 34 / 40, False),  # 6.2 and 3.65
        (512, 256, 8.0, False),  # 16.1 and 8.9
        (512, 102, 3.2, False),
        (256, 102, 34 / 40, False),  # 4.5 and 4.1
        (256, 102, 3.2, False),  # 6.0 and 4.0
        (256, 256, 8.0, False),  # 11.3 and 9.9
        (128, 102, 3.2, False),  # 4.4 and 4.0
        (32, 102, 34 / 40, True),  # 2.2 and 4.0
        (32, 102, 3.2, True),  # 3.4 and 4.0
        (32, 256, 8.0, True),  # 5.7 and 9.8
        (128, 256, 8.0, True),  # 8.1 and 9.7
    ],
)
def test_prompts_that_counting_made_slower_are_not_counted_and_small_ones_are(
    rows: int, cold: int, picks: float, counted: bool
) -> None:
    layer = ColdLayer(ExpertSize(1_904_000, SIZE.flops), cold, picks, 2 * 35 * 1_904_000)
    # What calibrate said before and after, on an H200 with 16 cores, 2026-11-16.
    for bandwidth, flops in ((77e9, 725e9), (88e9, 793e9)):
        rates = ColdRates(link=55e9, cpu_bandwidth=bandwidth, cpu_flops=flops)
        assert pays_to_count(rows, layer, rates) == counted


rates_drawn = st.builds(
    ColdRates,
    link=st.floats(1e9, 1e11),
    cpu_bandwidth=st.floats(1e9, 5e11),
    cpu_flops=st.floats(1e10, 1e13),
)
rows_drawn, hits_drawn, experts_drawn = st.integers(33, 4096), st.floats(0, 1), st.integers(1, 256)


@given(
    rows=rows_drawn,
    hits=st.tuples(hits_drawn, hits_drawn),
    experts=experts_drawn,
    rates=rates_drawn,
)
def test_better_statistics_and_a_cpu_never_make_counting_worth_less(
    rows: int, hits: tuple[float, float], experts: int, rates: ColdRates
) -> None:
    worse, better = (cold_layer(share, experts) for share in sorted(hits))
    for one in (rates, rates.without_cpu):
        assert pays_to_count(rows, better, one) >= pays_to_count(rows, worse, one)
    for layer in (worse, better):
        alone = pays_to_count(rows, layer, rates.without_cpu)
        assert pays_to_count(rows, layer, rates) >= alone


@given(rows=rows_drawn, hits=hits_drawn, experts=experts_drawn, rates=rates_drawn)
def test_counting_that_pays_saves_more_than_what_it_costs(
    rows: int, hits: float, experts: int, rates: ColdRates
) -> None:
    layer = cold_layer(hits, experts)
    counts = expected_counts(rows * layer.picks, experts)
    saved = experts * SIZE.bytes / rates.link - slower_s(
        counts, left_to_cpu(counts, SIZE, rates), rates
    )
    lost = min(rows * cost_model.BESIDE_ROW_S, layer.ahead_bytes / rates.link)
    if pays_to_count(rows, layer, rates):
        assert saved > cost_model.READ_BACK_S + cost_model.PREPARE_S + lost


@given(rows=rows_drawn, hits=hits_drawn, experts=experts_drawn, rates=rates_drawn)
def test_a_step_waits_up_to_so_many_rows_and_no_longer(
    rows: int, hits: float, experts: int, rates: ColdRates
) -> None:
    layer = cold_layer(hits, experts)
    assert pays_to_count(rows, layer, rates) == (rows <= most_counted_rows(layer, rates))


def test_where_nothing_is_cold_there_is_nothing_to_wait_for() -> None:
    assert most_counted_rows(cold_layer(1.0, 0), MEASURED) == 0


@given(picks=st.floats(0, 60_000), experts=st.integers(1, 256))
@example(picks=0.625, experts=1)
def test_expected_picks_add_up_to_about_all_and_some_experts_have_none(
    picks: float, experts: int
) -> None:
    counts = expected_counts(picks, experts)
    assert list(counts) == list(range(experts))
    assert list(counts.values()) == sorted(counts.values())
    mean = min(picks / experts, cost_model.MOST_MEAN_PICKS)
    # One expert has the median, which is at most ln 2 from the mean; several come nearer to it.
    assert abs(sum(counts.values()) / experts - mean) <= log(2)
    unused = sum(count == 0 for count in counts.values())
    assert abs(unused - experts * exp(-mean)) <= 1


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
