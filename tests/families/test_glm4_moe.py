"""What is GLM-4.5's own: biases, norms of heads in some models, layers that predict ahead."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headroom.errors import ModelError
from headroom.families.config import AttentionConfig
from headroom.families.files import open_checkpoint
from headroom.plan.describe import describe
from tests.families import family_configs as configs
from tests.families.family_gguf import write_gguf
from tests.families.oracles import PROMPT, oracle_logits, variant
from tests.optional import optional
from tests.running import run_steps

gguf = optional("gguf")


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_a_model_like_air_without_norms_of_heads_equals_transformers(
    format: str, tmp_path: Path
) -> None:
    model = configs.glm4_moe(use_qk_norm=False, n_shared_experts=2)
    path = tmp_path / "m.gguf"
    if format == "gguf":
        write_gguf(model, path, "F32", fused=False, unused_keys=False)
    else:
        path = tmp_path / "m"
        model.save_pretrained(path)
    checkpoint = open_checkpoint(path)
    logits = run_steps(checkpoint, [PROMPT], [[20, 1, 3]])[0]
    torch.testing.assert_close(logits, oracle_logits(model, PROMPT), atol=1e-4, rtol=0)
    assert [norms_heads(path), norms_heads(variant("glm4moe").save_gguf(tmp_path / "n.gguf"))] == [
        False,
        True,
    ]


def norms_heads(path: Path) -> bool:
    mixer = describe(open_checkpoint(path)).config.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    return mixer.head_norms


def test_a_layer_that_predicts_ahead_is_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published folders have it as one layer more than config.json counts."""
    variant("glm4moe").save_safetensors(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    ahead = {
        name.replace("layers.2.", "layers.3."): values.clone()
        for name, values in tensors.items()
        if ".layers.2." in name
    }
    ahead["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors | ahead, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"has a tensor '(model\.)?layers\.3\.\S+', which glm4moe models do"
    ):
        describe(open_checkpoint(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    with caplog.at_level("INFO"):
        logits = run_steps(open_checkpoint(tmp_path), [PROMPT], [[20, 1, 3]])[0]
    assert "1 layers that predict further ahead are not used" in caplog.text
    wanted = oracle_logits(variant("glm4moe").model(), PROMPT)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


def test_published_settings_have_the_rotated_part_of_a_head_at_the_top(tmp_path: Path) -> None:
    path = variant("glm4moe").save_safetensors(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    for share, dims in ((0.5, 16), (0.25, 8)):
        more = {"rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": share}
        path.write_text(json.dumps(config | more))
        mixer = describe(open_checkpoint(tmp_path)).config.layers[0].mixer
        assert isinstance(mixer, AttentionConfig)
        assert (mixer.rope.dims, mixer.rope.theta) == (dims, 1e6)


def test_the_gguf_package_knows_every_tensor_that_files_have(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(variant("glm4moe").save_gguf(tmp_path / "m.gguf"))
    known = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GLM4_MOE]
    names = {gguf.TENSOR_NAMES[kind].replace("{bid}", "1") for kind in known}
    found = {x.name.removesuffix(".weight").removesuffix(".bias") for x in reader.tensors}
    assert {name for name in found if not name.startswith(("blk.0", "blk.2"))} <= names


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"attention_bias": False}, r"hf\.attention_bias is False, which is not supported"),
        ({"n_group": 4}, r"hf\.n_group is 4, which is not supported"),
        ({"norm_topk_prob": False}, r"hf\.norm_topk_prob is False, which is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0}},
            r"rope\.scaling\.type is 'yarn', which is not supported",
        ),
    ],
)
def test_settings_without_arithmetic_are_refused_by_name(
    tmp_path: Path, settings: dict[str, object], told: str
) -> None:
    path = variant("glm4moe").save_safetensors(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ModelError, match=told):
        describe(open_checkpoint(tmp_path))
