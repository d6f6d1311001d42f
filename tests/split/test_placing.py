"""Which experts of a planned model are hot: from a file, from statistics, or as many of each."""

import json
import logging
from pathlib import Path

import pytest

from headroom.errors import FormatError, PlanError
from headroom.experts.placement import ExpertPlacement, save_placement
from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import Plan, make_plan
from headroom.plan.shape import ModelShape
from headroom.split.placing import expert_layers, find_placement
from headroom.units import gib
from tests.plan.shapes import cpu, gpu, host, laguna

MODEL = laguna()
DENSE = known_shape("qwen3.6-27b:q4_k_m")
DENSE_FIRST = [()] + [(0, 1)] * 39  # the first layer has no experts


def planned(budget: str = "30%", **more: object) -> tuple[Plan, Options]:
    options = Options(context=2048, parallel=1, expert_budget=budget, **more)  # type: ignore[arg-type]
    return make_plan([MODEL], [gpu(24), host(64)], options), options


def test_without_statistics_every_layer_gets_as_many_and_the_log_tells_the_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan, options = planned()
    with caplog.at_level(logging.INFO):
        placement = find_placement(MODEL, plan, options, "abc")
    assert placement is not None
    assert placement.source == "even"
    counts = [len(ids) for ids in placement.hot]
    assert counts[0] == 0
    assert max(counts[1:]) - min(counts[1:]) <= 1
    assert "experts: cuda:0 has 24.00 GiB: weights without experts " in caplog.text
    assert ", cache " in caplog.text
    assert ", reserve 512.0 MiB, budget for experts " in caplog.text


@pytest.mark.parametrize("budget", ["10%", "31%", "50%", "77.7%", "0%"])
def test_without_statistics_as_many_are_hot_as_the_plan_says(budget: str) -> None:
    plan, options = planned(budget)
    placement = find_placement(MODEL, plan, options, "abc")
    assert placement is not None
    device = plan.devices[0]
    assert tuple(len(ids) for ids in placement.hot) == device.hot_by_layer
    hot_bytes = placement.hot_bytes(expert_layers(MODEL, plan))
    assert hot_bytes == device.allocated.get("hot_experts", 0)


def test_statistics_decide_where_there_are_some() -> None:
    plan, options = planned()
    counts = [[float(i) for i in range(layer.experts)] for layer in MODEL.layers]
    placement = find_placement(MODEL, plan, options, "abc", counts)
    assert placement is not None
    assert placement.source == "statistics"
    assert placement.hot[5][-1] == 255


@pytest.mark.parametrize(
    ("budget", "policy", "least"),
    [("30%", "auto", 32), ("30%", "lru", 32), ("30%", "static", 8), ("10%", "auto", 8)],
)
def test_statistics_leave_every_layer_slots_for_a_cache_where_there_are_caches(
    budget: str, policy: str, least: int
) -> None:
    plan, options = planned(budget, expert_policy=policy)
    # All choices of one layer fall on few experts: other layers have more use for the budget.
    counts = [
        [1e9 * (i < 4 or n > 1) for i in range(x.experts)] for n, x in enumerate(MODEL.layers)
    ]
    placement = find_placement(MODEL, plan, options, "abc", counts)
    assert placement is not None
    assert min(len(ids) for ids in placement.hot[1:]) == len(placement.hot[1]) == least


def test_where_no_expert_is_cold_one_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert find_placement(MODEL, *planned("100%"), "abc") is None
        plan = make_plan([MODEL], [cpu(64)], Options())
        assert find_placement(MODEL, plan, Options(), "abc") is None
    fit, memory, by_cpu = [row.message for row in caplog.records]
    assert fit == "experts: all 9984 fit in GPU memory, none is cold"
    assert memory.startswith("experts: cuda:0 has 24.00 GiB: weights without experts ")
    total = gib(sum(x.experts * x.expert_bytes for x in expert_layers(MODEL, planned("100%")[0])))
    assert memory.endswith(f", budget for experts {total} of {total}")
    assert by_cpu == "experts: all 9984 are computed by the kernels of the CPU"


COLD = {"cold": "gpu", "no_pin": True, "keep_host_copy": True, "swap_every": "64"}
EXCHANGES = {
    "swap_bytes": "1GiB",
    "swap_min_gain": 1.0,
    "swap_false_chance": 1.0,
    "swap_per_layer": 3,
}
GPU = {"device_memory": "40GiB", "expert_budget": "100%"}
COLD_FLAGS = (
    "--cold, --no-pin, --keep-host-copy, --swap-every, --swap-bytes, --swap-min-gain, "
    "--swap-false-chance, --swap-per-layer"
)


