"""The text of custom tools, read from the JSON of a function's argument."""

import json
import random

import pytest

from headroom.server.custom_input import InputText


def read(arguments: str, sizes: list[int]) -> tuple[str, str]:
    """Return all deltas and the whole text, for arguments that come in pieces of these sizes."""
    reader = InputText()
    deltas, at = "", 0
    for size in [*sizes, len(arguments)]:
        deltas += reader.push(arguments[at : at + size])
        at += size
    whole = deltas + reader.finish()
    assert whole == InputText.of(arguments)
    return deltas, whole


TEXTS = [
    "",
    "plain",
    'a "quoted" \\ text\n\twith\r\b\f / escapes',
    "é ü \N{GRINNING FACE}\N{MUSICAL SYMBOL G CLEF}\x00\x1f\u2028",
    "*** Begin Patch\n*** Update File: a.py\n@@\n-x = '\\n'\n+x = \"\\u00e9\"\n*** End Patch\n",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_text_is_read_however_its_json_is_cut(text: str, ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    for cut in range(len(arguments)):
        assert read(arguments, [cut]) == (text, text)
    generator = random.Random(3)
    for _ in range(50):
        sizes = [generator.randint(0, 4) for _ in range(len(arguments))]
        assert read(arguments, sizes) == (text, text)
    spaced = json.dumps({"input": text}, indent=2, ensure_ascii=ascii_only)
    assert read(spaced, [1] * len(spaced)) == (text, text)


@pytest.mark.parametrize(
    "arguments", ["", "[1]", "{}", '{"text": "x"}', '{"input": 7}', "not JSON", '{"inp', '"x"']
)
def test_arguments_without_an_input_text_are_the_text_itself(arguments: str) -> None:
    assert read(arguments, [1] * len(arguments)) == ("", arguments)


def test_an_input_after_other_fields_is_found_at_the_end() -> None:
    arguments = '{"why": "x", "input": "text"}'
    assert read(arguments, [5, 5]) == ("", "text")


def test_halves_of_characters_are_replaced() -> None:
    assert read('{"input": "a\\ud83dx\\ude00b"}', [13])[1] == "a\ufffdx\ufffdb"
    assert read('{"input": "a\\ud83d\\ude00b"}', [14])[1] == "a\N{GRINNING FACE}b"


def test_a_text_that_was_cut_off_is_kept() -> None:
    assert read('{"input": "half a te', [3])[1] == "half a te"
