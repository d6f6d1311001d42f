"""Known models: their tensor tables, their sizes in every mix, and plans made from them."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from headroom.errors import OptionError
from headroom.families.registry import KNOWN
from headroom.families.tables import file_bytes, tensor_types
from headroom.formats.mixes import MIXES, find_mix
from headroom.kernels.cuda.sampler_tables import sampler_bytes
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.lines import kv_bytes, verify_bytes
from headroom.plan.plan import make_plan
from headroom.plan.settings import PlanSettings
from headroom.plan.shaping import shape_of
from headroom.units import GIB, MIB
from tests.plan.shapes import cpu, gpu, host, smollm2


def test_the_published_smollm2_file_is_predicted_to_the_byte() -> None:
    # Counted in the tensor table of SmolLM2-135M-Instruct.Q4_1.gguf.
    types = tensor_types(KNOWN["smollm2-135m"], find_mix("q4_1"))
    assert Counter(quant.name for _, quant in types.values()) == {"q4_1": 210, "f32": 61, "q8_0": 1}
    assert file_bytes(KNOWN["smollm2-135m"], find_mix("q4_1")) == 96_576_768
    made = shape_of("smollm2", KNOWN["smollm2-135m"], find_mix("q4_1"))
    assert made == smollm2()


@pytest.mark.parametrize(
    ("name", "tensors", "billions"),
    [
        ("mixtral-8x7b", 323, 46.703),
        ("qwen3-0.6b", 310, 0.596), ("qwen3-30b-a3b", 579, 30.532), ("laguna-xs.2", 678, 33.443),
        ("glm-4.5-air", 780, 106.852), ("gpt-oss-20b", 459, 20.915), ("gpt-oss-120b", 687, 116.829),
        ("smollm3-3b", 326, 3.075), ("gemma-3-1b", 340, 1.000), ("gemma-3-27b", 808, 27.009),
        ("qwen3.6-27b", 851, 26.896), ("qwen3.6-27b-dflash", 58, 1.730),
    ],
)  # fmt: skip
def test_a_model_has_its_published_tensors_and_parameters(
    name: str, tensors: int, billions: float
) -> None:
    table = tensor_types(KNOWN[name], find_mix("bf16"))
    assert len(table) == tensors
    shape = known_shape(f"{name}:bf16")
    values = shape.embed_values + shape.head_values + shape.norm_values
    values += sum(x.core_values + x.experts * x.expert_values for x in shape.layers)
    assert round(values / 1e9, 3) == billions


def test_laguna_takes_its_published_bytes_on_a_gpu() -> None:
    shape = known_shape("laguna-xs.2:q4_k_m")
    assert round((shape.weight_bytes - shape.embed_bytes) / GIB, 2) == 18.77
    assert round(shape.embed_bytes / MIB) == 110


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", KNOWN)
def test_a_shape_holds_every_byte_of_its_file(name: str, mix: str) -> None:
    shape = known_shape(f"{name}:{mix}")
    # A table of rotary factors becomes a setting: it is read and not kept.
    unused = 4 * KNOWN[name].full_head_dim // 2 if shape.architecture == "gemma4" else 0
    if shape.name.startswith("gemma-4-e4b"):  # layers that share a cache hold keys in the file
        types = tensor_types(KNOWN[name], find_mix(mix))
        keys = sum(
            quant.bytes_for(shape[0] * (shape[1] if len(shape) > 1 else 1))
            for key, (shape, quant) in types.items()
            if key.startswith("blk.")
            and int(key.split(".")[1]) >= 24
            and key.split(".")[2] in ("attn_k", "attn_v", "attn_k_norm")
        )
        assert keys > 0
        unused += keys
    assert shape.weight_bytes + unused == file_bytes(KNOWN[name], find_mix(mix))


def test_narrow_types_give_smaller_files() -> None:
    sizes = [
        file_bytes(KNOWN["qwen3.6-35b-a3b"], find_mix(mix))
        for mix in ("bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert round(sizes[-1] / 1e9, 2) == 21.16


def cache(name: str, context: int = 32768) -> dict[str, int]:
    """Return the bytes of a model's f16 cache by layer kind, one sequence and one-token chunks."""
    settings = PlanSettings(
        context=context, parallel=1, chunk=1, cache_tokens=context, k_type="f16", v_type="f16",
        compute_type="bf16", weights="packed", threads=1,
    )  # fmt: skip
    sizes: dict[str, int] = {}
    for layer in known_shape(name).layers:
        sizes[layer.kind] = sizes.get(layer.kind, 0) + kv_bytes(layer, settings)
    return sizes


@pytest.mark.parametrize(
    ("name", "full_kib", "window_mib"),
    [
        ("qwen3-30b-a3b", 96, 0), ("qwen3.6-27b", 64, 0), ("qwen3.6-35b-a3b", 20, 0),
        ("laguna-xs.2", 40, 60), ("gemma-4-e4b", 16, 20), ("gemma-4-31b", 80, 800),
        ("gemma-4-26b-a4b", 20, 200),
    ],
)  # fmt: skip
def test_a_cache_grows_as_published_and_windows_do_not(
    name: str, full_kib: int, window_mib: int
) -> None:
    sizes = cache(name)
    assert sizes["full"] == 32768 * full_kib * 1024
    # A window and one token lie on at most two pages more than the window alone fills.
    window = sizes.get("window", 0)
    pages = KNOWN[name].window // 64
    assert window == window_mib * MIB * (pages + 2) // max(1, pages)