@pytest.mark.parametrize(
    ("model", "devices", "level", "told"),
    [
        (MODEL, [cpu(64)], logging.WARNING, "the model runs on the CPU, which has no cold experts: "
         f"--device-memory, --expert-budget, {COLD_FLAGS}"),
        (MODEL, [gpu(48), host(64)], logging.INFO, f"all experts are hot: {COLD_FLAGS}"),
        (DENSE, [gpu(48), host(64)], logging.INFO, "the model has no routed experts: "
         f"--expert-budget, {COLD_FLAGS}"),
    ],
)  # fmt: skip
def test_options_without_effect_are_named(
    model: ModelShape,
    devices: list[DeviceSpec],
    level: int,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = Options(context=2048, parallel=1, **COLD, **EXCHANGES, **GPU)  # type: ignore[arg-type]
    plan = make_plan([model], devices, options)
    with caplog.at_level(logging.INFO):
        assert find_placement(model, plan, options, "abc") is None
    row = caplog.records[0]
    assert (row.levelno, row.message) == (level, f"experts: without effect here, since {told}")


def test_options_that_have_an_effect_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert find_placement(MODEL, *planned(cold="cpu", **EXCHANGES), "abc") is not None
    assert "without effect" not in caplog.text


def test_exchanges_have_no_effect_where_slots_change_hands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = (
        "experts: without effect here, since decode steps fill the slots of experts themselves, "
        "and nothing is exchanged: --swap-every, --swap-bytes"
    )
    given = {"swap_every": "64", "swap_bytes": "1GiB"}
    with caplog.at_level(logging.INFO):
        find_placement(MODEL, *planned(expert_policy="static", **given), "abc")
        assert "without effect" not in caplog.text
        find_placement(MODEL, *planned(**given), "abc")
    row = next(record for record in caplog.records if "without effect" in record.message)
    assert (row.levelno, row.message) == (logging.WARNING, told)


COUNTS = [[float(i) for i in range(layer.experts)] for layer in MODEL.layers]


def test_pins_take_the_most_chosen_experts_and_leave_slots_for_four_tokens() -> None:
    half = find_placement(MODEL, *planned("30%", expert_pin=0.5), "abc", COUNTS)
    assert half is not None
    for hot, pinned in zip(half.hot, half.pinned, strict=True):
        assert pinned == hot[len(hot) - len(pinned) :]
        assert len(pinned) == min(len(hot) // 2, max(0, len(hot) - 32))
    assert half.pinned[5]


@pytest.mark.parametrize(
    ("counts", "more", "why"),
    [
        (None, {}, "there are no routing statistics, which headroom profile makes"),
        (COUNTS, {"expert_policy": "static"}, "no slots change hands within steps"),
        (COUNTS, {"cold": "cpu"}, "no slots change hands within steps"),
    ],
)
def test_pins_without_effect_are_a_warning(
    counts: list[list[float]] | None,
    more: dict[str, str],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    placement = find_placement(MODEL, *planned("30%", expert_pin=0.5, **more), "abc", counts)
    assert placement is not None
    assert placement.pinned == ()
    assert f"experts: --expert-pin has no effect here, since {why}" in caplog.messages


@pytest.mark.parametrize(("copy", "named"), [(False, True), (True, False)])
def test_experts_that_are_held_nowhere_have_no_exchanges_to_choose(
    copy: bool, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given = planned(cold="drop", keep_host_copy=copy, no_pin=True, swap_every="64")
    with caplog.at_level(logging.INFO):
        assert find_placement(MODEL, *given, "abc") is not None
    told = (
        "experts: without effect here, since cold experts are left out and held nowhere: "
        "--no-pin, --swap-every"
    )
    assert (told in caplog.messages) == named


def test_a_file_comes_before_statistics_and_these_tell_what_it_will_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "placement.json"
    save_placement(path, ExpertPlacement(tuple(DENSE_FIRST), "even"), "abc")
    monkeypatch.setenv("HOME", str(tmp_path))
    plan, options = planned(placement="~/placement.json")
    found = find_placement(MODEL, plan, options, "abc")
    assert found is not None
    assert (found.hot, found.source) == (tuple(DENSE_FIRST), str(path))
    assert found.hit_rate(1, 256) == 2 / 256
    counts = [[1.0] * layer.experts for layer in MODEL.layers]
    counts[1][:2] = [1e6, 1e6]
    found = find_placement(MODEL, plan, options, "abc", counts)
    assert found is not None
    assert found.hot == tuple(DENSE_FIRST)
    assert 0.99 < found.hit_rate(1, 256) < 1
    assert found.hit_rate(2, 256) == pytest.approx(2 / 256)


def test_what_a_file_leaves_of_the_budget_is_reported_with_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "placement.json"
    plan, options = planned(placement=str(path))
    layers = expert_layers(MODEL, plan)
    budget = plan.devices[0].allocated["hot_experts"]
    small = ExpertPlacement(tuple(DENSE_FIRST), "even")
    save_placement(path, small, "abc")
    find_placement(MODEL, plan, options, "abc")
    hot = small.hot_bytes(layers)
    assert caplog.messages == [
        f"experts: {path} keeps 78 experts hot, {gib(hot)} of the {gib(budget)} that the plan has "
        f"for them, and {gib(budget - hot)} stay unused; in 39 of 39 layers fewer are hot than a "
        "token visits"
    ]
    # A budget that is used completely is not logged.
    even = find_placement(MODEL, *planned(), "abc")
    assert even is not None
    save_placement(path, even, "abc")
    caplog.clear()
    find_placement(MODEL, plan, options, "abc")
    assert caplog.messages == []


def test_finding_a_placement_saves_none(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    assert find_placement(MODEL, *planned(save_placement=str(path)), "abc") is not None
    assert not path.exists()


def test_the_log_shows_all_bytes_of_experts_whatever_the_host_keeps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan, options = planned(keep_host_copy=True)
    with caplog.at_level(logging.INFO):
        find_placement(MODEL, plan, options, "abc")
    total = sum(layer.experts * layer.expert_bytes for layer in expert_layers(MODEL, plan))
    assert f" GiB of {gib(total)}" in caplog.text


@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_where_all_are_hot_a_named_file_is_read_and_not_used(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "placement.json"
    options = Options(context=2048, parallel=1, placement=str(path))
    devices = [gpu(48), host(64)] if where == "gpu" else [cpu(64)]
    plan = make_plan([MODEL], devices, options)
    with pytest.raises(
        FormatError, match=r"There is no placement file .*placement\.json\. Name another"
    ):
        find_placement(MODEL, plan, options, "abc")
    save_placement(path, ExpertPlacement(tuple(DENSE_FIRST), "even"), "abc")
    with caplog.at_level(logging.INFO):
        assert find_placement(MODEL, plan, options, "abc") is None
    assert f"experts: all are hot, so that {path} is not used" in caplog.text


def test_a_placement_of_another_model_or_a_corrupt_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    plan, options = planned(placement=str(path))
    save_placement(path, ExpertPlacement(tuple(DENSE_FIRST), "even"), "other")
    with pytest.raises(FormatError, match=r"is of another model \(other, not abc\)"):
        find_placement(MODEL, plan, options, "abc")
    path.write_text(json.dumps({"version": 1})[:-3])
    with pytest.raises(FormatError, match=r"placement\.json is not a placement file"):
        find_placement(MODEL, plan, options, "abc")


def test_a_placement_larger_than_the_plan_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    hot = [()] + [tuple(range(200))] * 39
    save_placement(path, ExpertPlacement(tuple(hot), "even"), "abc")
    with pytest.raises(
        PlanError, match=r"keeps 7800 experts hot, 13\.\d+ GiB, and the plan has 5\."
    ):
        find_placement(MODEL, *planned(placement=str(path)), "abc")


def test_a_placement_that_leaves_too_much_to_the_host_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    save_placement(path, ExpertPlacement(tuple(DENSE_FIRST), "even"), "abc")
    options = Options(context=2048, parallel=1, expert_budget="90%", placement=str(path))
    plan = make_plan([MODEL], [gpu(24), host(8)], options)
    with pytest.raises(PlanError, match=r"leaves 17\.\d+ GiB of experts to host memory, and 1\d"):
        find_placement(MODEL, plan, options, "abc")
    dropped = Options(
        context=2048, parallel=1, expert_budget="90%", placement=str(path), cold="drop"
    )  # fmt: skip
    plan = make_plan([MODEL], [gpu(24), host(8)], dropped)
    assert find_placement(MODEL, plan, dropped, "abc") is not None
