"""The cost model: who computes cold experts, by the seconds that each way takes."""

from dataclasses import replace
from math import exp, log

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headroom.machine.calibration import Speeds, with_speeds
from headroom.options import Options
from headroom.plan import cost_model
from headroom.plan.cost_model import (
    HAND_OVER_S,
    KERNELS_S,
    OWN_S,
    Choice,
    ColdLayer,
    ColdRates,
    ColdSpeeds,
    ExpertSize,
    best_left,
    choose,
    expected_counts,
    expected_seconds,
    expert_flops,
    forced,
    layer_seconds,
    left_to_cpu,
    most_counted_rows,
    pays_to_count,
    row_seconds,
    speeds_of,
    usable_speeds,
)
from headroom.plan.plan import Plan, make_plan
from tests.plan.shapes import gpu, host, laguna

SPEEDS = ColdSpeeds(gpu=1e12, link=4e10, cpu=6e10, handover_s=1e-5, copy=5e10)


def test_link_and_cpu_share_what_is_cold() -> None:
    # The link alone until the CPU was reached, then both.
    worker, seconds = layer_seconds(SPEEDS, 4e6)
    assert worker == "both"
    assert 4e10 * seconds + 6e10 * (seconds - 1e-5) == pytest.approx(4e6)


def test_a_cpu_is_not_asked_for_what_the_link_has_read_by_then() -> None:
    assert layer_seconds(SPEEDS, 3e5) == ("link", 3e5 / 4e10)


@pytest.mark.parametrize(
    ("cold", "pinned", "worker", "seconds"),
    [
        ("gpu", True, "link", 1e-4),
        ("cpu", True, "cpu", 1e-5 + 4e6 / 6e10),
        ("auto", False, "cpu", 1e-5 + 4e6 / 6e10),
    ],
)
def test_a_path_that_was_asked_for_works_alone(
    cold: str, pinned: bool, worker: str, seconds: float
) -> None:
    found = layer_seconds(usable_speeds(SPEEDS, cold, pinned), 4e6)
    assert found == (worker, pytest.approx(seconds))


def test_without_cpp_kernels_the_link_is_all_there_is() -> None:
    without = replace(SPEEDS, cpu=0.0)
    for cold in ("auto", "gpu"):
        assert layer_seconds(usable_speeds(without, cold, True), 4e6)[0] == "link"


def hybrid(**settings: object) -> Plan:
    """Some cold experts, on a machine that was measured."""
    card = replace(gpu(12), link=5e10, link_read=4e10, handover_s=1e-5, measured=True)
    behind = replace(host(64), native=True, experts=6e10, measured=True)
    return make_plan([laguna()], [card, behind], Options(**settings))  # type: ignore[arg-type]


def test_a_plan_predicts_what_both_sides_reach_together() -> None:
    speed = {
        cold: hybrid(cold=cold, expert_budget="30%").predicted.decode_tokens_per_s
        for cold in ("auto", "gpu", "cpu", "drop")
    }
    assert speed["drop"] > speed["auto"] > max(speed["gpu"], speed["cpu"])
    plan = hybrid(expert_budget="30%")
    assert plan.predicted.bound_by == "link of cuda:0 and memory of the host"
    assert not plan.predicted.estimate


def test_memory_that_is_not_pinned_is_the_cpus_alone() -> None:
    plan = hybrid(expert_budget="30%", no_pin=True)
    assert plan.predicted.bound_by == "memory of the host"


def test_prompts_wait_for_all_cold_experts_once_a_chunk() -> None:
    plans = [hybrid(expert_budget="0%", chunk=chunk) for chunk in (512, 1024)]
    cold = next(line.bytes for line in plans[0].host.lines if line.name == "cold_experts")
    short, long = (plan.predicted.prefill_tokens_per_s for plan in plans)
    assert long == pytest.approx(1024 * 5e10 / cold, rel=1e-3)
    assert long == pytest.approx(2 * short, rel=1e-2)


H200 = ColdSpeeds(gpu=4.0e12, link=48e9, cpu=120e9, handover_s=8e-6)
EXPERT = 1_900_000

