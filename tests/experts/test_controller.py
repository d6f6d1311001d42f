"""The CPU's share of cold experts follows its real speed, soon, and back, without swinging."""

import random
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest

from headroom.experts.controller import (
    MIN_REQUESTS,
    PROBE_FIRST_S,
    PROBE_MOST_S,
    GroupController,
    GroupShape,
    GroupTotals,
    ShareController,
)
from headroom.plan.cost_model import (
    HANDOVER_KERNELS_S,
    HOT_KERNELS_S,
    ColdSpeeds,
    link_shares,
)

# Qwen3.5-35B-A3B in Q4_K_M on an H200 with 16 cores, 40 % of the experts hot.
SHAPE = GroupShape(expert_bytes=1_800_000, used=8, most=256, hit_rate=0.4)
SPEEDS = ColdSpeeds(gpu=3e12, link=50e9, cpu=77e9, handover_s=10e-6)
LAYERS, OTHER_S = 40, 1.6e-3  # layers of a step, and the time of all its other parts
READ_EVERY_S = 0.05


@dataclass
class Now:
    """How fast a simulated CPU is at a moment."""

    cpu: float = 77e9
    handover_s: float = 10e-6


class Machine:
    """A simulated GPU and CPU that run decode steps with the tables of a controller."""

    def __init__(self, now: Callable[[float], Now], noise: float = 0.05, seed: int = 0) -> None:
        self._now, self._noise, self._random = now, noise, random.Random(seed)
        self.time_s = 0.0
        self.totals = GroupTotals(
            steps=0,
            requests=0,
            cpu_experts=0,
            cpu_s=0.0,
            gpu_s=0.0,
            gpu_experts=0,
            lates=0,
            late_s=0.0,
        )

    def step(self, table: tuple[int, ...], scout: tuple[int, ...]) -> float:
        """Run a step, whose first layer uses another table; return its time."""
        step_s = OTHER_S
        for layer in range(LAYERS):
            step_s += HANDOVER_KERNELS_S + self._layer(scout if layer == 0 else table)
        self.time_s += step_s
        return step_s

    def _layer(self, table: tuple[int, ...]) -> float:
        now, used, size = self._now(self.time_s), SHAPE.used, SHAPE.expert_bytes
        cold = sum(self._random.random() > SHAPE.hit_rate for _ in range(used))
        kept = table[cold]
        gpu_s = HOT_KERNELS_S + (used - cold) * size / SPEEDS.gpu + kept * size / SPEEDS.link
        old, asked = self.totals, cold > kept
        busy_s = (cold - kept) * size / now.cpu * self._random.lognormvariate(0.0, self._noise)
        delay_s = now.handover_s * self._random.lognormvariate(0.0, self._noise)
        late = asked and delay_s + busy_s > gpu_s
        self.totals = GroupTotals(
            steps=old.steps + 1,
            requests=old.requests + asked,
            cpu_experts=old.cpu_experts + cold - kept,
            cpu_s=old.cpu_s + busy_s * asked,
            gpu_s=old.gpu_s + gpu_s * asked,
            gpu_experts=old.gpu_experts + kept,
            lates=old.lates + late,
            late_s=old.late_s + delay_s * late,
        )
        return max(gpu_s, delay_s + busy_s) if asked else gpu_s


@dataclass
class Run:
    """What happened in a simulated time."""

    steps: int
    seconds: float
    changes: int  # of the table

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


def run(machine: Machine, control: GroupController, seconds: float) -> Run:
    """Let a machine run steps, and the controller read its counters now and then."""
    until, begun, steps, changes = machine.time_s + seconds, machine.time_s, 0, 0
    read_at = machine.time_s
    while machine.time_s < until:
        machine.step(control.table, control.probe_table if control.probing else control.table)
        steps += 1
        if machine.time_s - read_at >= READ_EVERY_S:
            before, read_at = control.table, machine.time_s
            control.update(machine.time_s, machine.totals)
            changes += control.table != before
    return Run(steps, machine.time_s - begun, changes)


def fixed(now: Now, table: tuple[int, ...], noise: float = 0.05) -> float:
    """Return the mean time of a step with a table that never changes."""
    machine = Machine(lambda time_s: now, noise, seed=1)
    return sum(machine.step(table, table) for _ in range(200)) / 200


ALL_LINK = tuple(range(SHAPE.most + 1))
ALL_CPU = (0,) * (SHAPE.most + 1)


