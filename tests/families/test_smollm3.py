"""What is SmolLM3's own: layers that do not rotate, and how settings name them."""

import json
from pathlib import Path

import pytest
import torch

from headroom.errors import ModelError
from headroom.families.config import AttentionConfig
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.plan.describe import describe
from tests.families import family_configs as configs
from tests.families.oracles import PROMPT, oracle_logits, variant
from tests.families.test_mistral import gguf_name
from tests.optional import optional
from tests.running import run_steps

gguf = optional("gguf")


def standing(checkpoint: Checkpoint) -> list[int]:
    """The layers that rotate by angles of 0."""
    layers = describe(checkpoint).config.layers
    return [
        index
        for index, layer in enumerate(layers)
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.rope.divisors
    ]


def test_every_fourth_layer_does_not_rotate_in_either_format(tmp_path: Path) -> None:
    for path in (
        variant("smollm3").save_safetensors(tmp_path / "m"),
        variant("smollm3").save_gguf(tmp_path / "m.gguf"),
    ):
        assert standing(open_checkpoint(path)) == [3]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_list_of_layers_equals_transformers(tmp_path: Path, kernels: str) -> None:
    model = configs.smollm3(no_rope_layers=[0, 1, 1, 0, 0])
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert standing(checkpoint) == [0, 3, 4]
    logits = run_steps(checkpoint, [PROMPT], [[20, 1, 3]], kernels=kernels)[0]
    torch.testing.assert_close(logits, oracle_logits(model, PROMPT), atol=1e-4, rtol=0)


def test_an_interval_stands_for_a_list(tmp_path: Path) -> None:
    path = variant("smollm3").save_safetensors(tmp_path) / "config.json"
    config = json.loads(path.read_text()) | {"no_rope_layer_interval": 2}
    del config["no_rope_layers"]
    path.write_text(json.dumps(config))
    assert standing(open_checkpoint(tmp_path)) == [1, 3]


def test_the_gguf_package_knows_every_tensor_that_files_have(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(variant("smollm3").save_gguf(tmp_path / "m.gguf"))
    names = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.SMOLLM3]}
    found = {tensor.name.removesuffix(".weight") for tensor in reader.tensors}
    assert {gguf_name(name) for name in found} <= names


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"use_sliding_window": True}, r"hf\.use_sliding_window is True, which is not supported"),
        ({"attention_bias": True}, r"hf\.attention_bias is True, which is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0}},
            r"rope\.scaling\.type is 'yarn', which is not supported",
        ),
        ({"no_rope_layers": [1]}, r"hf\.no_rope_layers is not a list of 5 entries"),
    ],
)
def test_settings_without_arithmetic_are_refused_by_name(
    tmp_path: Path, settings: dict[str, object], told: str
) -> None:
    path = variant("smollm3").save_safetensors(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ModelError, match=told):
        describe(open_checkpoint(tmp_path))
