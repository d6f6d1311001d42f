"""Settings of both formats under one set of words, with errors that name the key."""

from pathlib import Path
from typing import Any

import pytest

from headroom.errors import FormatError
from headroom.families.files import open_checkpoint
from headroom.families.registry import NAMINGS
from headroom.formats.metadata import Metadata, config_architecture, config_values
from headroom.formats.vocabulary import read_vocabulary
from tests.formats.raw_files import ARRAY, LLAMA_CONFIG, STRING, U32, Key, gguf_bytes, small_gguf

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


def test_a_llama_config_has_the_words_of_gguf() -> None:
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


def test_rope_scaling_has_the_words_of_gguf() -> None:
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


def test_the_text_part_of_a_wrapped_config_comes_out() -> None:
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


def test_a_vocabulary_is_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_gguf())
    vocabulary = open_checkpoint(path).vocabulary
    assert vocabulary is not None
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", "")
    assert list(vocabulary.tokens) == ["a", "b", "ab", "é"]
    assert list(vocabulary.types) == [1, 1, 1, 3]
    assert list(vocabulary.scores) == [0, 1, 2, 3]
    assert list(vocabulary.merges) == ["a b"]
    assert vocabulary.special_ids == {"eos": 3}
    assert not vocabulary.add_bos


@pytest.mark.parametrize(("model", "adds"), [("gpt2", False), ("llama", True), ("gemma4", True)])
def test_a_file_that_does_not_say_adds_bos_as_its_kind_of_tokenizer_does(
    tmp_path: Path, model: str, adds: bool
) -> None:
    vocabulary = read_vocabulary(tokens_of(tmp_path, ("tokenizer.ggml.model", STRING, model)))
    assert vocabulary is not None
    assert vocabulary.add_bos is adds


def tokens_of(tmp_path: Path, *keys: Key) -> Metadata:
    path = tmp_path / "model.gguf"
    tokens: Key = ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "b"]))
    model: Key = ("tokenizer.ggml.model", STRING, "gpt2")
    given = {
        key[0]: key for key in (("general.architecture", STRING, "llama"), model, tokens, *keys)
    }
    path.write_bytes(gguf_bytes(list(given.values())))
    return open_checkpoint(path).metadata


def test_a_special_token_of_minus_one_is_absent(tmp_path: Path) -> None:
    key: Key = ("tokenizer.ggml.padding_token_id", U32, 0xFFFFFFFF)
    vocabulary = read_vocabulary(tokens_of(tmp_path, key))
    assert vocabulary is not None
    assert vocabulary.special_ids == {}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("tokenizer.ggml.bos_token_id", U32, 2), "bos_token_id is 2, but there are 2 tokens"),
        (("tokenizer.ggml.bos_token_id", STRING, "x"), "bos_token_id is 'x', not a whole number"),
        (("tokenizer.ggml.token_type", ARRAY, (5, [1])), "has 1 entries for 2 tokens"),
        (("tokenizer.ggml.token_type", ARRAY, (6, [1, 1])), "not a list of numbers"),
        (("tokenizer.ggml.scores", U32, 1), "scores is 1, not a list of numbers"),
        (("tokenizer.ggml.merges", ARRAY, (5, [1])), "not a list of texts"),
        (("tokenizer.ggml.tokens", STRING, "x"), "tokens is 'x', not a list of texts"),
        (("tokenizer.ggml.model", U32, 1), "tokenizer.ggml.model is 1, not a text"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(
    tmp_path: Path, key: Key, message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        tokens_of(tmp_path, key)
