"""make_plan: defaults, the order of sacrifice, refusals, experts and several devices."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from headroom.errors import OptionError
from headroom.kernels.cuda.sampler_tables import sampler_bytes
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.plan.experts import bounce_bytes
from headroom.plan.known import known_shape
from headroom.plan.layout import Pinning
from headroom.plan.plan import DoesNotFitError, Plan, make_plan
from headroom.plan.shape import ModelShape
from headroom.units import GIB, MIB
from tests.plan.shapes import cpu, gpu, host, laguna, qwen35_27b, smollm2


def plan_on_cpu(gibibytes: float, taken: float = 0.0, **fixed: object) -> Plan:
    return make_plan([smollm2()], [cpu(gibibytes, taken)], Options(**fixed))  # type: ignore[arg-type]


def lines(plan: Plan, device: int = 0) -> dict[str, int]:
    return {line.name: line.bytes for line in plan.devices[device].lines}


def test_with_plenty_of_memory_every_default_is_given() -> None:
    settings = plan_on_cpu(24).settings
    assert (settings.context, settings.parallel, settings.chunk) == (8192, 4, 512)
    assert (settings.cache_tokens, settings.pages) == (32768, 512)
    assert (settings.k_type, settings.v_type, settings.compute_type) == ("f32", "f32", "f32")
    assert (settings.weights, settings.threads) == ("unpacked", 4)


def test_every_line_of_smollm2_is_the_sum_of_its_parts() -> None:
    plan = plan_on_cpu(24)
    assert plan.devices[0].allocated == {
        "core_weights": 4 * (30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 1152) + 576),
        "embeddings": 4 * 49152 * 576,
        "kv": 32768 * 46080,
        "staging": 2 * 516 * 576 * 4,
        "workspace": 516 * (5 * 576 + 384 + 27 * 128 + 192 + 192 * 16) * 4 + 128 * 8 * 384,
        "logits": 4 * 49152 * 4,
    }
    total = sum(line.bytes for line in plan.devices[0].lines)
    assert total + plan.devices[0].free_bytes == 24 * GIB


def test_layers_without_fused_kernels_leave_room_for_what_their_operations_take() -> None:
    options = Options(context=512, parallel=1, chunk=64)
    for eager in (replace(options, dtype="f32"), replace(options, kernels="triton")):
        plan = make_plan([smollm2()], [gpu(8), host(8)], eager)
        line = next(line for line in plan.devices[0].lines if line.name == "graphs")
        assert (64 + 192) * MIB < line.bytes < (64 + 193) * MIB
        assert "torch and cuBLAS without fused layers" in line.why
    fused = make_plan([smollm2()], [gpu(8), host(8)], options)
    line = next(line for line in fused.devices[0].lines if line.name == "graphs")
    assert "torch and cuBLAS in a step" in line.why


def test_packed_weights_keep_the_bytes_of_the_file() -> None:
    held = lines(plan_on_cpu(24, weights="packed"))
    assert held["core_weights"] + held["embeddings"] == smollm2().weight_bytes


def test_weights_are_unpacked_only_within_half_of_the_memory() -> None:
    assert plan_on_cpu(24, taken=23.0, context=256, parallel=1).settings.weights == "packed"
    assert plan_on_cpu(24, taken=22.0, context=256, parallel=1).settings.weights == "unpacked"


def test_memory_held_by_others_is_a_part_of_the_reserve() -> None:
    plan = plan_on_cpu(24, taken=10.0)
    assert lines(plan)["reserve"] == 10 * GIB + 512 * MIB
    assert plan.devices[0].lines[-1].why == "512.0 MiB kept free, 10.00 GiB held by others"


def test_chunk_goes_first_then_sequences_then_context() -> None:
    shrinking = [plan_on_cpu(size / 64, weights="packed").settings for size in range(150, 30, -1)]
    chosen = [(x.context, x.parallel, x.chunk) for x in shrinking]
    assert chosen[0] == (8192, 4, 512)
    assert (8192, 3, 512) in chosen
    assert (8192, 1, 512) in chosen
    assert all(parallel == 1 for context, parallel, _ in chosen if context < 8192)
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1][0] < 8192


def test_what_the_user_fixed_is_never_changed() -> None:
    settings = plan_on_cpu(0.7, context=1000, parallel=3, chunk=77, k_type="q8_0").settings
    assert (settings.context, settings.parallel, settings.chunk) == (1000, 3, 77)
    assert (settings.k_type, settings.v_type) == ("q8_0", "f32")


def test_the_cache_is_rounded_up_to_whole_pages_of_every_sequence() -> None:
    assert plan_on_cpu(8, context=100, parallel=3).settings.cache_tokens == 3 * 128
    assert plan_on_cpu(8, cache_tokens=1000).settings.cache_tokens == 1024


def test_a_fixed_cache_bounds_an_open_context() -> None:
    settings = plan_on_cpu(8, cache_tokens=1024).settings
    assert (settings.context, settings.parallel) == (1024, 4)


def test_fixed_sequences_share_a_smaller_cache_before_the_context_shrinks() -> None:
    settings = plan_on_cpu(1.2, parallel=4, weights="packed").settings
    assert (settings.context, settings.parallel) == (8192, 4)
    assert 8192 <= settings.cache_tokens < 32768


def test_a_context_above_the_models_limit_is_refused() -> None:
    with pytest.raises(OptionError) as caught:
        plan_on_cpu(24, context=9000)
    assert str(caught.value) == (
        "--context 9000 is more than the 8192 tokens that the model was made for. "
        "Try --context 8192."
    )


@pytest.mark.parametrize(
    ("name", "limit"), [("ministral-3-3b", 16384), ("devstral-small-2-24b", 8192)]
)
def test_a_context_above_what_the_kernels_can_run_is_refused_with_the_reason(
    name: str, limit: int
) -> None:
    with pytest.raises(OptionError) as caught:
        make_plan([known_shape(name)], [cpu(64)], Options(context=100000))
    assert str(caught.value) == (
        f"--context 100000 is more than the {limit} tokens that headroom can run of this model: "
        "later queries are scaled by their position, which no kernel does. "
        f"Try --context {limit}."
    )


def test_a_cache_smaller_than_one_context_is_refused() -> None:
    with pytest.raises(OptionError, match="--cache-tokens 512 cannot hold one conversation"):
        plan_on_cpu(24, context=4096, cache_tokens=512)


def test_a_plan_that_cannot_fit_names_the_line_and_what_would_fit() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_on_cpu(1, context=8192, parallel=4, cache_tokens=32768, weights="packed")
    error = caught.value
    assert not error.plan.fits
    assert error.plan.settings.context == 8192
    assert "the biggest line is kv, 1.41 GiB (30 layers x 512 pages" in error.message
    first, *rest = error.nearest
    assert rest == [
        "--kv-type q8_0",
        "--chunk 512 --cache-tokens 8192 --parallel 1 --context 8192",
    ]
    assert error.hint.startswith(f"Try {first} or --kv-type q8_0")
    flag, tokens = first.split()
    assert flag == "--cache-tokens"
    with pytest.raises(DoesNotFitError):  # one page more does not fit
        plan_on_cpu(1, context=8192, parallel=4, cache_tokens=int(tokens) + 64, weights="packed")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_each_setting_that_an_error_proposes_does_fit(index: int) -> None:
    fixed = {"context": 8192, "parallel": 4, "cache_tokens": 32768, "weights": "packed"}
    with pytest.raises(DoesNotFitError) as caught:
        plan_on_cpu(1, **fixed)
    words = caught.value.nearest[index].split()
    proposed = {
        flag.removeprefix("--").replace("-", "_"): int(value) if value.isdigit() else value
        for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    assert plan_on_cpu(1, **(fixed | proposed)).fits


def test_a_device_too_small_for_the_weights_asks_for_a_smaller_model() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_on_cpu(0.3)
    assert caught.value.hint == "Try a smaller model or quantisation."


@pytest.mark.parametrize(("gibibytes", "proposed"), [(0.1, False), (0.75, True)])
def test_packed_weights_are_proposed_only_where_they_fit(gibibytes: float, proposed: bool) -> None:
    options = Options(weights="unpacked", context=256, parallel=1, chunk=16)
    with pytest.raises(DoesNotFitError) as refused:
        make_plan([smollm2()], [cpu(gibibytes)], options)
    assert ("--weights packed" in str(refused.value)) is proposed


def test_a_narrow_cache_is_named_as_lossy() -> None:
    assert plan_on_cpu(8, kv_type="q8_0").lossy == (
        "cached keys are kept in q8_0",
        "cached values are kept in q8_0",
    )
    assert plan_on_cpu(8).lossy == ()


@pytest.mark.parametrize(
    ("given", "types"),
    [
        ({}, ("bf16", "bf16", "bf16", "bf16")),
        ({"dtype": "f16"}, ("f16", "bf16", "bf16", "bf16")),
        ({"kv_type": "q8_0"}, ("bf16", "q8_0", "q8_0", "bf16")),
        ({"kv_type": "f16", "v_type": "q8_0"}, ("bf16", "f16", "q8_0", "bf16")),
        ({"activation_dtype": "f32"}, ("bf16", "bf16", "bf16", "f32")),
        ({"activation_dtype": "f16", "dtype": "f32"}, ("f32", "bf16", "bf16", "f16")),
    ],
)
def test_each_of_three_types_has_an_option_of_its_own(
    given: dict[str, str], types: tuple[str, ...]
) -> None:
    devices = [gpu(48, "cuda:0"), gpu(48, "cuda:1"), host(64)]
    plan = make_plan([qwen35_27b()], devices, Options(**given))  # type: ignore[arg-type]
    made = plan.settings
    assert (made.compute_type, made.k_type, made.v_type, made.handover_type) == types
    # A cache narrower than the type of the devices is lossy, whatever rows are handed over in.
    assert len(plan.lossy) == sum(kind == "q8_0" for kind in types)


def test_rows_handed_over_in_16_bits_have_a_buffer_on_both_devices() -> None:
    devices = [gpu(30, f"cuda:{index}") for index in range(3)]
    options = Options(context=4096, parallel=1, chunk=511)

    def staging(**given: str) -> list[int]:
        plan = make_plan([qwen35_27b()], [*devices, host(64)], replace(options, **given))  # type: ignore[arg-type]
        return [device.allocated["staging"] for device in plan.devices]

    # The last device has a second f32 buffer: of the rows that get logits.
    stream, narrow = 512 * 5120 * 4, 512 * 5120 * 2
    assert staging() == [stream + narrow, stream + 2 * narrow, 2 * stream + narrow]
    assert staging(activation_dtype="f32") == [stream, stream, 2 * stream]
    alone = make_plan([smollm2()], [gpu(8), host(8)], Options(activation_dtype="f16", chunk=512))
    assert lines(alone)["staging"] == 2 * 516 * 576 * 4


def test_all_experts_are_hot_where_they_fit() -> None:
    plan = make_plan([laguna()], [gpu(24), host(64)], Options())
    assert plan.devices[0].hot_experts == plan.devices[0].total_experts == 9984
    assert plan.settings.k_type == "bf16"
    assert "cold_experts" not in {line.name for line in plan.host.lines}


def test_weights_lie_in_tiles_only_where_packed_products_run() -> None:
    shape = smollm2()
    fixed = {"context": 4096, "parallel": 2, "chunk": 512}
    tiled, plain, separate = (
        lines(make_plan([shape], [gpu(8), host(8)], Options(**fixed, **more)))
        for more in ({}, {"dtype": "f32"}, {"kernels": "reference", "dtype": "bf16"})
    )
    held = sum(layer.core_bytes for layer in shape.layers) + shape.norm_bytes
    assert plain["core_weights"] == separate["core_weights"] == held
    assert tiled["core_weights"] > held
    # Whatever kernels run, tokens are drawn there.
    assert separate["logits"] == 2 * shape.vocab * 4 + sampler_bytes(DECODE_ROWS, shape.vocab)


def test_experts_that_do_not_fit_lie_in_host_memory() -> None:
    model = laguna()
    plan = make_plan([model], [gpu(12), host(64)], Options(expert_policy="static"))
    device = plan.devices[0]
    cold = next(line for line in plan.host.lines if line.name == "cold_experts")
    assert 0 < device.hot_experts < 9984
    assert lines(plan)["hot_experts"] + cold.bytes == model.expert_bytes
    assert device.hot_by_layer[0] == 0
    assert max(device.hot_by_layer[1:]) - min(device.hot_by_layer[1:]) <= 1
    # Less than one more expert of the smallest kind would fit.
    assert 0 <= device.free_bytes < 2_039_808
    # Sequences are given up before experts, and a context before neither; a chunk that all cold
    # experts are copied for is a long one.
    assert (plan.settings.context, plan.settings.parallel, plan.settings.chunk) == (8192, 1, 1024)


@pytest.mark.parametrize(("budget", "most"), [("60%", 0.6), ("5GiB", 5 / 17.678), ("0%", 0.0)])
def test_an_expert_budget_caps_what_is_hot(budget: str, most: float) -> None:
    plan = make_plan([laguna()], [gpu(24), host(64)], Options(expert_budget=budget))
    hot = lines(plan).get("hot_experts", 0)
    assert hot <= most * laguna().expert_bytes + 1
    assert hot >= most * laguna().expert_bytes - 40 * 2_039_808
    assert (plan.settings.context, plan.settings.parallel) == (8192, 4)


@pytest.mark.parametrize("budget", ["120%", "x%", "-1%", "lots"])
def test_a_wrong_expert_budget_is_refused(budget: str) -> None:
    with pytest.raises(OptionError):
        make_plan([laguna()], [gpu(24), host(64)], Options(expert_budget=budget))


def test_a_host_too_small_for_the_cold_experts_is_the_one_at_fault() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        make_plan([laguna()], [gpu(8), host(8)], Options())
    assert "host memory has 8.00 GiB" in caught.value.message
    assert "the biggest line is cold_experts" in caught.value.message


def test_a_cpu_holds_all_experts_itself() -> None:
    plan = make_plan([laguna()], [cpu(64)], Options())
    assert plan.devices[0].hot_experts == 9984
    assert plan.host.lines == ()


def test_unequal_devices_share_layers_by_their_room() -> None:
    model = replace(qwen35_27b(), context_limit=32768)
    devices = [gpu(48, "cuda:0"), gpu(24, "cuda:1"), host(64)]
    plan = make_plan([model], devices, Options())
    first, second = plan.devices
    assert plan.fits
    assert first.layers[0] == 0
    assert first.layers[1] + 1 == second.layers[0]
    assert second.layers[1] == 63
    assert first.layers[1] > 40
    assert "head" in lines(plan, 1)
    assert "head" not in lines(plan, 0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_gpu_beside_a_cpu_gets_all_the_layers_it_can_hold(order: int) -> None:
    devices = [gpu(24), cpu(64)][::order]
    plan = make_plan([known_shape("qwen3.5-27b:bf16")], devices, Options())
    sizes = {device.name: device for device in plan.devices}
    layer = max(x.core_bytes for x in qwen35_27b().layers)
    assert sizes["cuda:0"].free_bytes < 4 * layer
    assert sizes["cpu"].free_bytes > 10 * layer


def test_equal_devices_share_layers_evenly() -> None:
    plan = make_plan([qwen35_27b()], [gpu(48, "cuda:0"), gpu(48, "cuda:1"), host(64)], Options())
    assert 30 <= plan.devices[0].layers[1] <= 36


def test_given_shares_split_the_layers_as_told() -> None:
    devices = [gpu(80, "cuda:0"), gpu(80, "cuda:1"), host(64)]
    plan = make_plan([qwen35_27b()], devices, Options(split="3,1"))
    assert [device.layers for device in plan.devices] == [(0, 47), (48, 63)]


def test_a_split_for_another_number_of_devices_is_refused() -> None:
    with pytest.raises(OptionError, match="--split has 3 shares for 1 devices"):
        make_plan([laguna()], [gpu(80), host(64)], Options(split="1,2,1"))


def test_the_published_activation_model_can_be_asked_for() -> None:
    own = plan_on_cpu(24)
    published = plan_on_cpu(24, activation_model="published")
    assert lines(published)["workspace"] == 8 * 8192 * 1536 * 2
    assert "published formula, an uncalibrated heuristic" in next(
        line.why for line in published.devices[0].lines if line.name == "workspace"
    )
    assert lines(own)["workspace"] != lines(published)["workspace"]


def test_planning_a_large_model_never_imports_torch() -> None:
    program = (
        "import sys; from headroom.plan.plan import make_plan; import headroom.plan.show.report;"
        "from headroom.options import Options; from tests.plan.shapes import *;"
        "make_plan([laguna()], [gpu(12), host(64)], Options());"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout == "False\n"


def test_memory_of_a_gpu_held_by_others_is_not_planned() -> None:
    busy = replace(gpu(24), available_bytes=10 * GIB)
    plan = make_plan([laguna()], [busy, host(64)], Options())
    assert lines(plan)["reserve"] == 14 * GIB + 512 * MIB
    assert plan.devices[0].hot_experts < 5000


def test_cold_experts_are_pinned_up_to_exactly_what_the_control_group_allows() -> None:
    def planned(limit: int | None) -> Plan:
        behind = replace(host(64), pinnable_bytes=limit)
        return make_plan([laguna()], [gpu(12), behind], Options(expert_policy="static"))

    (cold,) = (x.bytes for x in planned(None).host.lines if x.name == "cold_experts")
    for limit in (None, cold + 1, cold):
        assert planned(limit).host.pinning is Pinning.PINNED
        assert not any("copied twice" in note for note in planned(limit).notes)
    over = planned(cold - 1)
    assert over.host.pinning is Pinning.OVER_LIMIT
    (line,) = (x for x in over.host.lines if x.name == "cold_experts")
    assert "not pinned: the control group allows" in line.why
    assert any("are copied twice" in note for note in over.notes)


def test_slots_change_hands_where_host_memory_holds_and_pins_every_expert() -> None:
    def planned(limit: int | None, **changes: object) -> Plan:
        behind = replace(host(64), pinnable_bytes=limit)
        return make_plan([laguna()], [gpu(12), behind], Options(**changes))  # type: ignore[arg-type]

    def cold_bytes(plan: Plan) -> int:
        (size,) = (line.bytes for line in plan.host.lines if line.name == "cold_experts")
        return size

    cached = planned(None)
    assert (cached.settings.expert_policy, cached.settings.keep_host_copy) == ("auto", True)
    assert cold_bytes(cached) == laguna().expert_bytes
    static = planned(None, expert_policy="static")
    assert (static.settings.expert_policy, static.settings.keep_host_copy) == ("static", False)
    assert cold_bytes(static) == laguna().expert_bytes - lines(static)["hot_experts"]
    assert static.devices[0].lines == cached.devices[0].lines  # copies take no room of the GPU
    assert planned(cold_bytes(cached)).settings == cached.settings
    assert planned(cold_bytes(cached) - 1) == replace(
        planned(cold_bytes(cached) - 1, expert_policy="static"),
        problem=planned(cold_bytes(cached) - 1).problem,
    )
    assert planned(None, expert_policy="lru").settings.expert_policy == "lru"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cold": "cpu"}, "with --cold cpu no expert crosses the link"),
        ({"cold": "drop"}, "with --cold drop no expert crosses the link"),
        ({"no_pin": True}, "with --no-pin the GPU cannot read host memory"),
        ({"dtype": "f32"}, "no fused kernels of a GPU run this model's layers"),
        ({"expert_budget": "5%"}, "no layer has slots for the experts of 4 tokens"),
        ({"ram": "16GiB"}, "host memory cannot hold and pin all experts"),
    ],
)
def test_a_policy_that_cannot_be_had_is_refused_if_named_and_left_out_if_not(
    changes: dict[str, object], why: str
) -> None:
    behind = host(12 if "ram" in changes else 64)
    given = {name: value for name, value in changes.items() if name != "ram"}
    plan = make_plan([laguna()], [gpu(12), behind], Options(**given))  # type: ignore[arg-type]
    assert plan.settings.expert_policy == "static"
    assert not plan.settings.keep_host_copy
    with pytest.raises(OptionError) as refused:
        make_plan([laguna()], [gpu(12), behind], Options(expert_policy="lru", **given))  # type: ignore[arg-type]
    assert str(refused.value).startswith("--expert-policy lru cannot be had: " + why)


def test_pinning_is_known_wherever_the_lines_of_cold_experts_are() -> None:
    options = Options(no_pin=True)
    behind = make_plan([laguna()], [gpu(12), host(64)], options)
    assert behind.host.pinning is Pinning.TURNED_OFF
    beside = make_plan([laguna()], [gpu(6), cpu(64)], replace(options, split="38,2"))
    assert "cold_experts" in lines(beside, 1)  # the CPU's own memory is the host's
    assert beside.host.pinning is Pinning.TURNED_OFF
    assert make_plan([laguna()], [gpu(24), host(64)], options).host.pinning is None


def test_snapshots_are_a_line_of_the_host_and_say_how_many_they_are() -> None:
    options = Options(cache_ram="2GiB", context=4096, parallel=1)
    plan = make_plan([known_shape("qwen3.6-27b")], [gpu(24), host(64)], options)
    (line,) = (line for line in plan.host.lines if line.name == "snapshots")
    each = 150_994_944 + 48 * 3 * 10240 * 4 + 248320 * 4
    assert line.bytes == GIB // each * each
    assert line.why == f"{GIB // each} snapshots of recurrent states and windows"
    (pages,) = (x for x in plan.host.lines if x.name == "host_pages")
    page = 64 * 16 * 2 * 4 * 256 * 2  # tokens, layers, keys and values, heads, values of 16 bits
    count = (2 * GIB - line.bytes) // page
    assert (pages.bytes, plan.settings.host_pages) == (count * page, count)
    assert pages.why == f"{count} pages of kept prefixes, 64 tokens"


def test_a_model_of_pages_alone_gives_all_of_the_cache_in_host_memory_to_them() -> None:
    options = Options(context=4096, parallel=1, cache_ram="1GiB", kv_type="q8_0")
    plan = make_plan([known_shape("qwen3-30b-a3b")], [gpu(24), host(64)], options)
    page = 64 * 48 * 2 * 4 * 128 // 32 * 34
    assert (plan.settings.snapshots, plan.settings.host_pages) == (0, GIB // page)
    assert make_plan(
        [known_shape("qwen3-30b-a3b")], [gpu(24), host(64)], replace(options, cache_ram=None)
    ).settings.host_pages == 0  # fmt: skip


def test_snapshots_take_a_share_of_host_memory_and_are_left_out_where_they_would_not_fit() -> None:
    def snapshots(memory: DeviceSpec, **options: Any) -> int:
        chosen = Options(context=4096, parallel=1, **options)
        return make_plan([known_shape("qwen3.6-27b")], [gpu(24), memory], chosen).settings.snapshots

    each = 150_994_944 + 48 * 3 * 10240 * 4 + 248320 * 4
    assert snapshots(host(64)) == 16
    assert snapshots(host(16)) == GIB // each
    assert snapshots(host(64), no_prefix_cache=True) == 0
    assert snapshots(host(64), cache_ram="100MiB") == 0
    for policy in ("static", "auto"):
        cold = Options(context=4096, parallel=1, expert_policy=policy)
        full = make_plan([laguna()], [gpu(6), host(64)], replace(cold, cache_ram="1MiB"))
        needed = sum(line.bytes for line in full.host.lines)
        short = replace(host(1), total_bytes=needed, available_bytes=needed)
        plan = make_plan([laguna()], [gpu(6), short], cold)
        assert plan.settings.snapshots == 0
        assert plan.settings.expert_policy == full.settings.expert_policy == policy


def test_two_stages_of_one_host_have_each_their_part_of_all_snapshots() -> None:
    options = Options(context=4096, parallel=1, cache_ram="4GiB")
    whole = make_plan([known_shape("qwen3.6-27b")], [cpu(64)], options)
    halves = make_plan([known_shape("qwen3.6-27b")], [cpu(64), cpu(64)], options)
    mixed = make_plan(
        [known_shape("qwen3.6-27b")], [gpu(24), cpu(64)], replace(options, split="2,1")
    )
    for plan in (halves, mixed):
        parts = [x.bytes for device in plan.devices for x in device.lines if x.name == "snapshots"]
        total = [x.bytes for x in whole.devices[0].lines if x.name == "snapshots"]
        assert plan.settings.snapshots == whole.settings.snapshots > 0
        assert sum(parts) == sum(total)


def test_two_stages_of_one_host_have_each_their_part_of_all_pages_in_host_memory() -> None:
    options = Options(context=4096, parallel=1, cache_ram="4GiB", kv_type="f16")
    model = known_shape("qwen3-30b-a3b")
    whole = make_plan([model], [cpu(64)], options)
    assert whole.settings.host_pages == 4 * GIB // (64 * 48 * 2 * 4 * 128 * 2)
    halves = make_plan([model], [cpu(64), cpu(64)], options)
    mixed = make_plan([model], [gpu(24), cpu(64)], replace(options, split="2,1"))
    (total,) = (x.bytes for x in whole.devices[0].lines if x.name == "host_pages")
    for plan in (halves, mixed):
        places = (*plan.devices, plan.host)
        parts = [x.bytes for place in places for x in place.lines if x.name == "host_pages"]
        assert sum(parts) == total
        assert plan.settings.host_pages == whole.settings.host_pages


@pytest.mark.parametrize(
    ("kv_type", "per_token"),
    [("f16", 65536), ("q8_0", 34816), ("q5_1", 24576), ("q5_0", 22528), ("q4_1", 20480),
     ("q4_0", 18432)],
)  # fmt: skip
def test_every_cache_type_of_the_27b_has_its_published_size(kv_type: str, per_token: int) -> None:
    options = Options(kv_type=kv_type, context=4096, parallel=1)
    plan = make_plan([known_shape("qwen3.6-27b")], [gpu(24), host(64)], options)
    assert lines(plan)["kv"] == 4096 * per_token
    assert (len(plan.lossy) == 2) == (kv_type != "f16")


@pytest.mark.parametrize("dtype", ["int8", "int24"])
def test_rounded_products_without_cpp_kernels_are_refused_before_anything_is_sized(
    dtype: str,
) -> None:
    told = rf"{dtype} products need the C\+\+ kernels of a CPU, which do not run here\."
    with pytest.raises(OptionError, match=told):
        make_plan([smollm2()], [cpu(8)], Options(dtype=dtype, kernels="reference"))
    with pytest.raises(OptionError, match=told):
        make_plan([smollm2()], [replace(cpu(8), native=False)], Options(dtype=dtype))
    floats = r"Unpacked weights are floats, which .* Leave out --weights unpacked, or choose --dty"
    with pytest.raises(OptionError, match=floats):
        make_plan([smollm2()], [cpu(8)], Options(dtype=dtype, weights="unpacked"))


@pytest.mark.parametrize(("dtype", "lossy"), [("int8", True), ("int24", False), (None, False)])
def test_products_of_8_bits_are_named_as_lossy_and_those_of_24_are_not(
    dtype: str | None, lossy: bool
) -> None:
    plan = make_plan([smollm2()], [replace(cpu(8), native=True)], Options(dtype=dtype))
    assert plan.settings.compute_type == (dtype or "int24")
    assert ("products round their activations to 8 bits per 32 columns" in plan.lossy) == lossy


def test_cpus_with_cpp_kernels_multiply_packed_weights_with_24_bits_and_all_else_with_floats() -> (
    None
):
    device = replace(cpu(8), native=True)
    assert make_plan([smollm2()], [device], Options()).settings.compute_type == "int24"
    for model, other, options in (
        (smollm2(), device, Options(weights="unpacked")),
        (smollm2(), device, Options(kernels="reference")),
        (smollm2(), replace(device, native=False), Options()),
        (replace(smollm2(), packed=False), device, Options()),
    ):
        assert make_plan([model], [other], options).settings.compute_type == "f32"


@pytest.mark.parametrize(("dtype", "told"), [("bf16", True), ("f16", True), ("f32", False)])
def test_types_without_cpp_kernels_are_noted_as_slow(dtype: str, told: bool) -> None:
    plan = make_plan([smollm2()], [cpu(8)], Options(dtype=dtype))
    note = (
        f"products in {dtype} run on the slow reference kernels of a CPU; its C++ kernels "
        "compute in f32, int24 and int8"
    )
    assert (note in plan.notes) == told
    asked = make_plan([smollm2()], [cpu(8)], Options(dtype=dtype, kernels="reference"))
    assert note not in asked.notes


def test_triton_kernels_are_planned_for_gpus_alone() -> None:
    options = Options(kernels="triton", context=4096, parallel=1)
    plan = make_plan([smollm2()], [gpu(24), host(64)], options)
    assert plan.settings.kernels == "triton"
    told = r"Triton's kernels run on GPUs, and no layer is on one\."
    with pytest.raises(OptionError, match=told) as refused:
        make_plan([smollm2()], [cpu(8)], Options(kernels="triton"))
    assert refused.value.hint == "Leave out --kernels triton, or choose a GPU as --device."


def test_cold_experts_have_buffers_on_both_sides_and_hot_ones_alone_have_none() -> None:
    model = laguna()
    largest = max(layer.expert_bytes for layer in model.layers)
    plan = make_plan([model], [gpu(12), host(64)], Options(dtype="f32"))
    spare = {line.name: line.bytes for line in plan.host.lines}["expert_spare"]
    assert (lines(plan)["expert_staging"], spare) == (2 * -(-largest // 256) * 256, largest)
    full = make_plan([model], [gpu(24), host(64)], Options())
    assert "expert_staging" not in lines(full)


def test_experts_that_are_not_pinned_are_copied_by_way_of_pinned_buffers() -> None:
    def spare(**options: object) -> int:
        plan = make_plan([laguna()], [gpu(12), host(64)], Options(**options))  # type: ignore[arg-type]
        return {line.name: line.bytes for line in plan.host.lines}["expert_spare"]

    buffers = bounce_bytes(laguna().in_tiles().layers)
    assert buffers > 0
    for cold in ("auto", "cpu"):
        assert spare(no_pin=True, cold=cold) == spare(cold=cold) + buffers
    dropped = {"cold": "drop", "keep_host_copy": True}  # nothing is copied to the GPU
    assert spare(no_pin=True, **dropped) == spare(**dropped)


def test_the_log_says_what_happens_to_cold_experts() -> None:
    given = [laguna()], [gpu(12), host(64)]
    dropped = make_plan(*given, Options(cold="drop"))
    assert dropped.lossy == (
        "cold experts are left out, and the weights of a row's hot ones grow instead",
    )
    whole = make_plan([laguna()], [gpu(24), host(64)], Options(cold="drop"))
    assert whole.lossy == ()
    loose = make_plan(*given, Options(no_pin=True, keep_host_copy=True))
    (cold,) = (line for line in loose.host.lines if line.name == "cold_experts")
    assert cold.why.endswith("routed experts and copies of the hot ones, not pinned: --no-pin")
    assert cold.bytes == sum(layer.all_expert_bytes for layer in laguna().in_tiles().layers)
    assert any("only the CPU reads them in place" in note for note in loose.notes)
    unread = make_plan(*given, Options(no_pin=True, cold="drop"))
    assert not any("copy them twice" in note for note in unread.notes)


def windowed(window: int) -> ModelShape:
    """SmolLM2, every layer of which sees so many tokens."""
    model = smollm2()
    layers = (replace(layer, kind="window", window=window) for layer in model.layers)
    return replace(model, layers=tuple(layers))


def decode_seconds(model: ModelShape, context: int) -> float:
    options = Options(context=context, parallel=1, chunk=64, weights="packed")
    return 1 / make_plan([model], [cpu(24)], options).predicted.decode_tokens_per_s


def test_the_predicted_speed_counts_no_more_tokens_than_a_window_sees() -> None:
    token_s = 30 * 2 * 3 * 64 * 4 / (0.7 * 40e9)  # keys and values of one token, at listed speed
    at_window = decode_seconds(windowed(512), 1024)  # half of the context is full
    assert decode_seconds(windowed(512), 1026) == decode_seconds(windowed(512), 8192) == at_window
    assert at_window - decode_seconds(windowed(512), 1022) == pytest.approx(token_s)
    assert decode_seconds(smollm2(), 1024) == pytest.approx(at_window)
    longer = decode_seconds(smollm2(), 1026) - at_window
    assert longer == pytest.approx(token_s)


def test_each_device_has_its_own_types_and_rows_are_handed_over_in_a_third_one() -> None:
    whole = replace(cpu(64), native=True)
    plan = make_plan([qwen35_27b()], [gpu(20), gpu(20, "cuda:1", sm=75), whole], Options())
    kinds = [(x.settings.compute_type, x.settings.k_type, x.settings.kernels) for x in plan.devices]
    assert kinds == [
        ("bf16", "bf16", "cuda"), ("f16", "f16", "cuda"), ("f32", "f32", "native"),
    ]  # fmt: skip
    assert {device.settings.handover_type for device in plan.devices} == {"f32"}
    gpus = make_plan([qwen35_27b()], [gpu(40), gpu(40, "cuda:1", sm=75), host(64)], Options())
    assert {device.settings.handover_type for device in gpus.devices} == {"f16"}
    given = make_plan([qwen35_27b()], [gpu(20), whole], Options(kv_type="q8_0", dtype="f16"))
    assert [(x.settings.compute_type, x.settings.v_type) for x in given.devices] == [
        ("f16", "q8_0"), ("f16", "q8_0"),
    ]  # fmt: skip
