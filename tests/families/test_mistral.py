"""What is Mistral's own: two names in GGUF, windows, YaRN's magnitudes, and a limit."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedModel

from headroom.errors import FormatError, ModelError
from headroom.families.config import AttentionConfig
from headroom.families.files import open_checkpoint, open_header
from headroom.families.registry import read_dims
from headroom.formats.checkpoint import Checkpoint
from headroom.plan.describe import describe
from tests.families import family_configs as configs
from tests.families import family_gguf
from tests.families.oracles import PROMPT, oracle_logits, variant
from tests.running import run_steps

TEXT = torch.randint(0, 256, (240,), generator=torch.Generator().manual_seed(3)).tolist()
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip


def changed(folder: Path, rope: dict[str, Any] | None = None, **settings: Any) -> Checkpoint:
    """A small Ministral 3's files with other settings, those of rotation among them."""
    path = variant("ministral3").save_safetensors(folder) / "config.json"
    config = json.loads(path.read_text()) | settings
    config["rope_parameters"] |= rope or {}
    path.write_text(json.dumps(config))
    return open_checkpoint(folder)


def first_attention(checkpoint: Checkpoint) -> AttentionConfig:
    mixer = describe(checkpoint).config.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    return mixer


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_every_position_before_queries_grow_equals_transformers(
    tmp_path: Path, kernels: str
) -> None:
    model = variant("ministral3").model()
    variant("ministral3").save_safetensors(tmp_path)
    logits = run_steps(open_checkpoint(tmp_path), [TEXT], [[200, 1, 39]], kernels=kernels)[0]
    torch.testing.assert_close(logits, oracle_logits(model, TEXT), atol=1e-4, rtol=0)


def test_the_context_ends_where_queries_begin_to_grow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = 256  # of 512 positions
    for path in (
        variant("ministral3").save_safetensors(tmp_path / "m"),
        variant("ministral3").save_gguf(tmp_path / "m.gguf"),
    ):
        assert describe(open_checkpoint(path)).config.context_limit == original
        shape = describe(open_checkpoint(path)).shape
        assert shape.context_limit == original
        assert (
            shape.context_end == "later queries are scaled by their position, which no kernel does"
        )
    assert caplog.text.count("the context ends at 256 of 512 tokens") == 4
    caplog.clear()
    steady = changed(tmp_path / "steady", {"llama_4_scaling_beta": 0.0})
    assert describe(steady).config.context_limit == 512
    assert describe(steady).shape.context_end == ""
    assert not caplog.text


def test_a_gguf_file_of_an_older_model_says_llama_and_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = configs.mistral(sliding_window=None)
    monkeypatch.setitem(family_gguf.ARCHITECTURES, "mistral", "llama")
    family_gguf.write_gguf(model, tmp_path / "m.gguf", "F32", False, False)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.architecture == "llama"
    logits = run_steps(checkpoint, [PROMPT], [[20, 1, 3]])[0]
    torch.testing.assert_close(logits, oracle_logits(model, PROMPT), atol=1e-4, rtol=0)


def test_the_gguf_package_knows_every_key_and_tensor_that_files_have(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(variant("ministral3").save_gguf(tmp_path / "m.gguf"))
    keys = {
        value.replace("{arch}", "mistral3")
        for group in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
        for value in vars(group).values()
        if isinstance(value, str)
    }
    assert {key for key in reader.fields if key.startswith("mistral3.")} <= keys
    names = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.MISTRAL3]}
    found = {tensor.name.removesuffix(".weight") for tensor in reader.tensors}
    assert {gguf_name(name) for name in found} <= names


def gguf_name(name: str) -> str:
    parts = name.split(".")
    return f"blk.{{bid}}.{parts[2]}" if parts[0] == "blk" else name


def test_windows_are_in_the_layers_that_transformers_gives_them_to(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    for name, expected in {"mistral": [9, 9, 9], "ministral": [0, 9, 9]}.items():
        path = variant(name).save_safetensors(tmp_path / name) / "config.json"
        # Only one of the two classes reads the kinds of layers.
        path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": kinds}))
        layers = describe(open_checkpoint(path.parent)).config.layers
        mixers = [layer.mixer for layer in layers]
        assert [x.window for x in mixers if isinstance(x, AttentionConfig)] == expected


def test_the_attention_factor_of_yarn_is_that_of_transformers(tmp_path: Path) -> None:
    grown = 0.1 * math.log(4.0) + 1
    cases: dict[str, tuple[dict[str, Any], float]] = {
        "equal": ({}, 1.0),
        "none": ({"mscale_all_dim": 0.0}, grown),
        "half": ({"mscale_all_dim": 0.5}, grown / (0.05 * math.log(4.0) + 1)),
        "given": ({"attention_factor": 1.25}, 1.25),
        "shrunk": ({"mscale_all_dim": 0.0, "factor": 0.5}, 1.0),
    }
    for name, (rope, expected) in cases.items():
        found = first_attention(changed(tmp_path / name, rope))
        assert found.rope.scale == pytest.approx(expected), name


@pytest.mark.parametrize("build", [configs.mistral, configs.ministral3])
def test_the_text_model_of_one_that_sees_pictures_equals_transformers(
    build: Any, tmp_path: Path
) -> None:
    text: PreTrainedModel = build()
    config = Mistral3Config(
        text_config=text.config.to_dict(),
        vision_config=TOWER,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    whole = Mistral3ForConditionalGeneration._from_config(config, dtype=torch.float32)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    if not text.config.tie_word_embeddings:
        whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    assert any("vision_tower" in info.name for info in open_header(tmp_path).tensors.values())
    logits = run_steps(open_checkpoint(tmp_path), [PROMPT], [[20, 1, 3]])[0]
    torch.testing.assert_close(logits, oracle_logits(text, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}, "'mistral4', wh"),
        ({"hidden_act": "gelu"}, r"hf\.hidden_act is 'gelu', which is not supported"),
        ({"rope": {"rope_type": "llama3"}}, r"rope\.scaling\.type is 'llama3', which is not"),
        ({"rope": {"truncate": False}}, "rotary setting 'truncate' is not supported"),
    ],
)
def test_settings_that_no_kernel_implements_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        describe(changed(tmp_path, **settings))


def test_a_limit_without_an_original_context_is_refused(tmp_path: Path) -> None:
    checkpoint = changed(tmp_path, {"original_max_position_embeddings": None})
    with pytest.raises(FormatError, match=r"has no key 'attention\.temperature_length'"):
        read_dims(checkpoint.header)
