"""Who computes cold experts, from measured speeds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.machine.calibration import Speeds, with_speeds
from headroom.plan.cost_model import (
    KERNELS_S,
    OWN_S,
    Choice,
    ColdSpeeds,
    best_left,
    choose,
    expected_seconds,
    forced,
    row_seconds,
    speeds_of,
)
from tests.plan.shapes import gpu, host

H200 = ColdSpeeds(gpu=4.0e12, link=48e9, cpu=120e9, handover_s=8e-6)
EXPERT = 1_900_000

SPEEDS = st.builds(
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


@given(SPEEDS, st.integers(10_000, 100_000_000), st.integers(1, 10), st.floats(0, 1))
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
