"""Embedded Lark grammars match in a call exactly what llguidance matches with them alone."""

import json
import random
import re

import pytest

from headroom.text.json_regex import RegexError
from headroom.text.lark_embedding import LarkError, containing, embed_lark
from tests.text.matching import accepts, written

# A grammar in the manner of agents' patches: lines, a break after each, the last one optional.
PATCH = r"""
start: "*** Begin" LF file+ "*** End" LF?   // the whole
file: "*** File: " name LF (add | "-" line LF -> drop)+
    | "*** Remove: " name LF
name: /(.+)/
add: "+" /(.*)/ LF -> add
line: /[^\n]*/
%import common.LF
"""
SUMS = r"""
?start: sum
sum: sum ("+" | "-") product | product
product: product "*" atom | atom
atom: NUMBER | "(" sum ")" | "max"i "[" sum ("," sum)~1..2 "]" | ESCAPED_STRING
%import common (NUMBER, ESCAPED_STRING)
%import common.WS -> BLANK
%ignore BLANK
%ignore /#[a-z]*\n/
"""
BLOCKS = r"""
start: block{1,2}
block: "{" LINE* block? "}" "\n"
LINE: /[a-z <\/>"\\]+/ "\n"
"""
LETTERS = 'start: "a".."e"~2 ("\\x22" | "\\u00e9"i | /[\\t]/ )'
WORDS = "start: word (/[ \\n]+/ word)*\nword: /[a-z]+/"
LIST = 'start: NAME ("," NAME)*\nNAME: /[a-z]+/\n%import common.WS\n%ignore WS'
GRAMMARS = {
    "patch": PATCH,
    "sums": SUMS,
    "blocks": BLOCKS,
    "letters": LETTERS,
    "words": WORDS,
    "list": LIST,
}
END = "</text>"


def alone(name: str, text: str) -> bool:
    """Return whether a text matches a grammar; as in Lark, it may begin with what is ignored."""
    options = '%llguidance {"allow_initial_skip": true}\n' if "%ignore" in GRAMMARS[name] else ""
    return accepts(options + GRAMMARS[name], text)


def in_json(grammar: str) -> str:
    embedded = embed_lark(grammar, "g7", in_json=True)
    return "\n".join([f'start: "\\"" {embedded.start} "\\""', *embedded.definitions])


def in_tags(grammar: str) -> str:
    """Return the grammar of a text between tags, as calls have it."""
    embedded = embed_lark(grammar, "g7", end=END)
    if not embedded.is_terminal:
        return "\n".join([f'start: "<text>" {embedded.start} "\\n{END}"', *embedded.definitions])
    body = f'value[suffix="\\n{END}"]: {embedded.start} & ~{containing(END)}'
    return "\n".join(['start: "<text>" value', body, *embedded.definitions])


def samples(name: str) -> set[str]:
    """Return random texts of a grammar, and the same with something changed."""
    dice = random.Random(name)
    found = [written(GRAMMARS[name], dice) for _ in range(30)]
    right = {text for text in found if text}
    assert len(right) > 8
    wrong = set()
    for text in sorted(right):  # a set's order differs from process to process
        at = dice.randrange(len(text) + 1)
        wrong.add(text[:at] + dice.choice(["", "x", "\n", '"', "\\", "}", " "]) + text[at + 1 :])
    # What is ignored at the end of a text is left out.
    return {
        text for text in right | wrong if "%ignore" not in GRAMMARS[name] or text.strip() == text
    }


@pytest.mark.parametrize("name", GRAMMARS)
def test_texts_match_in_json_as_they_do_alone(name: str) -> None:
    embedded = in_json(GRAMMARS[name])
    both = [0, 0]
    for text in samples(name):
        fits = alone(name, text)
        both[fits] += 1
        assert accepts(embedded, json.dumps(text, ensure_ascii=False)) == fits, text
    assert min(both) > 3


@pytest.mark.parametrize("name", GRAMMARS)
def test_texts_match_between_tags_as_they_do_alone(name: str) -> None:
    embedded = in_tags(GRAMMARS[name])
    for text in samples(name):
        fits = alone(name, text)
        assert accepts(embedded, f"<text>{text}\n{END}") == fits, text


@pytest.mark.parametrize("name", GRAMMARS)
def test_whatever_an_embedded_grammar_writes_matches_alone(name: str) -> None:
    dice = random.Random(name)
    tried = 0
    for _ in range(16):
        quoted = written(in_json(GRAMMARS[name]), dice)
        if quoted is not None:
            assert alone(name, json.loads(quoted)), quoted
            tried += 1
        tagged = written(in_tags(GRAMMARS[name]), dice)
        if tagged is not None:
            text = tagged.removeprefix("<text>")
            assert text.index(END) == len(text) - len(END), text
            assert alone(name, text[: -len(END) - 1]), text
    assert tried > 2


@pytest.mark.parametrize("name", ["patch", "blocks"])
def test_a_text_between_tags_cannot_hold_the_end_tag(name: str) -> None:
    text = {
        "patch": f"*** Begin\n*** File: a\n+x {END}\n*** End",
        "blocks": f"{{a{END}\n}}\n",
    }[name]
    assert alone(name, text)
    assert not accepts(in_tags(GRAMMARS[name]), f"<text>{text}\n{END}")
    assert accepts(in_json(GRAMMARS[name]), json.dumps(text))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: <|end|>", "<|end|> cannot be used"),
        ("start: @other", "@other cannot be used"),
        ('start: %json {"type": "object"}', "%json cannot be used"),
        ('start: %regex {"substring_chars": "x"}', "%regex cannot be used"),
        ('start: %lark {\nstart: "x"\n}', "%lark cannot be used"),
        ('%llguidance {}\nstart: "x"', "%llguidance cannot be used"),
        ("start: A\nA: /a/ & ~/b/", "~ cannot be used"),
        ("start[lazy]: /a+/", "attributes"),
        ('%declare A\nstart: "x"', "%declare cannot be used"),
        ("start: /(?x)a b/", "the flag x"),
        ("%import other.A\nstart: A", "not of 'other'"),
    ],
)
def test_what_only_the_parser_knows_is_refused(grammar: str, message: str) -> None:
    with pytest.raises((LarkError, RegexError), match=re.escape(message)):
        embed_lark(grammar, "g", in_json=True)


def test_a_recursive_grammar_with_the_end_tag_in_a_text_is_refused() -> None:
    grammar = f'start: "(" start ")" | "{END}"'
    with pytest.raises(LarkError, match="ends the argument"):
        embed_lark(grammar, "g", end=END)
