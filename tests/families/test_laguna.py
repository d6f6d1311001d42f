"""What is Laguna's own: its rotations, gates and refusals."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from headroom.errors import ModelError
from headroom.families.config import AttentionConfig
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.plan.describe import describe
from tests.families import family_configs as configs
from tests.families.family_gguf import write_gguf
from tests.families.oracles import oracle_logits, variant
from tests.running import run_steps

TEXT = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(3)).tolist()
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "num_attention_heads_per_layer": [4, 6],
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}


def changed(folder: Path, rope: dict[str, Any] | None = None, **settings: Any) -> Checkpoint:
    """A small model's files with other settings, those of rotation in full layers among them."""
    path = variant("laguna").save_safetensors(folder) / "config.json"
    config = json.loads(path.read_text()) | settings
    config["rope_parameters"]["full_attention"] |= rope or {}
    path.write_text(json.dumps(config))
    return open_checkpoint(folder)


def first_attention(checkpoint: Checkpoint) -> AttentionConfig:
    mixer = describe(checkpoint).config.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    return mixer


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_positions_far_beyond_the_window_equal_transformers(
    tmp_path: Path, kernels: str, softcap: float
) -> None:
    model = configs.laguna(**TWO_LAYERS, moe_router_logit_softcapping=softcap)
    model.save_pretrained(tmp_path)
    pieces = [[16, 1, 15] * 6 + [1] * 8]
    logits = run_steps(open_checkpoint(tmp_path), [TEXT], pieces, kernels=kernels, chunk=16)[0]
    torch.testing.assert_close(logits, oracle_logits(model, TEXT), atol=1e-4, rtol=0)


def test_a_laguna_without_windows_equals_transformers(tmp_path: Path) -> None:
    """The largest published model has no windows."""
    model = configs.laguna(**TWO_LAYERS | {"layer_types": ["full_attention"] * 2,
                                           "num_attention_heads_per_layer": [4, 4]})  # fmt: skip
    model.save_pretrained(tmp_path)
    write_gguf(model, tmp_path / "m.gguf", "F32", False, False)
    assert "laguna.attention.sliding_window" not in gguf.GGUFReader(tmp_path / "m.gguf").fields
    for path in (tmp_path / "model.safetensors", tmp_path / "m.gguf"):
        logits = run_steps(open_checkpoint(path), [TEXT[:30]], [[30]])[0]
        torch.testing.assert_close(logits, oracle_logits(model, TEXT[:30]), atol=1e-4, rtol=0)


def test_an_attention_factor_in_the_file_replaces_the_formula_of_yarn(tmp_path: Path) -> None:
    assert first_attention(changed(tmp_path / "a")).rope.scale == 1.0
    without = changed(tmp_path / "b", {"attention_factor": None, "factor": 32.0})
    assert first_attention(without).rope.scale == pytest.approx(0.1 * math.log(32) + 1)
    shrunk = changed(tmp_path / "c", {"attention_factor": None, "factor": 0.5})
    assert first_attention(shrunk).rope.scale == 1.0


@pytest.mark.parametrize("name", ["laguna", "laguna-per-element"])
def test_both_formats_give_the_same_layers(name: str, tmp_path: Path) -> None:
    gguf = describe(open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf"))).config
    folder = describe(open_checkpoint(variant(name).save_safetensors(tmp_path / "m"))).config
    assert gguf.layers == folder.layers


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"attention_bias": True}, r"hf\.attention_bias is True, which is not supported"),
        ({"hidden_act": "gelu"}, r"hf\.hidden_act is 'gelu', which is not supported"),
        ({"gating": "per-token"}, r"hf\.gating is 'per-token', which is not supported"),
        (
            {"moe_apply_router_weight_on_input": True},
            r"hf\.moe_apply_router_weight_on_input is True, which is not supported",
        ),
        ({"rope": {"rope_type": "longrope"}}, "rotary scaling 'longrope' is not supported"),
        ({"rope": {"mscale": 0.7}}, "rotary setting 'mscale' is not supported"),
        ({"rope": {"truncate": False}}, "rotary setting 'truncate' is not supported"),
        ({"rope": {"factor": 0.0}}, r"factor 0\.0, original context 256\.0 .* make no rotation"),
    ],
)
def test_settings_that_no_kernel_implements_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        describe(changed(tmp_path, **settings))
