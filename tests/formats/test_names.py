"""Tensor names of both formats become one."""

import pytest

from headroom.families.registry import NAMINGS
from headroom.formats.names import (
    LAYER_NAMES,
    MODEL_NAMES,
    Naming,
    canonical_name,
    find_naming,
    safetensors_name,
)

LLAMA = Naming(architecture="llama")


@pytest.mark.parametrize(
    ("gguf", "safetensors", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight", "embed"),
        ("output_norm.weight", "model.norm.weight", "norm"),
        ("output.weight", "lm_head.weight", "head"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", "layers.0.attn.q"),
        ("blk.12.attn_q.bias", "model.layers.12.self_attn.q_proj.bias", "layers.12.attn.q_bias"),
        ("blk.3.attn_norm.weight", "model.layers.3.input_layernorm.weight", "layers.3.attn.norm"),
        (
            "blk.3.attn_k_norm.weight",
            "model.layers.3.self_attn.k_norm.weight",
            "layers.3.attn.k_norm",
        ),
        (
            "blk.3.ffn_up.weight",
            "language_model.model.layers.3.mlp.up_proj.weight",
            "layers.3.ffn.up",
        ),
        ("output.weight", "language_model.lm_head.weight", "head"),
        (
            "blk.3.ffn_down.weight",
            "model.language_model.layers.3.mlp.down_proj.weight",
            "layers.3.ffn.down",
        ),
        ("blk.3.ffn_gate_inp.weight", "model.layers.3.mlp.gate.weight", "layers.3.ffn.router"),
        (
            "blk.3.ffn_gate_up_exps.weight",
            "model.layers.3.mlp.experts.gate_up_proj",
            "layers.3.ffn.experts.gate_up",
        ),
        (
            "blk.3.ffn_up_shexp.weight",
            "layers.3.mlp.shared_expert.up_proj.weight",
            "layers.3.ffn.shared.up",
        ),
    ],
)
def test_both_formats_give_one_name(gguf: str, safetensors: str, ours: str) -> None:
    assert canonical_name(gguf, LLAMA, "gguf") == ours
    assert canonical_name(safetensors, LLAMA, "safetensors") == ours


def test_one_expert_keeps_its_number() -> None:
    name = "model.layers.7.mlp.experts.41.down_proj.weight"
    assert (
        canonical_name(name, NAMINGS["qwen3moe"], "safetensors") == "layers.7.ffn.experts.41.down"
    )


def test_an_expert_with_a_tensor_of_its_own_in_gguf_keeps_its_number() -> None:
    ours = "layers.7.ffn.experts.41.down"
    assert canonical_name("blk.7.ffn_down.41.weight", NAMINGS["llama"], "gguf") == ours
    theirs = "model.layers.7.block_sparse_moe.experts.41.w2.weight"
    assert canonical_name(theirs, NAMINGS["llama"], "safetensors") == ours


def test_an_architecture_may_name_a_tensor_differently() -> None:
    name = "blk.1.post_attention_norm.weight"
    assert canonical_name(name, NAMINGS["qwen35"], "gguf") == "layers.1.ffn.norm"
    assert canonical_name(name, LLAMA, "gguf") == name


@pytest.mark.parametrize(
    ("theirs", "gguf", "ours"),
    [
        ("mtp.fc", "blk.40.nextn.eh_proj", "layers.40.mtp.proj"),
        ("mtp.norm", "blk.40.nextn.shared_head_norm", "layers.40.mtp.norm"),
        ("mtp.layers.0.self_attn.q_proj", "blk.40.attn_q", "layers.40.attn.q"),
        ("model.mtp.layers.0.mlp.gate", "blk.40.ffn_gate_inp", "layers.40.ffn.router"),
        ("model.layers.39.self_attn.q_proj", "blk.39.attn_q", "layers.39.attn.q"),
        ("model.norm", "output_norm", "norm"),
    ],
)
def test_a_layer_that_predicts_ahead_is_counted_behind_the_others_in_both_formats(
    theirs: str, gguf: str, ours: str
) -> None:
    naming = NAMINGS["qwen35moe"]
    assert canonical_name(f"{theirs}.weight", naming, "safetensors", 40) == ours
    assert canonical_name(f"{gguf}.weight", naming, "gguf") == ours
    assert safetensors_name(f"{gguf}.weight", naming, 40) == theirs.removeprefix("model.")


@pytest.mark.parametrize(
    "name", ["v.blk.0.attn_q.weight", "blk.x.attn_q.weight", "blk.0.attn_rot", "mtp.fc.weight"]
)
def test_a_name_without_an_entry_stays_as_it_is(name: str) -> None:
    assert canonical_name(name, LLAMA, "gguf") == name
    assert canonical_name(name, LLAMA, "safetensors") == name


def test_no_two_rows_have_a_name_in_common() -> None:
    for rows in (MODEL_NAMES, LAYER_NAMES):
        for column in range(3):
            names = [row[column] for row in rows if row[column]]
            assert len(set(names)) == len(names)


@pytest.mark.parametrize("naming", NAMINGS.values(), ids=NAMINGS)
def test_no_two_rows_of_an_architecture_have_a_name_in_common(naming: Naming) -> None:
    for rows in (naming.model_names, naming.layer_names):
        for column in (1, 2):
            names = [row[column] for row in rows if row[column]]
            assert len(set(names)) == len(names)
        # A tensor may have several names in GGUF files, whose converters differ.
        ours = [row[0] for row in rows if row[2]]
        assert len(set(ours)) == len(ours)


def test_what_other_converters_write_is_the_same_architecture() -> None:
    others = [name for naming in NAMINGS.values() for name in naming.other_architectures]
    assert len(others) == len({*others} - NAMINGS.keys()) > 0
    for naming in NAMINGS.values():
        for name in (naming.architecture, *naming.other_architectures):
            assert find_naming(name, NAMINGS) is naming


def test_an_architecture_that_is_not_listed_has_the_shared_names() -> None:
    naming = find_naming("mamba", NAMINGS)
    assert naming == Naming(architecture="mamba")
    assert canonical_name("token_embd.weight", naming, "gguf") == "embed"
