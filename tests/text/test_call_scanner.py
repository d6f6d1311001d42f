"""CallScanner: what is read depends on the text alone, and JSON means what `json` says."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headroom.text.call_scanner import (
    CallArguments,
    CallScanner,
    CallStart,
    NotACallError,
    PlainText,
    Reading,
    read_json_value,
    read_string_value,
    whole_json,
)
from headroom.text.conversation import Tool

T = TypeVar("T")
TEXT = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
CUTS = st.lists(st.integers(0, 60), max_size=8)
# Pieces of JSON, right and wrong, so that many texts begin well.
JSON_LIKE = st.lists(
    st.sampled_from([*'{}[],: \n"a1\\-', '"k":', "true", "None", "\\u00e9", "\\ud800", "</end>"]),
    max_size=12,
).map("".join)


def cut(text: str, cuts: Sequence[int]) -> Iterator[str]:
    """Yield a text in pieces, some of them empty."""
    edges = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    yield from (text[a:b] for a, b in pairwise(edges))


def read(reading: Reading[T], scan: CallScanner, pieces: Iterator[str]) -> T:
    """Return what a reader returns for a text that comes in pieces."""
    while True:
        try:
            next(reading)
        except StopIteration as end:
            result: T = end.value
            return result
        piece = next(pieces, None)
        scan.ended = piece is None
        scan.push(piece or "")


def outcome(
    start: Callable[[CallScanner, Callable[[str], None]], Reading[object]], pieces: Iterator[str]
) -> tuple[str, object]:
    """Return all that a reader passes on, and what it returns, or "refused"."""
    scan, told = CallScanner(()), list[str]()
    try:
        result = read(start(scan, told.append), scan, pieces)
    except NotACallError:
        return "".join(told), "refused"
    return "".join(told), result


def json_reader(scan: CallScanner, emit: Callable[[str], None]) -> Reading[object]:
    return read_json_value(scan, emit, ends=("</end>",))


@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans(), CUTS)
def test_a_json_value_is_passed_on_as_it_is_written(
    value: Any, indent: int | None, ascii_only: bool, cuts: list[int]
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    told, result = outcome(json_reader, cut(text + " \n", cuts))
    assert (told, result) == (text, None)


@given(JSON_LIKE, CUTS)
@example('{"k":[1,]', [3])
@example('"\\ud800\\u0041"', [3, 6, 9])
def test_where_a_text_is_cut_changes_nothing_that_is_read_from_it(
    text: str, cuts: list[int]
) -> None:
    assert outcome(json_reader, cut(text, cuts)) == outcome(json_reader, iter([text]))


@given(JSON_LIKE)
def test_a_whole_text_is_json_as_python_reads_it_or_nothing(text: str) -> None:
    found = whole_json(text)
    try:
        meant = json.loads(text)
    except ValueError:
        if found is not None:
            json.loads(found)  # mended
    else:
        assert found is not None
        assert json.loads(found) == meant or "\\ud800" in text


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ('{"a": 1,}', {"a": 1}),
        ("[1, 2, ]", [1, 2]),
        ('{"a": True, "b": [False, None]}', {"a": True, "b": [False, None]}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        (r'{"a": "\d+\s"}', {"a": r"\d+\s"}),
        (r'"\u12"', r"\u12"),
        (r'"\ud800\udc00"', "\U00010000"),
        (r'"\udbff\udfff"', "\U0010ffff"),
        (r'"\ud800\udbff"', "\ufffd\ufffd"),
        (r'"\ud7ff\ue000"', "\ud7ff\ue000"),
        (r'"\udc00x"', "\ufffdx"),
    ],
)
def test_usual_mistakes_of_models_are_mended(text: str, mended: object) -> None:
    found = whole_json(text)
    assert found is not None
    assert json.loads(found) == mended


@pytest.mark.parametrize(
    "text", ["", "{", '{"a"}', '{"a":}', "[1 2]", "01", "1 2", "nul", "{a: 1}", '"a', "[,]x", "1."]
)
def test_what_cannot_be_json_is_refused(text: str) -> None:
    assert whole_json(text) is None


@pytest.mark.parametrize(
    ("text", "told"), [('{"a": [1, {"b": 2</end>', '{"a": [1, {"b": 2}]}'), ("[</end>", "[")]
)
def test_brackets_that_are_open_at_an_end_mark_are_closed(text: str, told: str) -> None:
    found, _ = outcome(json_reader, iter([text]))
    assert found == told


@given(st.text(st.characters(codec="utf-8", exclude_characters='"\\')), CUTS)
def test_a_string_without_escapes_keeps_every_character(text: str, cuts: list[int]) -> None:
    scan = CallScanner(())
    found = read(read_string_value(scan), scan, cut(f'"{text}"', cuts))
    assert found == text == json.loads(f'"{text}"', strict=False)


@given(st.lists(st.sampled_from(["\\ud83d", "\\ude00", "\\u0041", "x"]), max_size=5), CUTS)
def test_half_a_surrogate_pair_becomes_the_replacement_character(
    parts: list[str], cuts: list[int]
) -> None:
    text = f'"{"".join(parts)}"'
    scan = CallScanner(())
    utf16 = json.loads(text).encode("utf-16-le", "surrogatepass")
    assert read(read_string_value(scan), scan, cut(text, cuts)) == utf16.decode(
        "utf-16-le", "replace"
    )


MARK, FOLLOWS = "</p>", ("<p ", "</f>")
MARKUP = st.lists(
    st.sampled_from(["a", "\n", "\r\n", "</", "</p>", "</f>", "<p b>", " "]), max_size=10
).map("".join)


def marked_text(text: str) -> str | None:
    """Return what comes before the first mark that another mark or the answer's end follows."""
    place = text.find(MARK)
    while place >= 0:
        after = text[place + len(MARK) :].lstrip()
        if any(after.startswith(x) or x.startswith(after) for x in FOLLOWS):
            return text[:place]
        place = text.find(MARK, place + len(MARK))
    return None


