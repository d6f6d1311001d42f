"""What is gpt-oss's own: packed experts as it is published, YaRN between fractions, no GPU."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headroom.errors import ModelError, PlanError
from headroom.families.config import AttentionConfig
from headroom.families.files import open_checkpoint
from headroom.formats.quants import MXFP4
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import make_plan
from tests.families import family_configs as configs
from tests.families.oracles import PROMPT, oracle_logits, variant
from tests.formats.quantised_weights import mxfp4_codes
from tests.optional import optional
from tests.running import run_steps

gguf = optional("gguf")


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_published_folder_equals_transformers(tmp_path: Path, kernels: str) -> None:
    """Experts are blocks and scales, as in openai/gpt-oss-20b."""
    variant("gpt-oss").save_safetensors(tmp_path)
    model = configs.gpt_oss()
    state, stored = model.state_dict(), {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            continue
        blocks, scales, values = mxfp4_codes(weight.mT.contiguous())
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name].copy_(values.mT)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "config.json"
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    checkpoint = open_checkpoint(tmp_path)
    experts = checkpoint.tensors["layers.0.ffn.experts.gate_up"]
    assert (experts.quant, experts.shape) == (MXFP4, (8, 192, 64))
    logits = run_steps(checkpoint, [PROMPT], [[20, 1, 3]], kernels=kernels)[0]
    torch.testing.assert_close(logits, oracle_logits(model, PROMPT), atol=1e-4, rtol=1e-4)


def test_gates_and_ups_in_one_tensor_of_a_gguf_file_equal_transformers(tmp_path: Path) -> None:
    path = variant("gpt-oss").save_gguf(tmp_path / "m.gguf", fused=True)
    logits = run_steps(open_checkpoint(path), [PROMPT], [[20, 1, 3]])[0]
    wanted = oracle_logits(variant("gpt-oss").model(), PROMPT)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


def ropes(path: Path) -> set[tuple[float, ...]]:
    layers = describe(open_checkpoint(path)).config.layers
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionConfig)]
    return {mixer.rope.divisors for mixer in mixers}


def test_frequencies_are_blended_between_fractions_in_both_formats(tmp_path: Path) -> None:
    found = ropes(variant("gpt-oss").save_gguf(tmp_path / "m.gguf"))
    assert found == ropes(variant("gpt-oss").save_safetensors(tmp_path / "m"))
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["truncate"] = True
    path.write_text(json.dumps(config))
    assert found != ropes(tmp_path / "m")


def test_layers_see_all_and_a_window_in_turn(tmp_path: Path) -> None:
    path = variant("gpt-oss").save_gguf(tmp_path / "m.gguf")
    layers = describe(open_checkpoint(path)).config.layers
    assert [layer.mixer.window for layer in layers] == [9, 0, 9, 0]  # type: ignore[union-attr]


def test_a_plan_for_a_gpu_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = variant("gpt-oss").save_gguf(tmp_path / "m.gguf")
    shape = describe(open_checkpoint(path)).shape
    for more in ({}, {"kernels": "reference"}):
        options = Options(context=256, device="24GiB", ram="2GiB", **more)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="runs on CPUs only: no kernel of a GPU has its atten"):
            make_plan([shape], plan_devices(options), options)


def test_the_gguf_package_knows_every_tensor_that_files_have(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(variant("gpt-oss").save_gguf(tmp_path / "m.gguf"))
    known = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GPT_OSS]
    names = {gguf.TENSOR_NAMES[kind].replace("{bid}", "0") for kind in known}
    found = {x.name.removesuffix(".weight").removesuffix(".bias") for x in reader.tensors}
    assert {name for name in found if not name.startswith(("blk.1", "blk.2", "blk.3"))} <= names


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"swiglu_limit": 5.0}, r"hf\.swiglu_limit is 5\.0, which is not supported"),
        ({"attention_bias": False}, r"hf\.attention_bias is False, which is not supported"),
        ({"hidden_act": "gelu"}, r"hf\.hidden_act is 'gelu', which is not supported"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 2.0}},
            r"rotary scaling 'llama3' is not supported",
        ),
    ],
)
def test_settings_without_arithmetic_are_refused_by_name(
    tmp_path: Path, settings: dict[str, object], told: str
) -> None:
    path = variant("gpt-oss").save_safetensors(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ModelError, match=told):
        describe(open_checkpoint(tmp_path))
