"""Strings of JSON schemas as terminals, compared with jsonschema and with Python's own parsers."""

import datetime
import ipaddress
import itertools
import random
import re
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest

from headroom.text.string_schemas import ANY_TEXT, SchemaError, string_terminal
from tests.text.matching import accepts, written

SCHEMAS: tuple[dict[str, Any], ...] = (
    {"pattern": "^a|b$"},
    {"pattern": "[ab]{2}", "maxLength": 3},
    {"pattern": r"^\d\.\w*$"},
    {"pattern": r"\$$"},
    {"pattern": "^(a|b)c?$|^$"},
    {"minLength": 2},
    {"enum": ["a", "b/", 1, None]},
    {"const": "\n"},
    {"anyOf": [{"pattern": "a"}, {"maxLength": 1}]},
    {"oneOf": [{"pattern": "a"}, {"pattern": "b"}, {"const": "ab"}]},
    {"oneOf": [{"type": "string", "minLength": 1}, {"type": "null"}]},
    {"allOf": [{"pattern": "a"}, {"pattern": "b"}], "minLength": 3},
    {"$ref": "#/$defs/x", "maxLength": 2},
    {"format": "made-up"},
)
ROOT = {"$defs": {"x": {"pattern": "a"}}}
TEXTS = [
    "".join(letters) for size in range(5) for letters in itertools.product("ab\n", repeat=size)
]
TEXTS += ["1.x", "$", "a$", "b/", "é", "日本", "c", "ac", "bc", "cc"]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_terminal_takes_the_strings_that_the_schema_takes(schema: dict[str, Any]) -> None:
    grammar = f"start: T\nT: {string_terminal(schema, ROOT)}"
    check = jsonschema.Draft202012Validator({**ROOT, **schema})
    for text in TEXTS:
        if text.endswith("\n") and "pattern" in str(schema):
            continue  # to Python, $ also matches before the last line break
        assert accepts(grammar, text) == check.is_valid(text), text


FORMATS: dict[str, Callable[[str], object]] = {
    "date": datetime.date.fromisoformat,
    "time": lambda text: datetime.time.fromisoformat(text.upper()),
    "date-time": lambda text: datetime.datetime.fromisoformat(text.upper()),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "email": lambda text: re.fullmatch(r"[^@\s]+@[^@\s]+", text)[0],  # type: ignore[index]
    "hostname": lambda text: text.encode("idna"),
    "duration": lambda text: re.fullmatch(r"P(?=.)(\d+[YMWD])*(T(?=.)(\d+[HMS])+)?", text)[0],  # type: ignore[index]
    "uri": lambda text: urlsplit(text).scheme[0],
}


@pytest.mark.parametrize("form", FORMATS)
def test_whatever_a_format_writes_is_read_by_a_parser_of_it(form: str) -> None:
    dice, tried = random.Random(form), 0
    grammar = f"start: T\nT: {string_terminal({'format': form}, {})}"
    for _ in range(60):
        text = written(grammar, dice, 120)
        if text is None or text.startswith("0000") or re.search(r"\.\d{7}", text):
            continue  # years and fractions that Python cannot hold
        FORMATS[form](text)
        tried += 1
    assert tried > 5


EXAMPLES = {
    "date": (["2000-02-29", "2024-02-29", "1999-01-31"], ["1900-02-29", "2024-04-31", "24-01-01"]),
    "time": (["23:59:59Z", "00:00:00.5+01:30"], ["24:00:00Z", "12:00", "12:00:00"]),
    "date-time": (["2024-01-01T00:00:00Z"], ["2024-01-01", "2024-01-01 00:00:00Z"]),
    "duration": (["P1D", "PT5M", "P1Y2M3DT4H5M6S", "P2W"], ["P", "PT", "1D", "P1WT1H"]),
    "email": (["a.b+c@example.org", "x@y"], ["a", "a@", ".a@b", "a b@c"]),
    "hostname": (["a", "a-b.example.org"], ["-a", "a..b", "a_b", "x" * 64]),
    "ipv4": (["0.0.0.0", "255.10.99.100"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "a::b", "09af::09AF", "fedc::cdef"],
        ["1", ":::", "1:2:3:4:5:6:7:8:9", "::g", "::12345"],
    ),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "uri": (
        ["https://a.org:80/x?y=1#z", "mailto:a@b.c", "urn:x:y", "http://[::1]/"],
        ["a.org", "/x", "http://a b/", "x:y#z#z"],
    ),
}