@given(MARKUP, st.booleans(), CUTS)
@example("a\n</p>\n</f>", True, [2])
@example("a\r\n</p>", True, [2])
@example("a</p>b</p> <p c", False, [5, 9])
def test_a_value_ends_at_the_first_mark_that_markup_follows(
    text: str, trims: bool, cuts: list[int]
) -> None:
    def reader(scan: CallScanner, emit: Callable[[str], None]) -> Reading[object]:
        return scan.stream_until(MARK, FOLLOWS, emit, trims=trims)

    told, result = outcome(reader, cut(text, cuts))
    wanted = marked_text(text)
    if wanted is None:
        assert result == "refused"
        return
    if trims:  # one line break at each end belongs to the markup
        wanted = wanted.removeprefix("\r\n") if wanted[:2] == "\r\n" else wanted.removeprefix("\n")
        wanted = wanted.removesuffix("\r\n") if wanted[-2:] == "\r\n" else wanted.removesuffix("\n")
    assert (told, result) == (wanted, None)


def tools(*names: str) -> list[Tool]:
    return [Tool(name=name) for name in names]


def test_a_name_is_refused_as_soon_as_no_tool_begins_like_it() -> None:
    scan = CallScanner(tools("get_time", "get_weather"))
    reading = scan.take_name("(")
    for piece in (" ", "get", "_we"):
        next(reading)
        scan.push(piece)
    next(reading)
    scan.push("b")
    with pytest.raises(NotACallError, match="no tool 'get_web'"):
        next(reading)
    assert scan.held == len(" get_web")  # all of it may still turn out to be text
    scan.rewind()
    assert scan.rest == " get_web"


def test_a_name_ends_at_a_given_character_and_loses_its_blanks() -> None:
    scan = CallScanner(tools("now"))
    assert read(scan.take_name("(:"), scan, iter([" n", "ow ", "(x"])) == "now"
    assert scan.rest == "(x"


def test_text_before_a_commit_does_not_come_back() -> None:
    scan = CallScanner(tools("now"))
    scan.push("Well, ")
    scan.advance(len("Well, "))
    scan.commit()
    scan.push('hm.<call>now({"a": 1')
    scan.emit_text("")
    scan.advance(len("hm."))
    scan.emit_text("hm.")
    scan.advance(len("<call>now("))
    scan.begin_call("now", "call_1")
    assert (scan.in_call, scan.calls, scan.rest) == (True, 1, '{"a": 1')
    scan.advance(4)
    scan.add_json('{"a"')
    scan.advance(3)  # read, but not committed
    scan.rewind()
    assert (scan.in_call, scan.rest, scan.held) == (False, ": 1", 3)
    scan.push("}")
    assert scan.rest == ": 1}"
    assert scan.events == [
        PlainText("hm.", start=6),
        CallStart("now", "call_1"),
        CallArguments('{"a"'),
    ]


def test_a_call_of_an_unknown_tool_stays_text() -> None:
    scan = CallScanner(tools("now"))
    with pytest.raises(NotACallError, match="no tool 'then'"):
        scan.begin_call("then")
    assert (scan.events, scan.calls) == ([], 0)