def best_fixed(now: Now) -> float:
    """Return the mean time of a step with the better of all on the link and all on the CPU."""
    by_gpu_alone = fixed(now, ALL_LINK) - LAYERS * HANDOVER_KERNELS_S  # it needs no such kernels
    return min(by_gpu_alone, fixed(now, ALL_CPU))


def test_it_starts_from_the_given_speeds() -> None:
    control = GroupController(SHAPE, SPEEDS)
    assert control.table == link_shares(SPEEDS, SHAPE.expert_bytes, SHAPE.used, SHAPE.most)
    assert control.pace == pytest.approx(1.0)
    assert control.speeds.cpu == pytest.approx(SPEEDS.cpu)
    assert control.speeds.handover_s == SPEEDS.handover_s
    # The CPU is a half faster than the link, so it gets about three fifths.
    assert control.share == pytest.approx(0.6, abs=0.07)


@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_on_a_quiet_machine_the_share_stays(noise: float) -> None:
    for seed in range(2):
        machine = Machine(lambda time_s: Now(), noise, seed)
        control = GroupController(SHAPE, SPEEDS)
        found = run(machine, control, 15.0)
        assert found.changes <= 1
        assert found.step_s < best_fixed(Now())


BUSY = (
    Now(cpu=30e9),
    Now(cpu=17e9, handover_s=30e-6),
    Now(cpu=4e9, handover_s=2e-3),  # 12 of 16 cores are lost, and threads wait for their turn
)


@pytest.mark.parametrize("busy", BUSY)
def test_it_follows_a_machine_that_others_use_and_comes_back(busy: Now) -> None:
    machine = Machine(lambda time_s: busy if 5.0 <= time_s < 20.0 else Now())
    control = GroupController(SHAPE, SPEEDS)
    quiet = run(machine, control, 5.0)
    first = control.share
    run(machine, control, 1.0)  # within a second it has changed its mind
    held = run(machine, control, 14.0)
    low = control.share
    run(machine, control, 10.0)
    again = run(machine, control, 10.0)
    assert low < first - 0.2
    assert held.step_s < best_fixed(busy) / 0.95
    assert held.changes <= 1
    assert control.share == pytest.approx(first, abs=0.1)
    assert again.step_s < 1.03 * quiet.step_s
    assert again.changes <= 1


@pytest.mark.parametrize("period_s", [0.1, 1.0, 4.0])
def test_a_neighbour_that_comes_and_goes_costs_less_than_the_link_alone(period_s: float) -> None:
    def now(time_s: float) -> Now:
        return BUSY[1] if time_s % period_s < period_s / 2 else Now()

    machine, control = Machine(now), GroupController(SHAPE, SPEEDS)
    found = run(machine, control, 12.0)
    assert found.step_s < fixed(Now(), ALL_LINK) - LAYERS * HANDOVER_KERNELS_S


def test_a_speed_below_the_calibrated_one_for_good_makes_few_changes() -> None:
    for handover_s in (5e-6, 50e-6, 200e-6):
        always = Now(cpu=50e9, handover_s=handover_s)
        machine = Machine(partial(lambda now, time_s: now, always), noise=0.3)
        control = GroupController(SHAPE, SPEEDS)
        run(machine, control, 4.0)
        assert run(machine, control, 12.0).changes <= 1
        assert control.speeds.cpu == pytest.approx(50e9, rel=0.15)


def drawn_day(seed: int, seconds: float) -> Callable[[float], Now]:
    """Return how fast the CPU is while other programs come and go at random times."""
    draw = random.Random(seed)
    begins, states = [0.0], [Now()]
    while begins[-1] < seconds:
        busy = Now(cpu=77e9 * draw.uniform(0.05, 0.7), handover_s=draw.choice((10e-6, 30e-6, 1e-3)))
        states.append(Now() if states[-1].cpu < 77e9 else busy)
        begins.append(begins[-1] + draw.choice((0.05, 0.3, 1.0, 5.0)) * draw.uniform(0.5, 1.5))
    return lambda time_s: states[bisect(begins, time_s) - 1]


def kept_table(now: Callable[[float], Now], table: tuple[int, ...], seconds: float) -> float:
    """Return the mean time of a step with a table that never changes."""
    machine, steps = Machine(now), 0
    while machine.time_s < seconds:
        machine.step(table, table)
        steps += 1
    return machine.time_s / steps


