"""How long cold experts are expected to take, and what a plan predicts from it."""

from dataclasses import replace

import pytest

from headroom.options import Options
from headroom.plan.cost_model import ColdSpeeds, layer_seconds, usable_speeds
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
