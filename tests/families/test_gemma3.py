"""What is Gemma 3's own: a pattern that GGUF does not tell, rotations by kind, and old settings."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from headroom.errors import ModelError
from headroom.families.config import AttentionConfig
from headroom.families.dims import pattern
from headroom.families.files import open_checkpoint, open_header
from headroom.families.registry import FAMILIES, KNOWN, read_dims
from headroom.families.synth.recipe import find_recipe, read_recipe
from headroom.families.synth.settings import config_json
from headroom.formats.checkpoint import Checkpoint
from headroom.plan.describe import describe
from tests.families import family_configs as configs
from tests.families import family_keys
from tests.families.oracles import PROMPT, oracle_logits, variant
from tests.families.test_mistral import TOWER, gguf_name
from tests.optional import optional
from tests.running import run_steps

gguf = optional("gguf")


def mixers(checkpoint: Checkpoint) -> list[AttentionConfig]:
    """The attention of every layer."""
    found = [layer.mixer for layer in describe(checkpoint).config.layers]
    return [mixer for mixer in found if isinstance(mixer, AttentionConfig)]


def changed(folder: Path, **settings: Any) -> Checkpoint:
    """A small Gemma 3's files with other settings; None removes one."""
    path = variant("gemma3").save_safetensors(folder) / "config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return open_checkpoint(folder)


def logits_of(checkpoint: Checkpoint) -> torch.Tensor:
    return run_steps(checkpoint, [PROMPT], [[20, 1, 3]])[0]


def test_only_full_layers_are_slowed_down(tmp_path: Path) -> None:
    for path in (
        variant("gemma3").save_safetensors(tmp_path / "m"),
        variant("gemma3").save_gguf(tmp_path / "m.gguf"),
    ):
        found = mixers(open_checkpoint(path))
        assert [mixer.window for mixer in found] == [7, 7, 7, 7, 7, 0, 7]
        assert {(x.rope.theta, x.rope.divisors) for x in found if x.window} == {(1e4, ())}
        assert (found[5].rope.theta, found[5].rope.divisors) == (1e6, (8.0,) * 16)


def test_settings_as_the_hub_has_them_equal_those_that_transformers_writes_today(
    tmp_path: Path,
) -> None:
    old = {
        "rope_parameters": None,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "layer_types": None,
        "sliding_window_pattern": 6,
    }
    expected = logits_of(open_checkpoint(variant("gemma3").save_safetensors(tmp_path / "new")))
    for name, settings in {"old": old, "bare": old | {"sliding_window_pattern": None}}.items():
        assert logits_of(changed(tmp_path / name, **settings)).equal(expected)


def test_another_period_and_another_scale_of_scores_equal_transformers(tmp_path: Path) -> None:
    model = configs.gemma3(sliding_window_pattern=3, query_pre_attn_scalar=24)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert [mixer.window for mixer in mixers(checkpoint)] == [7, 7, 0, 7, 7, 0, 7]
    torch.testing.assert_close(
        logits_of(checkpoint), oracle_logits(model, PROMPT), atol=1e-4, rtol=0
    )


def test_a_gguf_file_without_the_windows_base_has_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = family_keys.FAMILIES["gemma3_text"]
    monkeypatch.setitem(
        family_keys.FAMILIES,
        "gemma3_text",
        lambda config: {key: x for key, x in keys(config).items() if not key.endswith("_swa")},
    )
    checkpoint = open_checkpoint(variant("gemma3").save_gguf(tmp_path / "m.gguf"))
    assert "rope.freq_base_swa" not in checkpoint.metadata
    expected = oracle_logits(variant("gemma3").model(), PROMPT)
    torch.testing.assert_close(logits_of(checkpoint), expected, atol=1e-4, rtol=0)


def test_a_config_of_the_hub_gives_the_published_sizes(tmp_path: Path) -> None:
    """The text settings of google/gemma-3-4b-it, which leave out what transformers adds."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert read_dims(open_header(path)) == KNOWN["gemma-3-4b"]
    recipe = read_recipe("gemma3", path)
    assert (recipe.theta, recipe.window_theta, recipe.linear_factor) == (1e6, 1e4, 8.0)


def test_the_largest_model_divides_scores_by_another_number() -> None:
    scalars = {}
    for name in ("gemma-3-1b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b"):
        values = config_json(FAMILIES["gemma3"].synthesis, find_recipe("gemma3", name), "", {})
        scalars[name] = values["query_pre_attn_scalar"]
    assert list(scalars.values()) == [256, 256, 256, 168]


def test_the_text_model_of_one_that_sees_pictures_equals_transformers(tmp_path: Path) -> None:
    text = variant("gemma3").model()
    config = Gemma3Config(
        text_config=text.config.to_dict(), vision_config=TOWER, mm_tokens_per_image=4
    )
    whole = Gemma3ForConditionalGeneration._from_config(config, dtype=torch.float32)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path)
    assert any("vision_tower" in info.name for info in open_header(tmp_path).tensors.values())
    torch.testing.assert_close(
        logits_of(open_checkpoint(tmp_path)), oracle_logits(text, PROMPT), atol=1e-4, rtol=0
    )


def test_the_gguf_package_knows_every_key_and_tensor_that_files_have(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(variant("gemma3").save_gguf(tmp_path / "m.gguf"))
    keys = {
        value.replace("{arch}", "gemma3")
        for group in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
        for value in vars(group).values()
        if isinstance(value, str)
    }
    assert {key for key in reader.fields if key.startswith("gemma3.")} <= keys
    names = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GEMMA3]}
    found = {tensor.name.removesuffix(".weight") for tensor in reader.tensors}
    assert {gguf_name(name) for name in found} <= names


def test_a_model_without_windows_sees_its_whole_context(tmp_path: Path) -> None:
    header = open_checkpoint(variant("gemma3").save_gguf(tmp_path / "m.gguf")).header
    assert read_dims(header).kinds == pattern(7, 6, "window")
    values = dict(header.metadata.values)
    del values["attention.sliding_window"]
    bare = replace(header, metadata=replace(header.metadata, values=values))
    assert read_dims(bare).kinds == ()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"hidden_activation": "gelu"}, r"hf\.hidden_activation is 'gelu', which is not"),
        ({"final_logit_softcapping": 30.0}, r"hf\.final_logit_softcapping is 30\.0, which is not"),
        ({"attn_logit_softcapping": 50.0}, r"hf\.attn_logit_softcapping is 50\.0, which is not"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True, which is no"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rotary scaling 'yarn' is not supported where 'linear' is usual",
        ),
    ],
)
def test_settings_without_arithmetic_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        describe(changed(tmp_path, **settings))