@pytest.mark.parametrize("seed", range(6))
def test_whatever_others_do_it_costs_at_most_a_twentieth_more_than_the_better_fixed_way(
    seed: int,
) -> None:
    now, seconds = drawn_day(seed, 15.0), 12.0
    control = GroupController(SHAPE, SPEEDS)
    by_calibration = kept_table(now, control.table, seconds)
    by_link = kept_table(now, ALL_LINK, seconds) - LAYERS * HANDOVER_KERNELS_S
    found = run(Machine(now), control, seconds)
    assert found.step_s < 1.05 * min(by_calibration, by_link)


def totals(**counts: float) -> GroupTotals:
    """Return totals of which those that are not given are 0."""
    zeros = dict.fromkeys(
        ("steps", "requests", "cpu_experts", "cpu_s", "gpu_s", "gpu_experts", "lates", "late_s"), 0
    )
    return GroupTotals(**zeros | counts)  # type: ignore[arg-type]


SLOW_CPU = replace(SPEEDS, cpu=1e9)


def test_a_cpu_that_gets_nothing_is_asked_now_and_then_by_one_layer() -> None:
    control = GroupController(SHAPE, SLOW_CPU)
    few = SHAPE.used + 1  # a single row has no more cold experts
    assert control.table[:few] == ALL_LINK[:few]
    assert control.probe_table[:few] == (0, *range(SHAPE.used))
    at_s, probes = 0.0, []
    read = totals()
    control.update(at_s, read)
    while at_s < 60.0:
        at_s += READ_EVERY_S
        read = replace(read, steps=read.steps + LAYERS, gpu_experts=read.gpu_experts + 100)
        if control.probing:  # the CPU is as slow as before
            probes.append(at_s)
            read = replace(
                read,
                requests=read.requests + MIN_REQUESTS,
                cpu_experts=read.cpu_experts + MIN_REQUESTS,
                cpu_s=read.cpu_s + MIN_REQUESTS * SHAPE.expert_bytes / SLOW_CPU.cpu,
            )
        changed = control.update(at_s, read)
        assert control.table[:few] == ALL_LINK[:few]
        assert not changed or control.probing == (probes[-1:] != [at_s])
    gaps = [after - before for before, after in pairwise(probes)]
    assert gaps[0] == pytest.approx(2 * PROBE_FIRST_S, abs=2 * READ_EVERY_S)
    assert gaps[-1] == pytest.approx(PROBE_MOST_S, abs=2 * READ_EVERY_S)
    assert 8 <= len(probes) <= 12


def test_readings_without_new_steps_or_with_few_requests_change_nothing() -> None:
    control = GroupController(SHAPE, SPEEDS)
    first, read = control.table, totals(steps=40, requests=1, cpu_experts=1, cpu_s=10.0)
    assert not control.update(0.0, totals(steps=4, requests=99, cpu_experts=99, cpu_s=99.0))
    control = GroupController(SHAPE, SPEEDS)
    assert not control.update(0.0, totals())
    assert not control.update(100.0, totals())
    assert not control.update(0.4, read)
    assert (control.table, control.pace) == (first, pytest.approx(1.0))


def test_a_link_whose_time_is_measured_is_followed_too() -> None:
    control = GroupController(SHAPE, SPEEDS)
    control.update(0.0, totals())
    for turn in range(1, 40):
        busy_s = 100 * turn * SHAPE.expert_bytes / SPEEDS.cpu
        read = totals(steps=40 * turn, requests=40 * turn, cpu_experts=100 * turn, cpu_s=busy_s)
        read = replace(read, gpu_experts=100 * turn, link_bytes=10**9 * turn, link_s=0.1 * turn)
        control.update(0.2 * turn, read)
    assert control.speeds.link == pytest.approx(10e9, rel=0.05)
    assert control.share > 0.7


def test_groups_have_tables_of_their_own() -> None:
    large = replace(SHAPE, expert_bytes=4 * SHAPE.expert_bytes)
    control = ShareController([SHAPE, large], SPEEDS)
    assert [group.shape for group in control.groups] == [SHAPE, large]
    control.update(0.0, [totals()] * 2)
    slow = totals(steps=99, requests=99, cpu_experts=99, cpu_s=1.0, lates=99, late_s=1e-3)
    usual = replace(slow, cpu_s=99 * large.expert_bytes / SPEEDS.cpu)
    assert control.update(1.0, [slow, usual]) == [0]
    assert control.groups[0].pace < 0.5
    assert control.groups[1].pace == pytest.approx(1.0)
    assert control.share == sum(group.share for group in control.groups) / 2
    assert control.pace == sum(group.pace for group in control.groups) / 2
