"""The speeds by which prompts divide cold experts follow what was measured."""

from dataclasses import replace

import pytest

from headroom.experts.controller import MOST_FASTER
from headroom.experts.prompt_speeds import LEAST_COPY_BYTES, PROBE_EVERY_S, PromptSpeeds
from headroom.plan.cost_model import ColdSpeeds

START = ColdSpeeds(gpu=3e12, link=50e9, cpu=77e9, handover_s=1e-5, copy=55e9, cpu_flops=700e9)
COPY = 64 << 20


class Clock:
    """A time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def speeds(follows: bool = True, start: ColdSpeeds = START) -> tuple[PromptSpeeds, Clock]:
    clock = Clock()
    return PromptSpeeds(start, follows=follows, clock=clock), clock


def learn(found: PromptSpeeds, slower: float, layers: int) -> None:
    """Let the CPU take so many times the predicted time in some layers."""
    for _ in range(layers):
        found.cpu_took(1e-3, slower * 1e-3)


def test_it_starts_from_the_given_speeds() -> None:
    found, _ = speeds()
    assert found.now == START
    assert (found.cpu_pace, found.link_pace) == (1.0, 1.0)


def test_a_busy_cpu_counts_within_the_layers_of_one_prompt_and_is_forgotten_in_two() -> None:
    found, _ = speeds()
    learn(found, 4.0, layers=10)
    assert found.cpu_pace == pytest.approx(0.25, rel=0.1)
    assert found.now.cpu == pytest.approx(START.cpu * found.cpu_pace)
    assert found.now.cpu_flops == pytest.approx(START.cpu_flops * found.cpu_pace)
    assert found.now.copy == START.copy
    learn(found, 1.0, layers=5)
    assert found.cpu_pace < 0.5  # a pause of another program is no reason to trust it again
    learn(found, 1.0, layers=40)
    assert found.cpu_pace == pytest.approx(1.0, abs=0.1)


def test_a_slow_link_counts_and_small_copies_do_not() -> None:
    found, _ = speeds()
    for _ in range(20):
        found.copied(LEAST_COPY_BYTES - 1, 1.0)
        found.copied(COPY, 0.0)  # never more than twice as fast
    assert found.now.copy == pytest.approx(MOST_FASTER * START.copy, rel=0.2)
    for _ in range(20):
        found.copied(COPY, COPY / 10e9)
    assert found.now.copy == pytest.approx(10e9, rel=0.05)
    assert found.now.cpu == START.cpu


def test_what_decode_steps_learn_meanwhile_counts_for_the_next_prompt() -> None:
    found, _ = speeds()
    pace = 1.0
    found.decode_pace = lambda: pace
    learn(found, 2.0, layers=20)
    assert found.cpu_pace == pytest.approx(0.5, rel=0.05)
    pace = 0.25  # the CPU has become four times as slow
    assert found.cpu_pace == pytest.approx(0.125, rel=0.05)
    learn(found, 4.0, layers=40)  # what the next prompt measures counts for more
    assert found.cpu_pace == pytest.approx(0.25, rel=0.1)
    pace = 1.0
    assert found.cpu_pace == pytest.approx(1.0, rel=0.1)
    pace = 100.0
    assert found.cpu_pace == MOST_FASTER


def test_a_cpu_that_gets_nothing_is_tried_now_and_then() -> None:
    found, clock = speeds()
    assert not found.probe_due
    clock.now_s += PROBE_EVERY_S
    assert found.probe_due
    found.cpu_took(1e-3, 1.0)
    assert not found.probe_due
    clock.now_s += 0.9 * PROBE_EVERY_S
    assert not found.probe_due


@pytest.mark.parametrize(
    ("follows", "start"), [(False, START), (True, replace(START, cpu=0.0, cpu_flops=0.0))]
)
def test_fixed_ways_and_machines_without_cpu_kernels_follow_nothing(
    follows: bool, start: ColdSpeeds
) -> None:
    found, clock = speeds(follows, start)
    clock.now_s += 10 * PROBE_EVERY_S
    learn(found, 9.0, layers=20)
    found.copied(COPY, 1.0)
    assert found.now == start
    assert not found.probe_due


def test_a_part_without_work_says_nothing() -> None:
    found, _ = speeds()
    found.cpu_took(0.0, 1.0)
    assert found.cpu_pace == 1.0
