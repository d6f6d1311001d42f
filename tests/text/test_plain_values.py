"""Arguments without quotes: the allowed texts are those whose values jsonschema accepts."""

import json
from typing import Any

import jsonschema
import pytest

from headroom.text.plain_values import (
    MAX_DEPTH,
    Member,
    PlainValue,
    limits,
    members,
    plain_value,
    resolved,
)
from headroom.text.string_schemas import ANY_TEXT, SchemaError
from headroom.text.tool_values import json_value, schema_types
from tests.text.matching import accepts

ROOT = {
    "$defs": {
        "small": {"type": ["integer", "string"], "maximum": 9, "maxLength": 3},
        "word": {"type": ["string", "null"], "pattern": "^[a-z]*$"},
        "link": {"$ref": "#/$defs/word"},
        "loop": {"$ref": "#/$defs/loop"},
    }
}
SCHEMAS: tuple[Any, ...] = (
    True,
    {},
    {"type": ["string", "integer"]},
    {"type": ["string", "number"], "minimum": 2},
    {"type": ["string", "integer", "number"], "maximum": 12},
    {"type": ["string", "boolean"], "maxLength": 4},
    {"type": ["string", "null"], "minLength": 1},
    {"type": ["string", "null", "boolean"], "pattern": "^[a-z]*$"},
    {"type": ["string", "null", "boolean"], "anyOf": [{"type": "string"}, {"const": False}]},
    {"type": ["string", "object"], "required": ["a"]},
    {"type": ["string", "array"], "items": {"type": "integer"}, "maxItems": 2},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 100}]},
    {"anyOf": [{"type": "string"}, {"type": "boolean"}, {"type": "null"}]},
    {"oneOf": [{"type": "string", "pattern": "^b"}, {"type": "null"}]},
    {"allOf": [{"type": ["string", "null"]}, {"type": ["string", "boolean"]}]},
    {"enum": ["a", 1, "1", None, True, "null", 1.5, {"a": 1}]},
    {"const": 12},
    {"const": "x"},
    {"$ref": "#/$defs/small"},
    {"$ref": "#/$defs/link"},
    {"type": "integer", "maximum": 12},
    {"type": "string", "maxLength": 2},
)
TEXTS = (
    *("", "a", "ab", "abc", "b", "x", "true", "True", "false", "null", "None", "nul", "ab\nc"),
    *("0", "1", "9", "12", "13", "100", "-3", "1.5", "12.5", "2e3", "-0.5", "1 2"),
    *("{}", '{"a": 1}', '{"b": 1}', "[]", "[1]", "[1, 2, 3]", '["a"]', "{ not JSON"),
)


def allows(found: PlainValue, text: str) -> bool:
    """Return whether a text may be written: as a plain text, or as a value in JSON."""
    if found.terminal is not None and accepts(f"start: T\nT: {found.terminal}", text):
        return True
    if found.json_schema is None:
        return False
    return accepts(f"start: %json {json.dumps({**ROOT, **found.json_schema})}", text)


def is_valid(schema: Any, text: str) -> bool:
    """Return whether jsonschema accepts the value that the parser of calls makes of a text."""
    if not isinstance(schema, dict):
        return schema is True
    value = json.loads(json_value(text, schema_types(schema, ROOT)))
    # To jsonschema 1.0 and True are equal to 1; in JSON, and to the parser, they are not.
    if "enum" in schema or "const" in schema:
        listed = schema.get("enum", [schema.get("const")])
        return any(type(entry) is type(value) and entry == value for entry in listed)
    return bool(jsonschema.Draft202012Validator({**ROOT, **schema}).is_valid(value))


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_a_text_is_allowed_if_the_schema_takes_what_the_parser_makes_of_it(schema: Any) -> None:
    found = plain_value(schema, ROOT, "#")
    wrong = [text for text in TEXTS if allows(found, text) and not is_valid(schema, text)]
    assert wrong == []
    # Other spellings of words and numbers need not be allowed, nor strings that begin like values.
    unusual = ("True", "None", "2e3", "{ not JSON", "1 2", "1.5")
    usual = [text for text in TEXTS if text not in unusual]
    missed = [text for text in usual if is_valid(schema, text) and not allows(found, text)]
    assert missed == []


