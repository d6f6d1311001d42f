"""The engine allocates what the plan says, line by line, to the byte."""

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from headroom.engine.request import SamplingParams
from headroom.families.files import open_checkpoint
from headroom.families.synth.recipe import cut, find_recipe, with_mtp
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf as synthesise
from headroom.kernels.native import attention as native_attention
from headroom.kernels.native.layer import Step
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.ops import Span
from headroom.layers.native_block import NativeBlock
from headroom.llm import LLM
from headroom.machine.targets import plan_devices
from headroom.options import Options, load_options
from headroom.plan.describe import describe
from headroom.plan.plan import Plan, make_plan
from headroom.plan.workspace import native_experts_scratch, native_layer_scratch
from headroom.split.choice import make_run_plan
from headroom.split.launch import set_threads, start_pipeline
from headroom.split.placing import find_placement
from tests.families import family_configs
from tests.families.family_configs import qwen35
from tests.families.family_gguf import write_gguf
from tests.families.oracles import variant

# Memory of a device that the engine does not allocate itself.
NOT_OURS = {"runtime", "reserve", "graphs"}


def planned(plan: Plan) -> dict[str, int]:
    lines = {line.name: line.bytes for line in plan.devices[0].lines if line.bytes}
    lines |= {line.name: line.bytes for line in plan.host.lines if line.bytes}
    return {name: size for name, size in lines.items() if name not in NOT_OURS}


def plan_and_load(path: Path, **settings: object) -> tuple[Plan, dict[str, int]]:
    model = describe(open_checkpoint(path))
    options = Options(model=str(path), threads=1, **settings)  # type: ignore[arg-type]
    plan = make_plan([model.shape], plan_devices(options), options)
    return plan, dict(start_pipeline(plan, model).allocated)


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
@pytest.mark.parametrize("kv_type", ["f32", "q8_0", "q5_1"])
@pytest.mark.parametrize("context", [512, 2048])
@pytest.mark.parametrize("parallel", [1, 4])
def test_planned_equals_allocated_for_the_default_model(
    smollm2_path: Path, kv_type: str, context: int, parallel: int
) -> None:
    plan, allocated = plan_and_load(
        smollm2_path, kv_type=kv_type, context=context, parallel=parallel
    )
    assert allocated == planned(plan)
    assert {"core_weights", "embeddings", "kv", "staging", "workspace", "logits"} == set(allocated)


@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
@pytest.mark.parametrize("name", ["llama", "qwen35", "gemma4-e4b"])
def test_host_memory_for_kept_prefixes_is_that_of_the_plan(
    tmp_path: Path, name: str, device: str
) -> None:
    path = variant(name).save_gguf(tmp_path / "m.gguf")
    plan, allocated = plan_and_load(
        path, context=256, parallel=2, kv_type="f16", cache_ram="2MiB", device=device
    )
    found = 0
    for line in ("host_pages", "snapshots"):
        sizes = [x.bytes for one in plan.devices for x in one.lines if x.name == line]
        assert allocated.get(line, 0) == sum(sizes)
        found += sum(sizes)
    assert plan.settings.host_pages > 0
    assert found <= 2 << 20


