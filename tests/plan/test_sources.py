"""Shapes of every family from files of both formats, settings alone, and lies about them."""

import json
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headroom.errors import FormatError, ModelError, OptionError
from headroom.families import registry
from headroom.families.files import open_checkpoint, open_header
from headroom.families.registry import KNOWN, read_dims, split_mix
from headroom.families.tables import file_bytes
from headroom.formats.header import ModelHeader
from headroom.formats.mixes import MIXES, find_mix
from headroom.formats.names import Namings
from headroom.formats.tensor import TensorInfo
from headroom.plan import sources
from headroom.plan.describe import describe
from headroom.plan.known import known_shape, smaller_mixes
from headroom.plan.shape import ModelShape
from headroom.plan.shaping import shape_of
from headroom.plan.sources import find_shape, header_shape
from headroom.units import GIB
from tests.plan.files import SMALL, write_gguf
from tests.tiny import llama_config, random_model, save_safetensors

BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
DENSE = {"intermediate_size": 96}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GLOBAL = {"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
LAGUNA = {
    "sliding_window": 9,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2,
    "num_attention_heads_per_layer": [4, 6, 6, 6] * 2,
    "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "LlamaConfig", DENSE),
    "llama of experts": (
        "Mixtral", "MixtralConfig",
        {**DENSE, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3": ("Qwen3", "Qwen3Config", {**DENSE, "tie_word_embeddings": True}),
    "qwen3moe": ("Qwen3Moe", "Qwen3MoeConfig", EXPERTS),
    "qwen35": ("Qwen3_5", "Qwen3_5TextConfig", {**DENSE, **DELTA}),
    "qwen35moe": ("Qwen3_5Moe", "Qwen3_5MoeTextConfig", {**EXPERTS, **DELTA, **SHARED}),
    "mistral3": ("Mistral", "MistralConfig", {**DENSE, "sliding_window": 9}),
    "mistral3 of 3": ("Ministral3", "Ministral3Config", {**DENSE, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", "SmolLM3Config", {**DENSE, "pad_token_id": None}),
    "laguna": ("Laguna", "LagunaConfig", {**DENSE, **EXPERTS, **SHARED, **LAGUNA}),
    "glm4moe": (
        "Glm4Moe", "Glm4MoeConfig",
        {**DENSE, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "attention_bias": True, "use_qk_norm": True},
    ),
    "gpt-oss": (
        "GptOss", "GptOssConfig",
        {**DENSE, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 9},
    ),
    "gemma3": ("Gemma3", "Gemma3TextConfig", {**DENSE, "sliding_window": 9}),
    "gemma4": (
        "Gemma4", "Gemma4TextConfig",
        {**DENSE, **GLOBAL, "num_hidden_layers": 12, "hidden_size_per_layer_input": 0},
    ),
    "gemma4 of experts": (
        "Gemma4", "Gemma4TextConfig",
        {**DENSE, **GLOBAL, "num_hidden_layers": 6, "hidden_size_per_layer_input": 0,
         "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
         "moe_intermediate_size": 32},
    ),
    "gemma4 E": (
        "Gemma4", "Gemma4TextConfig",
        {**DENSE, "global_head_dim": 64, "num_hidden_layers": 12,
         "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320,
         "num_kv_shared_layers": 6, "use_double_wide_mlp": True},
    ),
}  # fmt: skip


def save_family(name: str, folder: Path) -> Any:
    """Save a small model of transformers' own and return it."""
    model_name, config_name, settings = FAMILIES[name]
    config = getattr(transformers, config_name)(**{**BASE, **settings})
    made = getattr(transformers, f"{model_name}ForCausalLM")._from_config(
        config, dtype=torch.bfloat16
    )
    made.save_pretrained(folder)
    return made


def all_values(shape: ModelShape) -> int:
    values = shape.embed_values + shape.head_values + shape.lookup_values + shape.norm_values
    return values + sum(x.core_values + x.experts * x.expert_values for x in shape.layers)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_safetensors_folder_of_every_family_is_counted_to_the_last_value(
    name: str, tmp_path: Path
) -> None:
    model = save_family(name, tmp_path)
    shape = find_shape(str(tmp_path), tmp_path)
    scales = len(shape.layers) if name.startswith("gemma4") else 0  # buffers, not parameters
    if name == "glm4moe":  # a bias for each expert of a router
        scales = sum(layer.experts for layer in shape.layers)
    unused = 0
    for key, parameter in model.named_parameters():
        shares = name == "gemma4 E" and ".layers." in key and int(key.split(".")[2]) >= 6
        if shares and key.endswith(("k_proj.weight", "v_proj.weight", "k_norm.weight")):
            unused += parameter.numel()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert all_values(shape) == parameters + scales - unused


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bare_config_gives_the_shape_of_the_folder_in_bf16(name: str, tmp_path: Path) -> None:
    save_family(name, tmp_path)
    whole = find_shape(str(tmp_path), tmp_path)
    bare = find_shape(str(tmp_path / "config.json"), tmp_path)
    assert bare.name == f"{tmp_path.name}:bf16"
    assert replace(bare, name=whole.name) == whole


def test_a_folder_without_weights_is_a_bare_config(tmp_path: Path) -> None:
    save_family("qwen3", tmp_path / "whole")
    (tmp_path / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    assert find_shape(str(tmp_path), tmp_path).name == f"{tmp_path.name}:bf16"


def test_an_index_gives_the_shape_of_its_parts(tmp_path: Path) -> None:
    model = save_family("qwen3", tmp_path / "one")
    model.save_pretrained(tmp_path / "parts", max_shard_size="200KB")
    index = tmp_path / "parts" / "model.safetensors.index.json"
    one, parts = (find_shape(str(x), tmp_path) for x in (tmp_path / "one", index))
    assert replace(parts, name=one.name) == one


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", SMALL)
def test_a_gguf_file_of_every_family_has_its_predicted_bytes(
    name: str, mix: str, tmp_path: Path
) -> None:
    dims = SMALL[name]
    header = open_header(write_gguf(tmp_path / "model.gguf", dims, mix))
    assert read_dims(header) == dims
    stored = sum(info.nbytes for info in header.tensors.values())
    assert stored == file_bytes(dims, find_mix(mix))
    assert header_shape(header) == shape_of("model", dims, find_mix(mix))
    assert header_shape(header, "q6_k") == shape_of("model:q6_k", dims, find_mix("q6_k"))


def test_every_family_of_the_plan_is_tested_from_both_formats() -> None:
    assert {dims.architecture for dims in SMALL.values()} == set(registry.FAMILIES)
    assert {name.split()[0] for name in FAMILIES} == set(registry.RUNNABLE)


def test_the_real_file_is_predicted_to_the_byte(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    stored = sum(info.nbytes for info in checkpoint.tensors.values())
    assert stored == file_bytes(KNOWN["smollm2-135m"], find_mix("q4_1"))
    found = find_shape(str(smollm2_path), smollm2_path)
    assert found == describe(checkpoint).shape
    assert found == replace(known_shape("smollm2-135m:q4_1"), name=found.name)


def test_a_shape_for_a_plan_is_the_shape_that_runs(tmp_path: Path) -> None:
    folder = save_safetensors(random_model(llama_config(tie_word_embeddings=False)), tmp_path)
    found = find_shape(str(folder), tmp_path)
    assert found == describe(open_checkpoint(folder)).shape
    assert all_values(found) == sum(
        prod(info.shape) for info in open_checkpoint(folder).tensors.values()
    )


def test_a_draft_is_planned_and_not_run_by_itself(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", SMALL["dflash"], "q4_k_m")
    assert find_shape(str(path), tmp_path).taps == 3
    with pytest.raises(ModelError, match="is a draft, which guesses for another model"):
        describe(open_checkpoint(path))


def test_extra_prediction_layers_are_left_out(tmp_path: Path) -> None:
    dims = SMALL["qwen35"]
    path = write_gguf(
        tmp_path / "model.gguf",
        replace(dims, layers=9, kinds=(*dims.kinds, "full")),
        "q4_k_m",
        {"nextn_predict_layers": 1},
    )
    assert read_dims(open_header(path)) == dims
    assert len(find_shape(str(path), tmp_path).layers) == 8


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"embedding_length": 512}, r"output_norm.weight is \[256\], not \[512\]"),
        ({"block_count": 5}, "has no tensor 'layers.4.attn.norm', which its settings call for"),
        ({"block_count": 3}, "has a tensor 'layers.3.attn.norm', which qwen3moe models do not"),
        ({"block_count": 0}, "block_count is 0; it must be 1 to"),
        ({"block_count": 100000}, "there are 100000 layers, not 1 to 2048"),
        ({"attention.head_count": 2}, r"attn_q.weight is \[512, 256\], not \[256, 256\]"),
        ({"expert_count": 17}, r"ffn_gate_inp.weight is \[16, 256\], not \[17, 256\]"),
        ({"expert_used_count": 17}, "a token visits 17 of 16 experts"),
        ({"context_length": [1, 2]}, "context_length is .* not a whole number"),
    ],
)
def test_a_header_that_lies_is_refused(keys: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", SMALL["qwen3moe"], "q8_0", keys)
    with pytest.raises((ModelError, FormatError), match=told):
        find_shape(str(path), tmp_path)


def test_a_missing_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    dims = SMALL["laguna"]
    path = write_gguf(tmp_path / "a.gguf", dims, "q8_0", leave_out="blk.3.attn_gate.weight")
    with pytest.raises(ModelError, match=r"has no tensor 'layers\.3\.attn\.gate'"):
        find_shape(str(path), tmp_path)
    other = open_header(write_gguf(tmp_path / "b.gguf", SMALL["qwen3"], "q8_0"))
    with pytest.raises(ModelError, match=r"a tensor 'layers\.0\.attn\.q_norm', which llama models"):
        header_shape(replace(other, architecture="llama"))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen35", "model.visual.blocks.0.attn.qkv.weight"),
        ("qwen35", "v.blk.0.attn_q.weight"),
        ("qwen35", "mtp.fc.weight"),
        ("gemma4", "model.vision_tower.patch.weight"),
        ("gemma4", "embed_audio.proj.weight"),
        ("gemma4", "mm.input_projection.weight"),
    ],
)
def test_parts_for_pictures_sound_and_further_predictions_are_left_out_where_a_family_has_them(
    family: str, name: str, tmp_path: Path
) -> None:
    dims, plain = SMALL[family], SMALL["llama"]
    header = open_header(write_gguf(tmp_path / "m.gguf", dims, "q8_0"))
    other = open_header(write_gguf(tmp_path / "llama.gguf", plain, "q8_0"))
    extra = next(iter(header.tensors.values()))
    assert header_shape(with_tensor(header, name, extra)) == header_shape(header)
    with pytest.raises(ModelError, match=f"has a tensor '{name}', which llama models do not use"):
        header_shape(with_tensor(other, name, extra))


def with_tensor(header: ModelHeader, name: str, info: TensorInfo) -> ModelHeader:
    """Return a header with one more tensor."""
    return replace(header, tensors={**header.tensors, name: info})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "mamba"}, "is a 'mamba' model, which cannot be planned. Families: llama"),
        ({"num_hidden_layers": -1}, "block_count is -1"),
        ({"num_hidden_layers": "many"}, "block_count is 'many', not a whole number"),
        ({"hidden_size": 1 << 40}, "embedding_length is 1099511627776; it must be 1 to"),
        ({"layer_types": ["full_attention"]}, "hf.layer_types is not a list of 8 entries"),
        ({"layer_types": ["odd"] * 8}, "layer type 'odd' is none of full_attention"),
        ({"linear_key_head_dim": 8}, "keys of 8 and values of 16 values are not supported"),
    ],
)
def test_settings_that_no_model_has_are_refused(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    config = {**BASE, **DENSE, **DELTA, "linear_conv_kernel_dim": 4, "model_type": "qwen3_5_text"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((ModelError, FormatError), match=told):
        find_shape(str(tmp_path / "config.json"), tmp_path)


def test_a_known_name_comes_before_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen3-0.6b").mkdir()
    assert find_shape("qwen3-0.6b:q8_0", tmp_path) == known_shape("qwen3-0.6b:q8_0")
    with pytest.raises(OptionError, match=r"'q7' is no quantisation\. Choose f32, f16, bf16"):
        find_shape("qwen3-0.6b:q7", tmp_path)


def test_an_unknown_model_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        find_shape("qwen9000", tmp_path)
    assert "no file, folder or known model 'qwen9000'" in str(caught.value)
    assert "qwen3.6-35b-a3b" in caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("m.gguf", ("m.gguf", "")), ("m/config.json:Q4_K_M", ("m/config.json", "q4_k_m")),
        ("http://host:80/m.gguf", ("http://host:80/m.gguf", "")),
        ("org/repo:q8-0", ("org/repo", "q8_0")),
        ("org/repo:m.gguf", ("org/repo:m.gguf", "")), (":q8_0", (":q8_0", "")),
    ],
)  # fmt: skip
def test_a_mix_follows_a_name_after_a_colon(text: str, parts: tuple[str, str]) -> None:
    assert split_mix(text) == parts