def test_plain_texts_and_json_are_told_apart() -> None:
    assert plain_value({"type": "integer"}, ROOT, "#") == PlainValue(
        terminal=None, json_schema={"type": "integer"}
    )
    assert plain_value({"type": "string"}, ROOT, "#") == PlainValue(
        terminal=ANY_TEXT, json_schema=None
    )
    mixed = plain_value({"type": ["string", "integer"], "minimum": 2}, ROOT, "#")
    assert mixed.json_schema == {"type": ["integer"], "minimum": 2}


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        (
            {"enum": ["a", 1], "maximum": 3},
            "#/maximum",
            "`maximum` cannot be enforced together with listed values",
        ),
        (
            {"type": ["string", "integer"], "enum": []},
            "#",
            "none of the listed values can be written",
        ),
        ({"$ref": "#/$defs/none"}, "#/$ref", "'#/$defs/none' is not a part of the schema"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_its_path(
    schema: Any, path: str, reason: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        plain_value(schema, ROOT, "#")
    assert (caught.value.path, caught.value.reason) == (path, reason)


def test_references_are_followed_unless_other_limits_stand_beside_them() -> None:
    assert resolved({"$ref": "#/$defs/link"}, ROOT) == ROOT["$defs"]["word"]
    described = {"$ref": "#/$defs/word", "description": "a word"}
    assert resolved(described, ROOT) == ROOT["$defs"]["word"]
    beside = {"$ref": "#/$defs/word", "maxLength": 2}
    assert resolved(beside, ROOT) is beside
    assert resolved({"$ref": "#/$defs/loop"}, ROOT) == {"$ref": "#/$defs/loop"}  # ends


def test_limits_are_those_of_the_type_in_all_parts() -> None:
    schema = {
        "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "a"}],
        "$ref": "#/$defs/small",
        "multipleOf": 2,
    }
    assert limits(schema, "integer", ROOT) == {"minimum", "maximum", "multipleOf"}
    assert limits(schema, "string", ROOT) == {"pattern", "maxLength"}
    assert limits(True, "string", ROOT) == set()
    assert limits({"enum": [1]}, "boolean", ROOT) == {"enum"}


def nested(depth: int) -> dict[str, Any]:
    """Return a schema whose limit stands `depth` choices deep."""
    inner: dict[str, Any] = {"type": "integer", "minimum": 1}
    for _ in range(depth):
        inner = {"anyOf": [inner]}
    return inner


def test_limits_are_looked_for_down_to_a_depth() -> None:
    assert limits(nested(MAX_DEPTH), "integer", {}) == {"minimum"}
    assert limits(nested(MAX_DEPTH + 1), "integer", {}) == set()


def test_members_have_their_schemas_and_paths() -> None:
    schema = {
        "properties": {"a": {"type": "string"}, "b/c~d": {}, "": {}, "<x>": {}, "never": False},
        "required": ["b/c~d"],
    }
    assert list(members(schema, "#", strict=True)) == [
        Member(name="a", schema={"type": "string"}, needed=False, path="#/properties/a"),
        Member(name="b/c~d", schema={}, needed=True, path="#/properties/b~1c~0d"),
    ]
    assert list(members({"properties": 1, "required": 2}, "#", strict=False)) == []


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        (
            {"properties": {"<x>": {}}, "required": ["<x>"]},
            "#/required",
            "the member '<x>' cannot be written",
        ),
        ({"minProperties": 1}, "#/minProperties", "`minProperties` of an object cannot be"),
        ({"not": {}}, "#/not", "`not` of an object cannot be enforced"),
        ({"oneOf": []}, "#/oneOf", "`oneOf` of an object cannot be enforced"),
    ],
)
def test_members_that_cannot_be_enforced_are_refused_if_strict(
    schema: dict[str, Any], path: str, reason: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        list(members(schema, "#", strict=True))
    assert caught.value.path == path
    assert caught.value.reason.startswith(reason)
    list(members(schema, "#", strict=False))
