"""Predicted speeds are the times of the ways that an engine takes, by the same cost model."""

from dataclasses import replace

import pytest

from headroom.experts.layer_store import BlobLayout
from headroom.experts.placement import even_experts
from headroom.experts.store import StoreRequest, decode_choices
from headroom.formats.quants import BY_NAME
from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.plan.cost_model import (
    WORKER_HANDOVER_S,
    WORKER_STEP_S,
    ColdLayer,
    DecodeChoice,
    ExpertSize,
    cold_seconds,
    cold_speeds_of,
    decode_speeds,
    memory_rate,
    pays_to_count,
    prefill_seconds,
    prefill_speeds,
)
from headroom.plan.experts import STREAM_BUFFERS, buffer_bytes
from headroom.plan.known import known_shape
from headroom.plan.layout import Layout
from headroom.plan.lines import embed_bytes, head_bytes
from headroom.plan.plan import Plan, make_plan
from headroom.plan.predict import Prediction, StagePrediction, StepCost, predict
from headroom.plan.settings import PlanStage
from headroom.plan.sharing import PICOSECONDS, layer_times
from tests.plan.shapes import cpu, gpu, host, hybrid_plan, laguna, smollm2, stages_of

CARD = replace(gpu(12), link=5e10, link_read=4e10, handover_s=1e-5, measured=True)
CPU = replace(host(64), native=True, experts=6e10, expert_flops=7e11, measured=True)


def plan_with(**settings: object) -> Plan:
    """Some cold experts, on a machine that was measured."""
    return make_plan([laguna()], [CARD, CPU], Options(**settings))  # type: ignore[arg-type]


def test_a_plan_predicts_what_both_sides_reach_together() -> None:
    speed = {
        cold: plan_with(cold=cold, expert_budget="30%").predicted.decode_tokens_per_s
        for cold in ("auto", "gpu", "cpu", "drop")
    }
    assert speed["drop"] > speed["auto"] > max(speed["gpu"], speed["cpu"])
    plan = plan_with(expert_budget="30%")
    assert plan.predicted.bound_by == "link of cuda:0 and memory of the host"
    assert not plan.predicted.estimate


def test_memory_that_is_not_pinned_is_the_cpus_alone() -> None:
    plan = plan_with(expert_budget="30%", no_pin=True)
    assert plan.predicted.bound_by == "memory of the host"


def test_prompts_wait_for_all_cold_experts_once_a_chunk() -> None:
    plans = [plan_with(expert_budget="0%", chunk=chunk) for chunk in (512, 1024)]
    cold = next(line.bytes for line in plans[0].host.lines if line.name == "cold_experts")
    short, long = (plan.predicted.prefill_tokens_per_s for plan in plans)
    assert long == pytest.approx(1024 * 5e10 / cold, rel=1e-3)
    assert long == pytest.approx(2 * short, rel=1e-2)


@pytest.mark.parametrize("name", ["gemma-4-e4b", "qwen3.5-27b", "qwen3-30b-a3b"])
def test_layers_are_shared_by_the_times_that_are_predicted(name: str) -> None:
    model = known_shape(f"{name}:q4_k_m")
    devices = [gpu(24), replace(gpu(24, "cuda:1"), bandwidth=4e11), host(64)]
    plan = make_plan([model], devices, Options(context=20000))
    held = model.in_tiles()
    head = (embed_bytes if model.tied else head_bytes)(held, plan.settings)
    seconds = [0.0, head / memory_rate(devices[1])]
    for number, part in enumerate(plan.devices):
        assert part.hot_experts == part.total_experts
        times = layer_times(PlanStage(devices[number], part.settings, held))
        seconds[number] += sum(times[part.layers.first : part.layers.last + 1]) / PICOSECONDS
    found = plan.predicted
    assert 1 / found.decode_tokens_per_s == pytest.approx(sum(seconds), rel=1e-6)
    assert [stage.decode_s for stage in found.stages] == pytest.approx(seconds, rel=1e-6)
    shares = [found.decode_share(stage) for stage in found.stages]
    assert shares == pytest.approx([x / sum(seconds) for x in seconds], rel=1e-6)


def engine_choices(plan: Plan) -> list[DecodeChoice | None]:
    """What the store of an engine decides for the layers of a plan."""
    assert plan.cold_speeds is not None
    layouts = [
        BlobLayout(
            experts=layer.experts,
            kinds=(BY_NAME["q4_k"],) * 3,
            width=layer.expert_width,
            hidden=2048,
            used=layer.experts_used,
            sizes=(layer.expert_bytes, 0, 0),
            tiles=True,
        )
        if layer.experts
        else None
        for layer in laguna().in_tiles().layers
    ]
    request = StoreRequest(
        placement=even_experts(plan.devices[0].hot_by_layer),
        cold=plan.settings.cold,
        speeds=plan.cold_speeds,
        pin=True,
        keep_copy=False,
        staging_bytes=0,
    )
    return decode_choices(layouts, request, pinned=plan.settings.pin_experts)


