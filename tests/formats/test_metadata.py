"""Settings of both formats under one set of words, with errors that name the key."""

from pathlib import Path
from typing import Any

import pytest

from headroom.errors import FormatError
from headroom.families.registry import NAMINGS
from headroom.formats.metadata import Metadata, config_architecture, config_values
from tests.formats.raw_files import LLAMA_CONFIG

PATH = Path("model.gguf")


def metadata(**values: object) -> Metadata:
    return Metadata(values, PATH, tied=False)


def test_values_come_with_their_types() -> None:
    found = metadata(n=3, x=0.5, s="text", b=True, many=[1, 2])
    assert (found.get_int("n"), found.get_float("n"), found.get_float("x")) == (3, 3.0, 0.5)
    assert (found.get_str("s"), found.get_bool("b")) == ("text", True)
    assert (found.get_ints("many"), found.get_ints("n")) == ((1, 2), (3,))
    assert set(found.keys()) == {"n", "x", "s", "b", "many"}
    assert "n" in found
    assert "z" not in found


def test_one_number_stands_for_every_layer() -> None:
    assert metadata(n=3).get_ints("n", count=4) == (3, 3, 3, 3)
    assert metadata(n=[1, 2]).get_ints("n", count=2) == (1, 2)
    with pytest.raises(FormatError, match=r"model.gguf: n has 2 numbers, not 4"):
        metadata(n=[1, 2]).get_ints("n", count=4)


def test_a_missing_key_takes_the_default_or_is_named() -> None:
    empty = metadata()
    assert (empty.get_int("n", 7), empty.get_str("n", ""), empty.get_bool("n", False)) == (
        7,
        "",
        False,
    )
    assert empty.get_ints("n", (1,)) == (1,)
    with pytest.raises(FormatError, match=r"model.gguf has no key 'block_count'"):
        empty.get_int("block_count")


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("get_int", True, "n is True, not a whole number"),
        ("get_int", 1.5, "n is 1.5, not a whole number"),
        ("get_float", "1", "n is '1', not a number"),
        ("get_str", 1, "n is 1, not a text"),
        ("get_bool", 1, "n is 1, not true or false"),
        ("get_ints", "12", "n is '12', not a list of whole numbers"),
        ("get_ints", [1, "2"], "not a list of whole numbers"),
        ("get_ints", {"a": 1}, "not a list of whole numbers"),
    ],
)
def test_a_value_of_another_type_is_refused(method: str, value: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        getattr(metadata(n=value), method)("n")


def test_a_llama_config_gets_the_keys_of_gguf() -> None:
    assert config_values(LLAMA_CONFIG) == {
        "hf.model_type": "llama",
        "hf.architectures": ["LlamaForCausalLM"],
        "block_count": 2,
        "embedding_length": 8,
        "feed_forward_length": 16,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 2,
        "attention.value_length": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
        "context_length": 128,
        "vocab_size": 10,
        "hf.tie_word_embeddings": True,
        "hf.hidden_act": "silu",
        "hf.attention_bias": False,
        "hf.eos_token_id": 2,
    }


def test_rope_scaling_gets_the_keys_of_gguf() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    assert config_values({"rope_scaling": scaling}) == {
        "rope.scaling.type": "llama3",
        "rope.scaling.factor": 32.0,
        "rope.scaling.low_freq_factor": 1.0,
        "rope.scaling.original_context_length": 8192,
    }
    old = config_values({"rope_scaling": {"type": "linear", "factor": 2}})
    assert old == {"rope.scaling.type": "linear", "rope.scaling.factor": 2}


def test_rope_parameters_of_the_plain_kind_give_only_the_base() -> None:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert config_values(plain) == {"rope.freq_base": 1e6}


def test_rope_parameters_per_kind_of_layer_stay_visible() -> None:
    kinds = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert config_values({"rope_parameters": kinds}) == {"hf.rope_parameters": kinds}


def test_settings_of_text_config_replace_those_around_it() -> None:
    config = {"model_type": "qwen3_5", "hidden_size": 1, "text_config": {"hidden_size": 64}}
    assert config_values(config) == {"hf.model_type": "qwen3_5", "embedding_length": 64}


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"model_type": "qwen3_moe"}, "qwen3moe"),
        ({"model_type": "gpt_neo"}, "gpt_neo"),
        ({"text_config": {"model_type": "gemma4_text"}}, "gemma4"),
        ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, "dflash"),
    ],
)
def test_a_config_names_its_architecture(config: dict[str, Any], architecture: str) -> None:
    assert config_architecture(config, PATH, NAMINGS) == architecture


def test_a_config_without_a_model_type_is_refused() -> None:
    with pytest.raises(FormatError, match=r"config.json has no model_type"):
        config_architecture({"hidden_size": 3}, Path("config.json"), NAMINGS)