ANY_SPEEDS = st.builds(
    ColdSpeeds,
    gpu=st.floats(1e11, 1e13),
    link=st.floats(1e9, 1e11),
    cpu=st.floats(1e9, 1e12),
    handover_s=st.floats(1e-6, 1e-3),
)


def test_the_gpu_takes_a_few_of_many_cold_picks() -> None:
    assert best_left(H200, EXPERT, 8) == (0, 0, 0, 1, 1, 1, 1, 2, 2)


def test_time_is_that_of_the_slower_side() -> None:
    assert row_seconds(H200, EXPERT, 8, 0, 0) == pytest.approx(OWN_S + 8 * EXPERT / 4e12)
    assert row_seconds(H200, EXPERT, 5, 3, 0) == pytest.approx(8e-6 + 3 * EXPERT / 120e9)
    assert row_seconds(H200, EXPERT, 0, 3, 3) == pytest.approx(OWN_S + 3 * EXPERT / 48e9)


def test_a_machine_with_a_slow_cpu_reads_over_the_link() -> None:
    found = choose(ColdSpeeds(4e12, 48e9, 10e9, 20e-6), EXPERT, 8, 0.9)
    assert found.path == "gpu"
    assert found.left == tuple(range(9))


def test_memory_that_a_gpu_cannot_read_is_left_to_the_cpu() -> None:
    found = choose(ColdSpeeds(4e12, 0.0, 10e9, 20e-6), EXPERT, 8, 0.6)
    assert (found.path, found.left) == ("cpu", (0,) * 9)


def test_no_kernels_of_the_cpu_leave_all_to_the_gpu() -> None:
    assert choose(ColdSpeeds(4e12, 48e9, 0.0, 20e-6), EXPERT, 8, 0.6).path == "gpu"


def test_a_layer_that_is_seldom_cold_is_not_worth_two_kernels() -> None:
    assert choose(H200, EXPERT, 8, 0.999).path == "gpu"
    assert choose(H200, EXPERT, 8, 0.6).path == "cpu"


def test_a_path_that_was_asked_for_is_taken() -> None:
    assert forced("gpu", 2).left == (0, 1, 2)
    assert forced("cpu", 2).left == (0, 0, 0)
    assert forced("drop", 2).left == (0, 0, 0)


@given(ANY_SPEEDS, st.integers(10_000, 100_000_000), st.integers(1, 10), st.floats(0, 1))
def test_the_choice_is_never_slower_than_either_path(
    speeds: ColdSpeeds, size: int, used: int, hit_rate: float
) -> None:
    found = choose(speeds, size, used, hit_rate)
    assert all(0 <= left <= cold for cold, left in enumerate(found.left))

    def seconds(choice: Choice) -> float:
        kernels = KERNELS_S if choice.path == "cpu" else 0.0
        return kernels + expected_seconds(speeds, size, hit_rate, choice.left)

    for path in ("gpu", "cpu"):
        assert seconds(found) <= seconds(forced(path, used)) * (1 + 1e-9)


def test_what_was_measured_comes_before_what_is_listed() -> None:
    card = gpu(80)
    cpu = replace(host(64), native=True, bandwidth=100e9, flops=1e12)
    guessed = speeds_of(card, cpu)
    assert guessed.link == guessed.copy == pytest.approx(card.link * 0.7)
    assert guessed.cpu == pytest.approx(70e9)
    assert guessed.gpu == pytest.approx(card.bandwidth * 0.7)
    assert guessed.cpu_flops == pytest.approx(0.2 * 0.7e12)
    rows = {
        card.name: Speeds(
            1.0, 52e9, 3.0, "", link_read=48e9, handover_s=7e-6, total_bytes=card.total_bytes
        ),
        "cpu": Speeds(1.0, 0.0, 2e12, "", experts=110e9, expert_flops=9e11),
    }
    card, cpu = with_speeds([card, cpu], rows)
    found = speeds_of(card, cpu)
    assert (found.link, found.cpu, found.handover_s) == (48e9, 110e9, 7e-6)
    assert (found.copy, found.cpu_flops, found.gpu) == (52e9, 9e11, 1.0)
    assert speeds_of(card, replace(cpu, native=False)).cpu == 0.0


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
