"""Regular expressions in JSON strings, compared with Python's `re` on the texts themselves."""

import json
import random
import re

import pytest

from headroom.text.json_regex import RegexError, json_regex
from tests.text.matching import accepts, written

TEXTS = (
    *("", "a", "ab", "b", "\n", '"', "\\", "\t", "a\nb", 'say "x"', "C:\\x\n", "\x00", "\x1f", "é"),
    *("日本", "a.b", "\r\n", "AB", "12", "a b", "\\n", "/", "{}", "]", "\x7f", "\u2028"),
)
PATTERNS = (
    *("a", ".", ".*", r"\n", r"\\", '"', r"\"", r"[^a]", r"[^a-z]+", r'[\n"]', r"[\\a]*", r"\s+"),
    *(r"\S*", r"\w+", r"\d+", r"\D", r"(a|\n)*", r"(?:b|a\nb)", r"a?b?", r".{2}", r'say "(.+)"'),
    *(r"C:\\x\n", r"\x22", r"\x0a", r"[\x00-\x1f]", r"[^\n]*", r"\/", r"[{}]+", r"[\]\[]", r"\."),
    *(r"\t|\r\n", r"[a\-\\]", "[\"']", r"[^\\\"]*", "[]a]", r"[^]\n]+"),
)  # fmt: skip


def spelled(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("flags", ["", "s", "i"])
def test_the_spelling_of_a_text_matches_where_the_text_does(pattern: str, flags: str) -> None:
    grammar = f"start: /{json_regex(pattern, flags)}/{flags}"
    coded = re.compile(f"(?{flags}){pattern}" if flags else pattern)
    for text in TEXTS:
        if text == "\x1f" and pattern in (r"\s+", r"\S*"):
            continue  # white space for Python only
        assert accepts(grammar, spelled(text)) == bool(coded.fullmatch(text)), (text, grammar)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_whatever_matches_is_the_spelling_of_a_text_that_matches(pattern: str) -> None:
    dice = random.Random(pattern)
    grammar = f"start: /{json_regex(pattern)}/"
    for _ in range(20):
        if (coded := written(grammar, dice, 40)) is not None:
            text = json.loads(f'"{coded}"')
            assert re.fullmatch(pattern, text), (coded, text)
            assert spelled(text) == coded


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        (r"(?s:.)x", "\nx", True),
        (r"(?s:.).", "\n\n", False),
        (r"(?s).(?-s:.)", "\n\n", False),
        (r"(?i:a\n)b", "A\nb", True),
        (r"(?i:a)B", "Ab", False),
        (r"[[:alpha:]]+\n", "ab\n", True),
        (r"[\w&&[^b]]", "a", True),
        (r"[\w&&[^b]]", "b", False),
        (r"\p{L}\n", "é\n", True),
        (r"\x{22}[]a]", '"]', True),
        (r"(?P<one>\n)(?<two>\t)", "\n\t", True),
    ],
)
def test_what_only_rust_can_say_is_understood(pattern: str, text: str, matches: bool) -> None:
    assert accepts(f"start: /{json_regex(pattern)}/", spelled(text)) == matches


@pytest.mark.parametrize("pattern", ["(?x) a", "[a", r"\p{Nonsense}"])
def test_what_cannot_be_rewritten_is_refused(pattern: str) -> None:
    with pytest.raises(RegexError):
        json_regex(pattern)