def step_s(plan: Plan, devices: list[DeviceSpec]) -> float:
    """The predicted seconds of a token of this layout on other devices."""
    layout = Layout(plan.devices, plan.host)
    stages = stages_of(laguna().in_tiles(), devices, plan.settings)
    found = predict(stages, devices, layout)
    return 1 / found.decode_tokens_per_s


@pytest.mark.parametrize("budget", ["0%", "10%", "30%", "60%"])
@pytest.mark.parametrize(
    ("settings", "cpu"),
    [
        ({}, CPU),
        ({"no_pin": True}, CPU),
        ({"cold": "gpu"}, CPU),
        ({"cold": "cpu"}, CPU),
        ({"cold": "drop"}, CPU),
        ({}, replace(CPU, native=False)),
        ({}, replace(CPU, experts=2e9)),
        ({}, replace(CPU, experts=0.0, measured=False)),
    ],
    ids=["auto", "no-pin", "gpu", "cpu", "drop", "no C++", "slow CPU", "listed"],
)
def test_predicted_seconds_of_cold_experts_are_those_of_the_choice_that_an_engine_makes(
    budget: str, settings: dict[str, object], cpu: DeviceSpec
) -> None:
    options = Options(expert_budget=budget, **settings)  # type: ignore[arg-type]
    plan = make_plan([laguna()], [CARD, cpu], options)
    speeds = decode_speeds(cold_speeds_of(CARD, cpu), options.cold, not options.no_pin)
    choices = engine_choices(plan)
    hot = plan.devices[0].hot_by_layer
    cold_s = sum(
        cold_seconds(speeds, layer.expert_bytes, count / layer.experts, choice)
        for layer, count, choice in zip(laguna().in_tiles().layers, hot, choices, strict=True)
        if choice is not None
    )
    # A link of no cost leaves the seconds of all that is not cold.
    free = replace(CARD, link=1e30, link_read=1e30)
    without_s = step_s(plan, [free, replace(cpu, native=False)])
    assert step_s(plan, [CARD, cpu]) - without_s == pytest.approx(cold_s, rel=1e-6, abs=1e-12)
    assert 1 / plan.predicted.decode_tokens_per_s == pytest.approx(step_s(plan, [CARD, cpu]))
    assert (cold_s > 1e-12) == (options.cold != "drop")


@pytest.mark.parametrize("chunk", [48, 512])
@pytest.mark.parametrize("cold", ["auto", "gpu"])
def test_predicted_seconds_of_prompts_are_those_of_the_way_that_the_prefill_rule_takes(
    chunk: int, cold: str
) -> None:
    plan = plan_with(expert_budget="0%", chunk=chunk, cold=cold)
    speeds = prefill_speeds(cold_speeds_of(CARD, CPU), cold)
    total = 0.0
    for layer in laguna().in_tiles().layers:
        if layer.experts:
            expected = ColdLayer(
                size=ExpertSize(layer.expert_bytes, 2 * layer.expert_values),
                experts=layer.experts,
                picks=layer.experts_used,
                ahead_bytes=STREAM_BUFFERS * buffer_bytes(layer.expert_bytes, layer.experts),
            )
            assert pays_to_count(chunk, expected, speeds) == (chunk == 48 and cold == "auto")
            total += prefill_seconds(chunk, expected, speeds)
    assert chunk / plan.predicted.prefill_tokens_per_s == pytest.approx(total)


def test_plain_kernels_of_a_cpu_unpack_packed_weights_at_every_step() -> None:
    def speed(native: bool, **options: str) -> float:
        device = replace(cpu(8), native=native)
        chosen = Options(context=64, dtype="f32", **options)  # type: ignore[arg-type]
        return make_plan([smollm2()], [device], chosen).predicted.decode_tokens_per_s

    plain = speed(native=False, weights="packed")
    assert speed(native=True, kernels="reference", weights="packed") == plain
    # Plain kernels also write and read 32 bits a value.
    model = smollm2()
    assert model.tied
    values = sum(layer.core_values for layer in model.layers) + model.embed_values
    more_s = 1 / plain - 1 / speed(native=True, weights="packed")
    assert more_s == pytest.approx(2 * 4 * values / memory_rate(cpu(8)), rel=1e-3)
    unpacked = speed(native=True, kernels="reference", weights="unpacked")
    assert unpacked == speed(native=False, weights="unpacked") > 1.5 * plain