@pytest.mark.parametrize("weights", ["packed", "unpacked"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_planned_equals_allocated_for_a_model_with_a_head_of_its_own(
    tiny_path: Path, weights: str, kernels: str
) -> None:
    plan, allocated = plan_and_load(
        tiny_path, weights=weights, kernels=kernels, context=128, parallel=2
    )
    expected = planned(plan)
    if plan.settings.kernels == "reference":
        expected.pop("workspace")  # torch's own, measured and not allocated by us
    assert allocated == expected
    assert "head" in allocated


@pytest.mark.parametrize("handover", ["bf16", "f16", "f32"])
def test_a_hand_over_type_from_the_environment_changes_nothing_on_one_device_and_is_reported(
    tiny_path: Path,
    handover: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HEADROOM_ACTIVATION_DTYPE", handover)
    options = load_options({"device": "cpu", "context": 128, "parallel": 2, "threads": 1})
    model = describe(open_checkpoint(tiny_path))
    plan = make_run_plan(model.shape, options)
    placement = find_placement(model.shape, plan, options, model.checkpoint.identity)
    allocated = start_pipeline(plan, model, placement=placement).allocated
    assert allocated["staging"] == plan.devices[0].allocated["staging"]
    settings = plan.settings
    assert (settings.compute_type, settings.k_type, settings.v_type) == ("f32", "f32", "f32")
    told = [x.message for x in caplog.records if "--activation-dtype" in x.message]
    assert told == [
        "plan: without effect here: --activation-dtype is the type of rows that one device hands "
        "to the next, and all layers are on cpu"
    ]
    assert not [x for x in caplog.records if "planned were" in x.message]


# Some with rows that fill panels of sixteen, like those of most real models, and some without.
WINDOWED = {
    "laguna": lambda: family_configs.laguna(
        num_hidden_layers=2,
        num_experts=16,
        num_attention_heads_per_layer=[16, 32],
        layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse"],
    ),
    "laguna-odd": family_configs.laguna,
    "gemma4-31b": family_configs.gemma4,
    "gemma4-26b-odd": family_configs.gemma4_moe,
    "gemma4-26b": lambda: family_configs.gemma4(
        enable_moe_block=True, num_experts=16, top_k_experts=3, moe_intermediate_size=32
    ),
    "gemma4-e4b": family_configs.gemma4_small,
    "gemma4-e2b": family_configs.gemma4_smallest,
}


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("weights", ["packed", "unpacked"])
@pytest.mark.parametrize("name", WINDOWED)
def test_planned_equals_allocated_for_models_with_windows(
    tmp_path: Path, name: str, weights: str, kernels: str
) -> None:
    WINDOWED[name]().save_pretrained(tmp_path)
    settings = {"weights": weights, "kernels": kernels, "context": 512, "parallel": 2, "chunk": 64}
    plan, allocated = plan_and_load(tmp_path, **settings)
    expected = planned(plan)
    if plan.settings.kernels == "reference":
        expected.pop("workspace")
    assert allocated == expected
    assert ("hot_experts" in allocated) == (name.startswith(("laguna", "gemma4-26b")))


def test_layers_with_a_window_do_not_grow_and_layers_that_share_have_nothing(
    tmp_path: Path,
) -> None:
    path = variant("gemma4-e4b").save_gguf(tmp_path / "m.gguf")
    sizes = [
        plan_and_load(path, context=context, parallel=1, chunk=32, kv_type="f32")[1]["kv"]
        for context in (256, 512)
    ]
    # Of 12 layers the first 6 have caches: 5 of a window with 2 heads of 32 values, and one with
    # 2 heads of 64 that sees all.
    window, full = 5 * 2 * 64 * 2 * 2 * 32 * 4, 2 * 2 * 64 * 4
    assert sizes == [window + 256 * full, window + 512 * full]


@pytest.mark.parametrize("weights", ["packed", "unpacked"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("format", ["gguf", "safetensors"])
@pytest.mark.parametrize("heads", [16, 12])  # 12 rows of beta and alpha fill no panel
def test_planned_equals_allocated_for_a_model_with_recurrent_states(
    tmp_path: Path, format: str, weights: str, kernels: str, heads: int
) -> None:
    model = qwen35(key_heads=4, value_heads=heads, state_dim=16, intermediate_size=128)
    path = tmp_path / ("m.gguf" if format == "gguf" else "m")
    if format == "gguf":
        write_gguf(model, path, "Q8_0", fused=False, unused_keys=False)
    else:
        model.save_pretrained(path)
    plan, allocated = plan_and_load(path, weights=weights, kernels=kernels, context=128, parallel=2)
    expected = planned(plan)
    if plan.settings.kernels == "reference":
        expected.pop("workspace")
    assert allocated == expected
    states = (
        6 * 2 * 4 * (heads * 16 * 16 + 3 * (2 * 4 + heads) * 16)
    )  # of six layers, two sequences
    assert allocated["recurrent_state"] == states


WIDE_HEADS = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 64}
# Models, and how many of their layers run in one call of the C++ module.
FUSED: dict[str, tuple[Callable[[], PreTrainedModel], int]] = {
    "llama": (family_configs.llama, 3),
    "llama, wide heads": (lambda: family_configs.llama(**WIDE_HEADS, intermediate_size=768), 3),
    "llama, one key head": (lambda: family_configs.llama(num_key_value_heads=1), 3),
    "mistral, windows": (family_configs.mistral, 3),
    "ministral, windows in some layers": (family_configs.ministral, 3),
    "qwen3moe": (lambda: family_configs.qwen3_moe(**WIDE_HEADS, moe_intermediate_size=96), 0),
    "qwen35": (lambda: qwen35(key_heads=2, value_heads=6, state_dim=128, **WIDE_HEADS), 0),
    "qwen35moe": (family_configs.qwen35_moe, 0),
    "gemma4": (lambda: family_configs.gemma4(hidden_size=256, num_hidden_layers=6), 0),
    "gemma4 with experts": (lambda: family_configs.gemma4_moe(hidden_size=256), 0),
}


def taken_by(block: NativeBlock, rows: int, step: Step) -> int:
    """Return the scratch that the C++ module takes for a layer in a step of `rows` rows."""
    spans = step.spans.rows
    taken: int = block._layer._layer.scratch_bytes(
        POOL.ops, (rows, 0), spans.data_ptr(), len(spans)
    )
    return taken


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
@pytest.mark.parametrize(("parallel", "context", "chunk"), [(1, 512, 32), (3, 500, 7)])
@pytest.mark.parametrize("name", FUSED)
def test_the_planned_scratch_is_what_the_cpp_module_needs_at_most(
    tmp_path: Path, name: str, parallel: int, context: int, chunk: int
) -> None:
    build, fused = FUSED[name]
    write_gguf(build(), tmp_path / "m.gguf", "Q8_0", fused=False, unused_keys=False)
    model = describe(open_checkpoint(tmp_path / "m.gguf"))
    hidden, layers = model.config.hidden, model.shape.layers
    options = Options(context=context, parallel=parallel, chunk=chunk, kv_type="f32", threads=1)
    plan = make_plan([model.shape], plan_devices(options), options)
    pipeline = start_pipeline(plan, model)
    planned_bytes, rows = pipeline.allocated["workspace"], plan.settings.rows
    pages = torch.arange(plan.settings.sequence_pages)
    spans = tuple(Span(row, 1, context - 1, pages) for row in range(parallel))
    step = Step(spans, torch.zeros(parallel, dtype=torch.int64))
    needs = []
    for block, layer in zip(pipeline._stages[0]._model._blocks, layers, strict=True):  # type: ignore[attr-defined]
        if isinstance(block, NativeBlock):
            needs.append(taken_by(block, rows, step))
            assert needs[-1] == native_layer_scratch(hidden, layer, plan.settings)
    assert len(needs) == fused
    needs += [
        MODULE.experts_scratch(rows, x.experts_used, hidden, x.expert_width, x.experts)
        for x in layers
        if x.experts
    ]
    assert max(needs, default=0) <= planned_bytes
    assert native_attention.SpanTable.of(spans).rows.shape == (parallel, 5)


def test_a_full_engine_stays_within_its_scratch(tiny_path: Path) -> None:
    """Every sequence at the end of its context while another prompt is read."""
    with LLM(str(tiny_path), context=256, parallel=3, chunk=64, threads=1) as llm:
        params = SamplingParams(temperature=0, ignore_eos=True)
        prompts = [[7] * 200, [9] * 255, [11] * 100, [13] * 250, [15] * 240]
        done = llm.generate(prompts, params)
        assert [d.prompt_tokens + d.generated_tokens for d in done] == [256] * 5


@pytest.mark.parametrize("experts", [16, 6])  # the router of six fills no panel
@pytest.mark.parametrize("format", ["gguf", "safetensors"])
@pytest.mark.parametrize("weights", ["packed", "unpacked"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_planned_equals_allocated_for_experts(
    tmp_path: Path, format: str, weights: str, kernels: str, experts: int
) -> None:
    model = family_configs.qwen3_moe(num_experts=experts)
    path = tmp_path / "m.gguf"
    if format == "gguf":
        write_gguf(model, path, "F32", False, False)
    else:
        path = tmp_path / "m"
        model.save_pretrained(path)
    settings = {"weights": weights, "kernels": kernels, "context": 128, "parallel": 2}
    plan, allocated = plan_and_load(path, **settings)
    expected = planned(plan)
    if plan.settings.kernels == "reference":
        expected.pop("workspace")
    assert allocated == expected
    assert allocated["hot_experts"] == 3 * experts * 3 * 64 * 32 * 4


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("fused", [True, False])
def test_planned_equals_allocated_for_experts_beside_a_shared_one(
    tmp_path: Path, kernels: str, fused: bool
) -> None:
    # Matrices of 24 rows, whose panels are one half empty.
    model = family_configs.qwen35_moe(
        moe_intermediate_size=24, shared_expert_intermediate_size=40, value_heads=6
    )
    write_gguf(model, tmp_path / "m.gguf", "F32", fused, False)
    settings = {"kernels": kernels, "context": 128, "parallel": 2}
    plan, allocated = plan_and_load(tmp_path / "m.gguf", **settings)
    expected = planned(plan)
    if plan.settings.kernels == "reference":
        expected.pop("workspace")
    assert allocated == expected


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_the_planned_scratch_of_experts_is_what_the_cpp_kernel_needs(tmp_path: Path) -> None:
    write_gguf(family_configs.qwen3_moe(), tmp_path / "m.gguf", "Q8_0", False, False)
    settings = {"context": 256, "parallel": 3, "chunk": 200}
    plan, allocated = plan_and_load(tmp_path / "m.gguf", **settings)
    model = describe(open_checkpoint(tmp_path / "m.gguf"))
    needed = MODULE.experts_scratch(plan.settings.rows, 3, model.config.hidden, 32, 8)
    assert needed == native_experts_scratch(
        model.config.hidden, model.shape.layers[0], plan.settings
    )
    assert allocated["workspace"] >= needed
    line = next(line for line in plan.devices[0].lines if line.name == "workspace")
    assert "experts" in line.why


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_pinned_threads_stay_on_cores_that_this_process_may_use(tiny_path: Path) -> None:
    plan, _ = plan_and_load(tiny_path, pin_threads=True, context=64)
    assert plan.settings.pin_threads
    before = set(os.listdir("/proc/self/task"))
    set_threads(2, pin=True)
    assert POOL.ops.threads == 2
    allowed = sorted(os.sched_getaffinity(0))
    expected = [{allowed[1]}] if len(allowed) > 1 else [set(allowed)]
    deadline = time.monotonic() + 10  # the worker pins itself once it runs
    while True:
        workers = set(os.listdir("/proc/self/task")) - before
        cores = [os.sched_getaffinity(int(worker)) for worker in workers]
        if cores == expected or time.monotonic() > deadline:
            break
    set_threads(1)
    assert cores == expected


@pytest.mark.parametrize("weights", ["packed", "unpacked"])
@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
@pytest.mark.parametrize("family", ["qwen35", "qwen35moe"])
def test_planned_equals_allocated_for_a_model_with_a_prediction_head(
    tmp_path: Path, family: str, device: str, weights: str
) -> None:
    path, recipe = tmp_path / "m.gguf", with_mtp(find_recipe(family, "tiny"))
    synthesise(Source(replace(recipe, dims=cut(recipe.dims, 4)), 3), path, "q4_k_m")
    unpacks = weights == "unpacked" and family == "qwen35"
    plan, allocated = plan_and_load(
        path,
        context=256,
        parallel=3,
        draft_tokens=3,
        kv_type="q8_0",
        cache_ram="2MiB",
        device=device,
        weights="unpacked" if unpacks else "auto",
    )
    expected = Counter(planned_of_all(plan))
    assert allocated == expected
    assert plan.problem.options.draft == "mtp"
    # A page for each sequence beside those that the engine lends, 2 heads of 64 values twice.
    pages = plan.settings.pages + 3
    assert allocated["draft_kv"] == pages * 64 * 2 * 2 * 2 * 34
    assert allocated["draft_state"] == (3 + 12) * 256 * 4
    without, _ = plan_and_load(
        path, context=256, parallel=3, kv_type="q8_0", cache_ram="2MiB", draft="none"
    )
    assert not {"draft_weights", "draft_kv", "draft_state"} & planned(without).keys()


def planned_of_all(plan: Plan) -> dict[str, int]:
    """The planned bytes by line, of all devices together."""
    total: Counter[str] = Counter()
    for device in plan.devices:
        total.update({name: size for name, size in device.allocated.items() if size})
    return dict(total)