def test_a_guessed_row_of_the_27b_takes_less_than_two_mebibytes() -> None:
    settings = PlanSettings(
        context=256, parallel=1, chunk=64, cache_tokens=256, k_type="f16", v_type="f16",
        compute_type="bf16", weights="packed", threads=1, draft_tokens=31,
    )  # fmt: skip
    # Of 48 layers: 10,240 inputs of the convolution, and two gates of 48 heads.
    found = verify_bytes(known_shape("qwen3.6-27b").layers, settings)
    assert found == 32 * 48 * (10240 + 2 * 48) * 4 < 32 * 2 * MIB


def test_the_large_model_of_experts_runs_on_a_small_card() -> None:
    plan = make_plan([known_shape("qwen3.6-35b-a3b:q4_k_m")], [gpu(12), host(64)], Options())
    device = plan.devices[0]
    assert device.total_experts == 10240
    assert 4000 < device.hot_experts < 10240
    assert plan.settings.context == 8192


def test_a_draft_adds_its_lines_to_the_last_device() -> None:
    shapes = [known_shape("qwen3.6-27b:q4_k_m"), known_shape("qwen3.6-27b-dflash")]
    options = Options(context=4096, parallel=1, feature_dtype="q8_0")
    plan = make_plan(shapes, [gpu(12, "cuda:0"), gpu(16, "cuda:1"), host(64)], options)
    first, last = (device.allocated for device in plan.devices)
    assert last["draft_weights"] == shapes[1].weight_bytes
    rows, taps = plan.settings.rows, [1, 16, 31, 46, 61]
    assert shapes[1].tap_layers == tuple(taps)
    there = sum(tap > plan.devices[0].layers.last for tap in taps)
    assert 0 < there < 5
    row = 5120 * 34 // 32
    stream = plan.devices[0].settings.stream_rows
    assert (first["features"], last["features"]) == (
        (5 - there) * stream * row,
        there * stream * row,
    )
    assert last["draft_state"] == rows * 5120 * 4
    assert last["logits"] == 32 * 248320 * 4 + sampler_bytes(DECODE_ROWS, 248320)
    assert "verify_scratch" in first
    assert "draft_weights" not in first
    why = {line.name: line.why for line in plan.devices[-1].lines}
    assert why["draft_weights"] == f"5 layers of {shapes[1].name}"
    assert why["draft_kv"].startswith("4096 tokens and those to guess")
    assert why["features"] == f"{there} layers x {stream} rows x 5120 values, q8_0"


def test_per_layer_tables_of_gemma_stay_with_the_host() -> None:
    shape = known_shape("gemma-4-e4b:q4_k_m")
    plan = make_plan([shape], [gpu(12), host(64)], Options())
    assert plan.devices[0].allocated["embeddings"] == shape.embed_bytes
    held = {line.name: line.bytes for line in plan.host.lines}
    assert held["embeddings"] == shape.lookup_bytes > 2 * GIB
    on_cpu = make_plan([shape], [cpu(64)], Options(weights="packed"))
    assert on_cpu.devices[0].allocated["embeddings"] == shape.embed_bytes + shape.lookup_bytes


def test_a_model_that_is_not_known_lists_those_that_are() -> None:
    with pytest.raises(OptionError, match=r"'qwen9' is no known model\. Known: smollm2-135m, "):
        known_shape("qwen9:q4_k_m")
    with pytest.raises(
        OptionError, match=r"'q3_x' is no quantisation\. Choose f32, f16, bf16, q8_0, "
    ):
        known_shape("qwen3-0.6b:q3_x")


def test_planning_the_35b_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from headroom.plan.known import known_shape\n"
        "from headroom.plan.plan import make_plan\n"
        "from headroom.plan.show.table import plan_text\n"
        "from headroom.machine.targets import plan_devices\n"
        "from headroom.options import Options\n"
        "options = Options(device='12GiB', ram='64GiB')\n"
        "plan = make_plan([known_shape('qwen3.6-35b-a3b')], plan_devices(options), options)\n"
        "print(len(plan_text(plan)) > 100, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert out == ["True", "False"]


def test_a_known_model_is_planned_with_a_prediction_head_if_one_is_asked_for() -> None:
    plain, ahead = (known_shape("qwen3.6-27b", mtp=mtp) for mtp in (False, True))
    assert plain.mtp is None
    assert ahead.mtp is not None
    # One layer of full attention as every fourth one, a matrix that joins two rows, three norms.
    (full, *_) = [layer for layer in ahead.layers if layer.kind == "full"]
    assert ahead.mtp.core_values == full.core_values + 2 * 5120 * 5120 + 3 * 5120
    assert replace(ahead, mtp=None) == plain
    assert known_shape("qwen3-0.6b", mtp=True).mtp is None
