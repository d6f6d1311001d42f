"""Arguments that are written as text get the types of the tool's schema."""

import json
from typing import Any

import pytest

from headroom.text.conversation import Tool
from headroom.text.tool_values import ALL_TYPES, argument_types, find_reference, json_value

DEFS = {"size": {"enum": [1, 2]}, "a/b": {"type": "boolean"}, "loop": {"$ref": "#/$defs/loop"}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", None, 1, 1.5, True, [], {}]}, set(ALL_TYPES)),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"const": 5}, {"integer"}),
        ({"anyOf": [{"type": "string"}, {"const": None}]}, {"string", "null"}),
        ({"oneOf": [{"type": "number"}, {"type": "array"}]}, {"number", "array"}),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, {"integer"}),
        ({"$ref": "#/$defs/size"}, {"integer"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/loop"}, set(ALL_TYPES)),
        ({"$ref": "#/$defs/none"}, set(ALL_TYPES)),
        ({"$ref": "https://example.com/schema"}, set(ALL_TYPES)),
        ({"type": "string", "enum": [1]}, set(ALL_TYPES)),
        ({}, set(ALL_TYPES)),
        (True, set(ALL_TYPES)),
    ],
)
def test_the_types_of_an_argument_follow_from_its_schema(schema: Any, types: set[str]) -> None:
    tool = Tool(name="f", parameters={"properties": {"x": schema}, "$defs": DEFS})
    assert argument_types(tool, "x") == types
    assert argument_types(tool, "y") == ALL_TYPES
    assert argument_types(Tool(name="f", parameters={"properties": []}), "x") == ALL_TYPES


def test_a_reference_to_the_root_is_the_root() -> None:
    assert find_reference("#", {"type": "object"}) == {"type": "object"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", "string", "5"),
        ("null", "string", "null"),
        ("null", "string null", None),
        ("None", "integer", None),
        ("null", "integer", None),
        (" 5 ", "integer", 5),
        ("-7", "integer null", -7),
        ("5.0", "integer", 5),
        ("5.5", "integer", "5.5"),
        ("9" * 5000 + ".0", "integer", "long"),
        ("007", "integer", "007"),
        ("5", "number", 5),
        ("-2.5e3", "number", -2500.0),
        ("NaN", "number", "NaN"),
        ("TRUE", "boolean", True),
        ("False", "boolean", False),
        ("yes", "boolean", "yes"),
        ('{"a": [1,]}', "object", {"a": [1]}),
        ("[1, 2", "array", "[1, 2"),
        ("[1]", "object", "[1]"),
        ("{'a': 1}", "object", {"a": 1}),
        ("{'a': 1", "object", "{'a': 1"),
        ("['a', \"b'\"]", "array", ["a", "b'"]),
        ("it's", "object", "it's"),
        ('"quoted"', "string null", '"quoted"'),
        ('"quoted"', "integer", "quoted"),
        ("5", "string integer", 5),
        ("é 👍\n", "string", "é 👍\n"),
        ("[" * 20000 + "]" * 20000, "array", "deep"),
    ],
)
def test_text_becomes_a_value_of_the_type_or_stays_a_string(
    text: str, types: str, value: Any
) -> None:
    made = json_value(text, frozenset(types.split()))
    if value == "long":
        assert made == "9" * 5000
    elif value == "deep":
        assert made == text
    else:
        assert json.loads(made) == value
        assert type(json.loads(made)) is type(value)
