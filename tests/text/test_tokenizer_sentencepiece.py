"""Tokenizers of pieces with scores (Llama 2's) and Gemma's: pieces, merges, blanks and bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Coder

from headroom.text.tokenizer import Tokenizer
from tests.text.reference_bpe import sentencepiece_encode
from tests.text.small_vocabularies import gemma_vocabulary, sentencepiece_vocabulary


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello world", ["▁hello", "▁world"]),
        ("hello  world", ["▁hello", "▁", "▁world"]),
        ("", []),
        ("é", ["▁", "é"]),
        ("ü", ["▁", "<0xC3>", "<0xBC>"]),
        ("<s>hello", ["<s>", "▁hello"]),
    ],
)
def test_sentencepiece_texts_have_the_expected_pieces(text: str, pieces: list[str]) -> None:
    vocabulary = sentencepiece_vocabulary()
    ids = Tokenizer.from_vocabulary(vocabulary).encode(text, add_bos=False)
    assert [vocabulary.tokens[token_id] for token_id in ids] == pieces


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("helowrd é👍\n")))
def test_sentencepiece_merges_by_score(text: str) -> None:
    vocabulary = sentencepiece_vocabulary()
    tokenizer = Tokenizer.from_vocabulary(vocabulary)
    marked = ("▁" + text).replace(" ", "▁") if text else ""
    expected = sentencepiece_encode(marked, vocabulary.tokens, vocabulary.scores)
    assert tokenizer.encode(text, add_bos=False) == expected
    assert tokenizer.decode(expected) == text


def test_sentencepiece_without_blank_prefix_adds_and_drops_none() -> None:
    tokenizer = Tokenizer.from_vocabulary(sentencepiece_vocabulary(), blank_prefix=False)
    for text in ("hello", " hello", "  hello"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == text
    assert len(tokenizer.encode("hello", add_bos=False)) == 1


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello hello", ["hello", "▁hello"]),
        ("hello\n\n", ["hello", "\n\n"]),
        ("hello  hello", ["hello", "  ", "hello"]),
        ("ü▁", ["<0xC3>", "<0xBC>", "▁"]),
        ("<bos>he<turn|>", ["<bos>", "he", "<turn|>"]),
    ],
)
def test_gemma_merges_over_plain_text(text: str, pieces: list[str]) -> None:
    vocabulary = gemma_vocabulary()
    tokenizer = Tokenizer.from_vocabulary(vocabulary)
    ids = tokenizer.encode(text, add_bos=False)
    assert [vocabulary.tokens[token_id] for token_id in ids] == pieces
    assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_a_vocabulary_names_its_first_and_its_last_token() -> None:
    tokenizer = Tokenizer.from_vocabulary(gemma_vocabulary())
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (2, 1, True)


def test_a_sentencepiece_tokenizer_file_gives_text_back(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary()
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    marks = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    steps = [marks, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    file = {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, blank]},
        "decoder": {"type": "Sequence", "decoders": steps},
        "added_tokens": [{"id": 1, "content": "<s>", "special": True, **added}],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text],
            "pair": [text, text],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "model": {"type": "BPE", "vocab": ids, "merges": [], "byte_fallback": True},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(file))
    tokenizer = Tokenizer.from_file(path, {"bos_token": {"content": "<s>"}, "eos_token_ids": [2]})
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, True)
    assert tokenizer.encode("ü")[0] == 1
    for line in ("hello", " hello", "ü 👍\n", ""):
        assert tokenizer.decode(tokenizer.encode(line), skip_special=True) == line


@pytest.mark.parametrize(("scheme", "text"), [("always", "he"), ("first", "he"), ("never", " he")])
def test_a_metaspace_decoder_drops_the_blank_that_it_would_prepend(
    tmp_path: Path, scheme: str, text: str
) -> None:
    metaspace = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": scheme,
        "split": False,
    }
    file = {
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"</s>": 0, "▁": 1, "h": 2, "e": 3}, "merges": []},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(file))
    tokenizer = Tokenizer.from_file(path, {"eos_token_ids": [0]})
    assert tokenizer.decode([1, 2, 3]) == text


@pytest.mark.parametrize(
    ("strip", "text"),
    [
        ({"content": " ", "start": 1, "stop": 0}, "he"),
        ({"content": " ", "start": 0, "stop": 1}, " he"),
        ({"content": "h", "start": 1, "stop": 0}, " he"),
    ],
    ids=str,
)
def test_a_decoder_that_strips_drops_a_blank_only_at_the_start(
    tmp_path: Path, strip: dict[str, Any], text: str
) -> None:
    marks = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    steps = [marks, {"type": "Fuse"}, {"type": "Strip", **strip}]
    file = {
        "decoder": {"type": "Sequence", "decoders": steps},
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"</s>": 0, "▁": 1, "h": 2, "e": 3}, "merges": []},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(file))
    tokenizer = Tokenizer.from_file(path, {"eos_token_ids": [0]})
    assert tokenizer.decode([1, 2, 3]) == text
    assert Coder.from_file(str(path)).decode([1, 2, 3]) == text  # the library itself
