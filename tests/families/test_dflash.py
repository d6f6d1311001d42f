"""DFlash drafts as their converters write them: every spelling is the same draft."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.errors import ModelError
from headroom.families.config import AttentionConfig, DraftConfig
from headroom.families.files import open_checkpoint
from headroom.families.synth.recipe import find_recipe, read_recipe
from headroom.families.synth.write import side_files
from headroom.plan.drafts import describe_draft
from tests.dflash_drafts import YARN, RandomDraft, random_draft, target_shape
from tests.optional import optional

gguf = optional("gguf")

LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
# By architecture: the names of the projection and norm of features and of a layer's second norm,
# and the keys of the block, the mask and the target's layers, which llama.cpp counts from 1.
SPELLINGS: dict[str, tuple[tuple[str, str, str], dict[str, Any]]] = {
    "dflash": (
        ("fc", "enc.output_norm", "ffn_norm"),
        {"dflash.block_size": 8, "tokenizer.ggml.mask_token_id": 7,
         "dflash.target_layers": [1, 3, 4]},
    ),
    "dflash-draft": (
        ("dflash.fc", "dflash.hidden_norm", "post_attention_norm"),
        {"dflash-draft.dflash.block_size": 8, "dflash-draft.dflash.mask_token_id": 7,
         "dflash-draft.dflash.n_target_layers": 3,
         "dflash-draft.dflash.target_layer_ids": [0, 2, 3]},
    ),
    "qwen35-dflash-draft": (
        ("dflash_fc", "dflash_hidden_norm", "ffn_norm"),
        {"qwen35-dflash-draft.dflash.block_size": 8,
         "qwen35-dflash-draft.dflash.mask_token_id": 7,
         "qwen35-dflash-draft.dflash.target_layer_ids": [0, 2, 3]},
    ),
}  # fmt: skip


def save_gguf(draft: RandomDraft, path: Path, spelling: str, **changes: Any) -> Path:
    """Write a draft as a converter does; a change to None leaves a key out."""
    config, (names, own) = draft.config, SPELLINGS[spelling]
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"], "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windows,
    }  # fmt: skip
    keys = {f"{spelling}.{key}": value for key, value in keys.items()} | own | changes
    writer = gguf.GGUFWriter(path, spelling)
    for key, value in keys.items():
        if value is not None:
            add = {float: writer.add_float32, list: writer.add_array, int: writer.add_uint32}
            add[type(value)](key, value)
    for name, tensor in draft.weights.items():
        writer.add_tensor(_gguf_name(name, names), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str, names: tuple[str, str, str]) -> str:
    outer = {"fc": names[0], "hidden_norm": names[1], "norm": "output_norm"}
    if not name.startswith("layers."):
        return f"{outer[name.removesuffix('.weight')]}.weight"
    _, number, rest = name.removesuffix(".weight").split(".", 2)
    inner = names[2] if rest == "post_attention_layernorm" else LAYER_NAMES[rest]
    return f"blk.{number}.{inner}.weight"


def read(path: Path) -> DraftConfig:
    return describe_draft(open_checkpoint(path), target_shape()).config


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_converted_draft_is_the_one_of_the_safetensors(spelling: str, tmp_path: Path) -> None:
    draft = random_draft()
    folder, file = draft.save(tmp_path / "draft"), tmp_path / "draft.gguf"
    save_gguf(draft, file, spelling)
    converted = replace(read(file), vocab=320, target_layers=4)  # their files name neither
    assert converted == read(folder)
    theirs, ours = open_checkpoint(folder).tensors, open_checkpoint(file).tensors
    assert ours.keys() == theirs.keys()
    assert len(ours) == 3 + 11 * 3
    for name, info in ours.items():
        assert bytes(info.data()) == bytes(theirs[name].data())


def test_a_draft_has_the_settings_of_its_config(tmp_path: Path) -> None:
    config = read(random_draft(rope_scaling=YARN).save(tmp_path))
    assert (config.hidden, config.vocab, config.target_layers) == (64, 320, 4)
    assert (config.block, config.mask_token, config.taps) == (8, 7, (0, 2, 3))
    assert config.causal == (True, False, True)
    mixers = [layer.mixer for layer in config.layers]
    assert all(isinstance(mixer, AttentionConfig) for mixer in mixers)
    assert [mixer.window for mixer in mixers if isinstance(mixer, AttentionConfig)] == [12, 0, 12]
    ropes = {mixer.rope for mixer in mixers if isinstance(mixer, AttentionConfig)}
    (rope,) = ropes
    assert (rope.theta, rope.dims, len(rope.divisors)) == (1e4, 32, 16)
    assert rope.scale == pytest.approx(1.2079, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({"is_causal": True}, (True, True, True)),
        ({"is_causal": False}, (False, False, False)),
        ({"use_sliding_window": False}, (False, False, False)),
        ({"layer_types": ["full_attention"] * 3}, (False, False, False)),
    ],
)
def test_a_setting_says_whether_layers_are_causal(
    changes: Mapping[str, Any], causal: tuple[bool, ...], tmp_path: Path
) -> None:
    assert read(random_draft(**changes).save(tmp_path)).causal == causal


def test_the_setting_of_a_draft_comes_before_that_of_its_layers(tmp_path: Path) -> None:
    own = {"mask_token_id": 7, "target_layer_ids": [0, 2, 3], "causal": False}
    draft = random_draft(dflash_config=own, is_causal=True)
    assert read(draft.save(tmp_path)).causal == (False,) * 3


def test_a_file_that_names_no_layers_of_the_target_has_the_usual_ones(tmp_path: Path) -> None:
    draft = random_draft(num_target_layers=None)
    del draft.config["dflash_config"]
    draft.config["mask_token_id"] = 9
    folder = draft.save(tmp_path)
    config = describe_draft(open_checkpoint(folder), target_shape(layers=8)).config
    assert (config.taps, config.mask_token) == ((1, 3, 5), 9)


def test_masks_of_files_that_name_none_are_those_of_their_architecture(tmp_path: Path) -> None:
    spelling = "qwen35-dflash-draft"
    changes: dict[str, Any] = {f"{spelling}.dflash.mask_token_id": None}
    path = save_gguf(random_draft(), tmp_path / "a.gguf", spelling, **changes)
    large = target_shape(vocab=248320)
    assert describe_draft(open_checkpoint(path), large).config.mask_token == 248070
    changes = {"tokenizer.ggml.mask_token_id": None}
    path = save_gguf(random_draft(), tmp_path / "b.gguf", "dflash", **changes)
    with pytest.raises(ModelError, match="no setting names the mask token"):
        read(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "a block has 1 tokens; it must have 2 to 64"),
        ({"block_size": 65}, "a block has 65 tokens"),
        ({"sliding_window": 0}, "layer 0 has a window of no size"),
        ({"attention_bias": True}, "hf.attention_bias is True"),
        ({"hidden_act": "gelu"}, "hf.hidden_act is 'gelu'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rotary scaling 'llama3' is not supported",
        ),
        ({"dflash_config": {"mask_token_id": 1.5}}, "mask_token_id is not a whole number"),
    ],
)
def test_settings_without_arithmetic_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    draft = random_draft()
    with pytest.raises(ModelError, match=message):
        read(RandomDraft(draft.config | changes, draft.weights).save(tmp_path))


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    draft = random_draft()
    draft.weights["layers.0.self_attn.conv.weight"] = torch.zeros(4, 4)
    with pytest.raises(
        ModelError, match=r"a tensor 'layers.0.self_attn.conv.weight', which dflash"
    ):
        read(draft.save(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.parametrize("size", ["tiny", "qwen3.6-35b-a3b-dflash"])
def test_a_synthesised_config_gives_back_the_recipe(size: str, tmp_path: Path) -> None:
    recipe = find_recipe("dflash", size)
    (tmp_path / size).mkdir()
    path = tmp_path / size / "config.json"
    text = side_files(recipe, "bfloat16", lambda vocabulary: "{}")["config.json"]
    path.write_text(text)
    assert read_recipe("dflash", path) == recipe
    assert (json.loads(text)["rope_parameters"]["rope_type"] == "yarn") == (size != "tiny")