def test_smaller_mixes_are_in_order_and_only_of_known_models() -> None:
    sizes = [shape.weight_bytes for shape in smaller_mixes("laguna-xs.2:q6_k").values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < known_shape("laguna-xs.2:q6_k").weight_bytes
    assert smaller_mixes("model.gguf") == {}


def test_planning_from_a_file_never_imports_torch(smollm2_path: Path) -> None:
    program = (
        "import sys; from headroom.cli.main import run_command;"
        f"assert run_command(['plan', {str(smollm2_path)!r}, '--json']) == 0;"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "False\n"
    assert json.loads(done.stdout)["host"]["total_bytes"] > GIB


def test_addresses_and_hub_names_are_read_remotely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = open_header(write_gguf(tmp_path / "model.gguf", SMALL["qwen3"], "q8_0"))
    asked: list[object] = []

    def read_hub(repo: str, file: str | None, namings: Namings) -> ModelHeader:
        asked.append((repo, file))
        return header

    def read_remote(url: str, namings: Namings) -> ModelHeader:
        asked.append(url)
        return header

    monkeypatch.setattr(sources, "read_hub", read_hub)
    monkeypatch.setattr(sources, "read_remote", read_remote)
    files = {
        "org/repo": {"model.safetensors": 1},
        "org/ggufs": {"m-Q4_K_M.gguf": 1, "m-Q8_0.gguf": 2},
    }
    monkeypatch.setattr(sources, "list_files", lambda name: files[name.repo])
    names = ["org/repo", "org/repo:m.gguf", "https://host/m.gguf", "org/repo:q4_k_m"]
    found = [find_shape(name, tmp_path).name for name in names]
    assert asked == [
        ("org/repo", None), ("org/repo", "m.gguf"), "https://host/m.gguf", ("org/repo", None),
    ]  # fmt: skip
    assert found == ["model", "model", "model", "model:q4_k_m"]
    # In a repository of GGUF files, a quantisation is one of them and no mix.
    asked.clear()
    names = ["org/ggufs:q4_k_m", "hf.co/org/ggufs:Q8_0"]
    assert [find_shape(name, tmp_path).name for name in names] == ["model", "model"]
    assert asked == [("org/ggufs", "m-Q4_K_M.gguf"), ("org/ggufs", "m-Q8_0.gguf")]
