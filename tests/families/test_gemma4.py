"""What is Gemma 4's own: windows, shared caches, per-layer inputs, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.errors import ModelError
from headroom.families.config import AttentionConfig
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.plan.describe import describe
from tests.families import family_configs as configs
from tests.families.oracles import oracle_logits, variant
from tests.running import run_steps

KERNELS = pytest.mark.parametrize("kernels", ["auto", "reference"])
TEXT = torch.randint(0, 256, (180,), generator=torch.Generator().manual_seed(9)).tolist()
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


def changed(folder: Path, **settings: Any) -> Checkpoint:
    """A small model's files with other settings than its weights were made for."""
    path = variant("gemma4-e2b").save_safetensors(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return open_checkpoint(folder)


@KERNELS
def test_sequences_far_beyond_their_window_equal_transformers(tmp_path: Path, kernels: str) -> None:
    """Two pages are used in turn, by steps that are wider than the window."""
    model = configs.gemma4(**TWO_LAYERS)
    model.save_pretrained(tmp_path)
    prompts = [TEXT, TEXT[100:]]
    pieces = [[16, 1, 13] * 3 + [1] * 10 + [16] * 5, [16, 16, 3] * 2 + [1] * 10]
    steps = run_steps(open_checkpoint(tmp_path), prompts, pieces, kernels=kernels, chunk=32)
    for tokens, logits in zip(prompts, steps, strict=True):
        assert len(logits) == len(tokens)
        expected = oracle_logits(model, tokens)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@KERNELS
def test_heads_of_512_values_equal_transformers(tmp_path: Path, kernels: str) -> None:
    model = configs.gemma4(**TWO_LAYERS, head_dim=256, global_head_dim=512)
    model.save_pretrained(tmp_path)
    logits = run_steps(open_checkpoint(tmp_path), [TEXT[:40]], [[30, 1, 9]], kernels=kernels)[0]
    torch.testing.assert_close(logits, oracle_logits(model, TEXT[:40]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gemma4-e4b", "gemma4-e2b"])
def test_layers_without_a_cache_read_the_last_of_their_kind(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf"))
    mixers = [layer.mixer for layer in describe(checkpoint).config.layers]
    owners = [mixer.shares for mixer in mixers if isinstance(mixer, AttentionConfig)]
    expected = [None] * 6 + [4] * 5 + [5] if name.endswith("e4b") else [None] * 5 + [3] * 4 + [4]
    assert owners == expected


def test_a_layer_that_finds_no_cache_of_its_kind_is_refused(tmp_path: Path) -> None:
    kinds = ["full_attention"] * 5 + ["sliding_attention"] * 4 + ["full_attention"]
    full = {str(i): {"head_dim": 32} for i, kind in enumerate(kinds) if kind == "full_attention"}
    checkpoint = changed(tmp_path, layer_types=kinds, per_layer_config=full)
    with pytest.raises(ModelError, match="layer 5 has no cache of its own, and no earlier window"):
        _config_only(checkpoint)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"hidden_activation": "silu"}, r"hf\.hidden_activation is 'silu', which is not supported"),
        ({"attention_bias": True}, r"hf\.attention_bias is True, which is not supported"),
        ({"use_bidirectional_attention": "all"}, r"use_bidirectional_attention is 'all', which is"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0, which is not supp"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters has no 'full_attention'",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "rotary scaling 'linear' is not supported where 'proportional' is usual",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "proportional", "rope_theta": 1e6, "factor": 2.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "rotary setting 'factor' is not supported",
        ),
    ],
)  # fmt: skip
def test_settings_that_no_kernel_implements_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        describe(changed(tmp_path, **settings))


def _config_only(checkpoint: Checkpoint) -> None:
    """Read the settings without the check of tensors, which other kinds of layers would fail."""
    from headroom.families.gemma4 import read_config
    from headroom.families.registry import read_dims

    read_config(checkpoint.header, read_dims(checkpoint.header))
