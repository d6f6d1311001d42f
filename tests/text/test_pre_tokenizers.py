"""Word rules, by hand-written examples."""

import pytest

from headroom.text.pre_tokenizers import WORD_RULES, word_rule
from headroom.text.spelling import Spelling

EXAMPLES = [
    ("smollm", "I'll pay  12 €", ["I", "'ll", " pay", "  ", "1", "2", " €"]),
    ("smollm", "I'LL  go", ["I", "'", "LL", " ", " go"]),
    ("qwen2", "I'LL  go 12", ["I", "'LL", " ", " go", " ", "1", "2"]),
    ("qwen2", "a\r\n\r\n  b", ["a", "\r\n\r\n", " ", " b"]),
    ("qwen2", "(x) !?\n\ny", ["(x", ")", " !?\n\n", "y"]),
    ("qwen2", "हूँ", ["ह", "ूँ"]),
    ("qwen35", "हूँ", ["हूँ"]),
    ("qwen35", "हूँ 12", ["हूँ", " ", "1", "2"]),
    ("laguna", "a \n\n b", ["a", " ", "\n\n", " b"]),
    ("laguna", "!\n", ["!", "\n"]),
    ("llama-bpe", "1234567 x", ["123", "456", "7", " x"]),
    ("tekken", "getHTTPName I'll 12", ["get", "HTTPName", " I", "'ll", " ", "1", "2"]),
    ("tekken", "a =/\n/b", ["a", " =/\n/", "b"]),
]


@pytest.mark.parametrize(("name", "text", "words"), EXAMPLES)
def test_text_is_cut_into_the_expected_words(name: str, text: str, words: list[str]) -> None:
    cut = word_rule(name).pre_tokenizer().pre_tokenize_str(text)
    assert [Spelling.BYTE_LEVEL.to_bytes(word).decode() for word, _ in cut] == words


def test_only_qwen_s_rules_compose_text() -> None:
    composing = {name for name, rule in WORD_RULES.items() if rule.normalizer() is not None}
    assert composing == {"qwen2", "qwen35"}
