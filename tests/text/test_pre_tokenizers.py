"""Word rules, by hand-written examples and by the expressions that llama.cpp documents."""

import unicodedata
from pathlib import Path

import pytest
import regex

from headroom.errors import ModelError
from headroom.text.pre_tokenizers import WORD_RULES, word_rule
from headroom.text.spelling import Spelling
from tests.text.reference_bpe import cut, slow_pattern
from tests.text.text_corpus import corpus_lines

LINES = corpus_lines()
FAMILIES_PAGE = Path(__file__).parents[2] / "docs/families.md"

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
    ("gpt-4o", "getHTTPName's 1234", ["get", "HTTPName's", " ", "123", "4"]),
    ("kimi-k2", "Ab汉字c 12", ["Ab", "汉字", "c", " ", "12"]),
    ("deepseek-v3", "x=汉字 +y 1234", ["x", "=", "汉字", " +", "y", " ", "123", "4"]),
    ("deepseek-v3", "(abc)", ["(abc", ")"]),
    ("tiny_aya", "1234567 a", ["1", "234", "567", " a"]),
    ("afmoe", "12345한국 a", ["12", "345", "한국", " a"]),
    ("superbpe", "a 12345 b", ["a ", "12", "345", " b"]),
    ("falcon", "a+b, 12345", ["a", "+", "b", ",", " 12345"[:1], "123", "45"]),
    ("bailingmoe", "I'll\n\n", ["I", "'ll", "\n\n"]),
    ("glm4", "x12345", ["x", "123", "45"]),
]

# Expressions as llama.cpp and published tokenizers write them, in the order in which they cut.
NO_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = NO_CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
QWEN2 = NO_CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + NO_CASE
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + NO_CASE
)
GPT4O = CASED + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL
HAN = r"(?V1)[\p{Han}]+|"
K2_CASED = CASED.replace(r"\p{M}]", r"\p{M}--\p{Han}]")
SYMBOLS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
) + TAIL
JAIS_SPACES = (
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
    r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
EXPRESSIONS = {
    "gpt-2": [GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "glm4": [LLAMA3],
    "deepseek-r1-qwen": [QWEN2],
    "jais-2": [LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + "|" + JAIS_SPACES],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", SYMBOLS],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "bloom": [r" ?[^(\s|.,!?…。，、।۔،)]+"],
    "viking": [r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"],
    "gpt-4o": [GPT4O],
    "granite-embed-multi-97m": [GPT4O],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O],
    "kimi-k2": [
        HAN + K2_CASED + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL,
    ],
    "youtu": [
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        CASED + r"?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL,
    ],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "seed-coder": [
        NO_CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + TAIL
    ],
    "exaone-moe": [
        NO_CASE + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "minicpm5": [
        r"\p{N}{1,3}",
        NO_CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL,
    ],
    "chameleon": [
        "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\\t\\n]|    |  )",
        r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT2,
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "words"), EXAMPLES)
def test_text_is_cut_into_the_expected_words(name: str, text: str, words: list[str]) -> None:
    assert words_of(name, text) == words


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_corpus_is_cut_as_the_documented_expressions_say(name: str) -> None:
    expressions = [regex.compile(slow_pattern(pattern)) for pattern in EXPRESSIONS[name]]
    for line in LINES:
        # The libraries know different versions of Unicode, and patterns tell marks from symbols.
        kinds = {unicodedata.category(char) for char in line}
        # They do not agree either whether fractions and joiners are parts of words.
        if "Cn" in kinds or (name == "tiny_aya" and kinds & {"No", "Cf"}):
            continue
        words = [line]
        for expression in expressions:
            words = [piece for word in words for piece in cut(expression, word)]
        assert words_of(name, line) == words, repr(line)


def test_groups_of_three_digits_are_counted_from_a_number_s_end() -> None:
    for length in range(1, 12):
        digits = "1234567890123"[:length]
        first = length % 3 or 3
        groups = [digits[:first], *(digits[at : at + 3] for at in range(first, length, 3))]
        for name in ("afmoe", "superbpe", "tiny_aya"):
            assert words_of(name, digits) == groups


def words_of(name: str, text: str) -> list[str]:
    """Cut a text by a rule, and map the words back from printable characters to text."""
    found = word_rule(name).pre_tokenizer().pre_tokenize_str(text)
    return [Spelling.BYTE_LEVEL.to_bytes(word).decode() for word, _ in found]


def test_the_page_on_families_lists_every_rule() -> None:
    page = FAMILIES_PAGE.read_text()
    assert [name for name in WORD_RULES if f"`{name}`" not in page] == []


def test_an_unknown_rule_is_refused_with_names_like_it() -> None:
    with pytest.raises(ModelError, match="word rule 'llama-bp' is not known") as caught:
        word_rule("llama-bp")
    assert str(caught.value.hint).startswith("Known are llama-bpe, ")
    with pytest.raises(ModelError, match="'wordpiece' is not known") as caught:
        word_rule("wordpiece")
    assert caught.value.hint == "All that are known: docs/families.md lists them."


def test_only_qwen_s_rules_compose_text() -> None:
    composing = {name for name, rule in WORD_RULES.items() if rule.normalizer() is not None}
    assert composing == {"qwen2", "qwen35"}