@pytest.mark.parametrize("form", EXAMPLES)
def test_examples_of_a_format(form: str) -> None:
    grammar = f"start: T\nT: {string_terminal({'format': form}, {})}"
    good, bad = EXAMPLES[form]
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"not": {}}, "/x/not"),
        ({"if": {}}, "/x/if"),
        ({"pattern": "a(?!b)"}, "/x/pattern"),
        ({"pattern": "("}, "/x/pattern"),
        ({"minLength": 1.5}, "/x/minLength"),
        ({"anyOf": [{"type": "null"}]}, "/x/anyOf"),
        ({"anyOf": [{"maxLength": 1}, {"not": {}}]}, "/x/anyOf/1/not"),
        ({"allOf": [{"$ref": "other.json"}]}, "/x/allOf/0/$ref"),
        ({"enum": [1]}, "/x"),
        ({"$ref": "#/$defs/loop"}, "/x" + "/$ref" * 17),
    ],
)
def test_what_no_terminal_can_say_raises_its_path(schema: dict[str, Any], path: str) -> None:
    root = {"$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    with pytest.raises(SchemaError) as caught:
        string_terminal(schema, root, "/x")
    assert caught.value.path == path


def test_a_schema_without_limits_allows_any_text() -> None:
    for schema in (True, {}, {"type": "string"}, {"description": "x"}, {"minLength": 0}):
        assert string_terminal(schema, {}) == ANY_TEXT


@pytest.mark.parametrize(
    "schema",
    [
        {"maxLength": 0},
        {"maxLength": 1},
        {"minLength": 1, "maxLength": 1},
        {"minLength": 0, "maxLength": 2},
        {"pattern": "[|]x|^b"},
        {"pattern": r"^a\|b$"},
        {"pattern": r"^[\]|]$"},
        {"pattern": r"\\$"},
        {"pattern": r"^(a\)|b)$"},
        {"pattern": "^(a|b)$|c"},
        {"enum": ["a", "ab"], "pattern": "b"},
        {"anyOf": [{"type": "string"}, {"maxLength": 1}]},
        {"oneOf": [{"type": "integer"}, {"maxLength": 1}]},
        {"oneOf": [{"minLength": 1}, {"maxLength": 2}]},
    ],
    ids=str,
)
def test_limits_and_bars_of_a_schema_mean_what_they_mean_in_jsonschema(
    schema: dict[str, Any],
) -> None:
    grammar = f"start: T\nT: {string_terminal(schema, ROOT)}"
    check = jsonschema.Draft202012Validator(schema)
    texts = ["", "a", "b", "c", "aa", "ab", "|", "|x", "a|b", "]", "\\", "a\\", "$", "a)", "ax"]
    for text in texts:
        assert accepts(grammar, text) == check.is_valid(text), text


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        ({"minLength": -1}, "/x/minLength", "`minLength` is not a number of characters"),
        ({"maxLength": True}, "/x/maxLength", "`maxLength` is not a number of characters"),
        ({"maxLength": "3"}, "/x/maxLength", "`maxLength` is not a number of characters"),
        ({"minLength": 3, "maxLength": 2}, "/x/maxLength", "2 is less than `minLength` (3)"),
        ({"pattern": "\ud800"}, "/x/pattern", "the pattern is not valid Unicode"),
        ({"enum": ["\ud800"]}, "/x", "no string matches it"),
        ({"const": 1}, "/x", "no string matches it"),
        ({"oneOf": []}, "/x/oneOf", "no string matches it"),
        ({"allOf": [{}, {"then": {}}]}, "/x/allOf/1/then", "`then` cannot be enforced for strings"),
    ],
)
def test_a_schema_that_no_terminal_can_say_is_told_why(
    schema: dict[str, Any], path: str, reason: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        string_terminal(schema, {}, "/x")
    assert (caught.value.path, caught.value.reason) == (path, reason)


def test_references_are_followed_16_deep_and_no_deeper() -> None:
    definitions: dict[str, Any] = {"d0": {"maxLength": 1}}
    definitions |= {f"d{n}": {"$ref": f"#/$defs/d{n - 1}"} for n in range(1, 18)}
    root = {"$defs": definitions}
    assert string_terminal({"$ref": "#/$defs/d15"}, root) == "/(?s:.){0,1}/"
    with pytest.raises(SchemaError, match="more than 16 deep"):
        string_terminal({"$ref": "#/$defs/d16"}, root)


@pytest.mark.parametrize("key", ["allOf", "anyOf", "oneOf"])
def test_choices_that_lead_back_to_themselves_are_refused(key: str) -> None:
    root = {"$defs": {"loop": {key: [{"$ref": "#/$defs/loop"}]}}}
    with pytest.raises(SchemaError, match="more than 16 deep"):
        string_terminal(root["$defs"]["loop"], root)
    deep: dict[str, Any] = {"maxLength": 1}
    for _ in range(16):
        deep = {key: [deep]}
    assert "{0,1}" in string_terminal(deep, {})
    with pytest.raises(SchemaError, match="more than 16 deep"):
        string_terminal({key: [deep]}, {})
