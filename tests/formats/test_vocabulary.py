"""The tokenizer that a GGUF file's keys describe, and keys that contradict each other."""

from pathlib import Path

import pytest

from headroom.errors import FormatError
from headroom.families.files import open_checkpoint
from headroom.formats.metadata import Metadata
from headroom.formats.vocabulary import read_vocabulary
from tests.formats.raw_files import ARRAY, BOOL, STRING, U32, Key, gguf_bytes, small_gguf


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


def test_a_file_names_its_tokens_for_gaps_and_whether_texts_end_with_eos(tmp_path: Path) -> None:
    fill_in: list[Key] = [
        (f"tokenizer.ggml.fim_{part}_token_id", U32, index % 2)
        for index, part in enumerate(("pre", "suf", "mid"))
    ]
    vocabulary = read_vocabulary(
        tokens_of(tmp_path, *fill_in, ("tokenizer.ggml.add_eos_token", BOOL, True))
    )
    assert vocabulary is not None
    assert vocabulary.special_ids == {"fim_pre": 0, "fim_suf": 1, "fim_mid": 0}
    assert vocabulary.add_eos
    silent = read_vocabulary(tokens_of(tmp_path))
    assert silent is not None
    assert not silent.add_eos


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
