"""Budgets of hot experts: what a plan keeps, and what it refuses before an engine would."""

import pytest

from headroom.errors import OptionError, PlanError
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import Plan, make_plan
from headroom.plan.shape import ModelShape
from headroom.split.placing import even_placement
from tests.plan.shapes import cpu, gpu, host, laguna

GEMMA, QWEN = "gemma-4-26b-a4b:q4_k_m", "qwen3.6-35b-a3b:q4_k_m"


def planned(model: ModelShape, gibibytes: float, **settings: object) -> Plan:
    return make_plan([model], [gpu(gibibytes), host(64)], Options(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "gibibytes"), [(GEMMA, 3.5), (QWEN, 2.5)])
def test_less_room_than_one_token_visits_keeps_all_experts_cold(
    name: str, gibibytes: float
) -> None:
    model = known_shape(name)
    plan = planned(model, gibibytes)
    assert (plan.fits, plan.devices[0].hot_experts) == (True, 0)
    assert any(note.startswith("all experts are cold: as many as") for note in plan.notes)
    assert even_placement(model, plan).total == 0


@pytest.mark.parametrize("gibibytes", [2.5, 2.75, 3, 3.25, 3.5])
def test_an_engine_places_what_any_plan_found(gibibytes: float) -> None:
    model = known_shape(QWEN)
    plan = planned(model, gibibytes)
    counts = {len(ids) for ids in even_placement(model, plan).hot}  # no budget is refused
    if plan.devices[0].hot_experts:
        assert min(counts) >= 8 <= min(plan.devices[0].hot_by_layer)
    else:
        assert counts == {0}


def test_a_budget_below_the_floor_is_refused_by_the_plan() -> None:
    with pytest.raises(PlanError) as refused:
        planned(known_shape(QWEN), 24, expert_budget="512MiB")
    assert str(refused.value) == (
        "8 hot experts in each of 40 layers need 581.2 MiB and the budget for experts is "
        "512.0 MiB. Raise --expert-budget, or keep all experts cold with --expert-budget 0%."
    )
    assert refused.value.param == "expert_budget"


def test_a_budget_of_nothing_is_no_mistake_and_a_cpu_holds_all_whatever_it_is() -> None:
    plan = planned(known_shape(QWEN), 24, expert_budget="0%")
    assert plan.devices[0].hot_experts == 0
    assert not any("all experts are cold" in note for note in plan.notes)
    small = Options(expert_budget="1%")
    assert make_plan([known_shape(QWEN)], [cpu(64)], small).devices[0].hot_experts == 10240


def test_all_of_a_model_that_tiles_pad_is_all_hot() -> None:
    plan = planned(known_shape(GEMMA), 80, expert_budget="100%")
    assert plan.devices[0].hot_experts == plan.devices[0].total_experts == 3840


def test_a_gpu_does_not_read_what_is_not_pinned() -> None:
    asked = {"cold": "gpu", "no_pin": True}
    with pytest.raises(OptionError, match=r"--cold gpu needs pinned memory") as refused:
        planned(laguna(), 12, **asked)
    assert refused.value.param == "cold"
    assert planned(laguna(), 24, **asked).fits  # nothing is cold


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ("60", "--expert-budget is '60', a number without a unit. Write 60% or 60GiB."),
        ("120%", "--expert-budget is '120%'. Write 0% to 100%, or a size as 8GiB."),
        (
            "lots",
            "--expert-budget is 'lots', which is not a size. "
            "Write a number and a unit, as in 24GiB, 512MiB or 8GB.",
        ),
    ],
)
def test_a_value_that_is_no_budget_is_refused_by_the_name_of_its_option(
    budget: str, told: str
) -> None:
    with pytest.raises(OptionError) as refused:
        planned(laguna(), 24, expert_budget=budget)
    assert (str(refused.value), refused.value.param) == (told, "expert_budget")


def test_an_expert_budget_of_0_needs_no_unit() -> None:
    assert planned(laguna(), 24, expert_budget="0").devices[0].hot_experts == 0


@pytest.mark.parametrize("setting", ["ram", "device", "device_memory"])
def test_sizes_of_devices_are_refused_by_their_names(setting: str) -> None:
    flag = setting.replace("_", "-")
    for text, told in (("24", "a number without a unit"), ("24 XB", "which is not a size")):
        with pytest.raises(OptionError, match=f"--{flag} is '{text}', {told}") as refused:
            plan_devices(Options(**{setting: text}))
        assert refused.value.param == setting


def test_a_size_of_snapshots_is_refused_by_its_name() -> None:
    with pytest.raises(
        OptionError, match=r"--cache-ram is '4', a number without a unit"
    ) as refused:
        planned(laguna(), 24, cache_ram="4")
    assert refused.value.param == "cache_ram"