def test_decode_speed_is_bandwidth_over_bytes() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options(context=256, parallel=1))
    # 0.7 x 40 GB/s over all unpacked weights and half of the context.
    read = 4 * (30 * 3_540_096 + 49152 * 576) + 128 * 46080
    assert plan.predicted.decode_tokens_per_s == pytest.approx(0.7 * 40e9 / read, rel=1e-3)
    assert plan.predicted.estimate


def test_cold_experts_make_decoding_slower_and_are_named() -> None:
    hybrid, full = hybrid_plan(), hybrid_plan(24)
    assert hybrid.predicted.decode_tokens_per_s < full.predicted.decode_tokens_per_s
    assert hybrid.predicted.bound_by in ("link of cuda:0", "memory of the host")
    assert full.predicted.bound_by == "memory of cuda:0"


@pytest.mark.parametrize("name", ["qwen3.5-27b", "gemma-4-e4b", "qwen3-30b-a3b"])
def test_a_step_of_one_row_takes_the_time_of_a_token(name: str) -> None:
    devices = [replace(gpu(24), flops=0.0), replace(gpu(24, "cuda:1"), flops=0.0), host(64)]
    plan = make_plan([known_shape(f"{name}:q4_k_m")], devices, Options(context=8192))
    for stage in plan.predicted.stages:
        assert stage.step_cost.seconds(1) == pytest.approx(stage.decode_s, rel=1e-9)
        assert stage.step_cost.seconds(8) < 8 * stage.decode_s  # rows share the weights


def test_rows_of_a_step_read_each_expert_once() -> None:
    (stage,) = make_plan([laguna()], [gpu(48), host(64)], Options()).predicted.stages
    cost = stage.step_cost
    assert cost.experts_s == pytest.approx(256 / 8 * cost.picks_s)  # of 256 experts a row picks 8
    assert replace(cost, products_s=0.0).seconds(100) == pytest.approx(
        cost.weights_s + 100 * cost.row_s + cost.experts_s
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_step_of_worker_processes_takes_time_between_them(count: int) -> None:
    one = replace(cpu(64), cores=4, worker=True)
    workers = [replace(one, name=f"cpu#{number}") for number in range(1, count + 1)]
    found = make_plan([smollm2()], workers, Options()).predicted
    layers_s = sum(stage.decode_s for stage in found.stages)
    between_s = 1 / found.decode_tokens_per_s - layers_s
    assert between_s == pytest.approx(WORKER_STEP_S + (count - 1) * WORKER_HANDOVER_S)
    split = make_plan([smollm2()], [replace(x, worker=False) for x in workers], Options()).predicted
    assert 1 / split.decode_tokens_per_s == pytest.approx(
        sum(stage.decode_s for stage in split.stages)
    )
    chunk_s = make_plan([smollm2()], workers, Options()).settings.chunk / found.prefill_tokens_per_s
    assert chunk_s == pytest.approx(between_s + sum(x.prefill_s for x in found.stages))


def predicted(*costs: tuple[float, float]) -> Prediction:
    """Stages with so many seconds of reading weights, and of arithmetic for a row."""
    stages = [
        StagePrediction("cpu", 1.0, 1.0, StepCost(weights, 0.0, 0.0, 0.0, products))
        for weights, products in costs
    ]
    return Prediction(1.0, 1.0, "", True, tuple(stages))


@pytest.mark.parametrize(
    ("costs", "sequences", "steps", "pays"),
    [
        (((1.0, 0.9), (1.0, 0.9)), 8, 2, True),  # 2 x 3.6 s instead of 14.4 s
        (((1.0, 0.9), (1.0, 0.9)), 8, 3, True),  # 3 x 2.7 s
        (((1.0, 0.0), (1.0, 0.0)), 8, 2, False),  # 2 x 1 s: all weights are read twice
        (((1.0, 0.0), (0.1, 0.05)), 8, 2, False),  # 2 x 1 s instead of 1.4 s
        (((0.1, 0.0), (1.0, 0.5)), 8, 2, False),  # 2 x 2 s instead of 4.1 s: next to nothing
        (((1.0, 0.0), (1.0, 0.25)), 8, 2, True),  # 2 x 1 s instead of 3 s
    ],
)
def test_sequences_are_shared_where_arithmetic_takes_the_time_of_stages_that_are_alike(
    costs: tuple[tuple[float, float], ...], sequences: int, steps: int, pays: bool
) -> None:
    assert predicted(*costs).pays_to_share(sequences, steps) == pays
