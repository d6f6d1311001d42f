"""JSON schemas: their parts by path, and which keywords are left out for the compiler."""

from copy import deepcopy
from typing import Any

import pytest

from headroom.text.json_schemas import (
    relocated,
    schema_parts,
    sum_divisors,
    with_plain_types,
    without_annotations,
)


def test_parts_of_a_schema_have_paths() -> None:
    schema = {
        "properties": {"a": {"type": "null"}, "b~/": True},
        "items": [{"const": 1}],
        "additionalProperties": False,
        "anyOf": [{}, {"const": 2}],
        "$defs": {"x": {"const": 3}},
        "const": {"properties": {"no": {}}},
    }
    assert dict(schema_parts(schema)) == {
        "/additionalProperties": False,
        "/anyOf/0": {},
        "/anyOf/1": {"const": 2},
        "/items/0": {"const": 1},
        "/properties/a": {"type": "null"},
        "/properties/b~0~1": True,
        "/$defs/x": {"const": 3},
    }
    assert list(schema_parts(True)) == []


def test_formats_that_restrict_nothing_are_left_out_in_all_parts() -> None:
    def schema(name: str) -> dict[str, object]:
        part = {"type": "string", "format": name}
        return {
            "properties": {"format": part},
            "items": part,
            "oneOf": [part],
            "const": part,
            "format": name,
        }

    assert without_annotations(schema("uuid")) == schema("uuid")
    kept = without_annotations(schema("zip-code"))
    assert kept["properties"] == {"format": {"type": "string"}}
    assert kept["items"] == {"type": "string"}
    assert kept["oneOf"] == [{"type": "string"}]
    assert kept["const"] == {"type": "string", "format": "zip-code"}
    assert "format" not in kept


def test_divisors_are_counted_by_their_digits_in_all_parts() -> None:
    assert sum_divisors({"multipleOf": 700}) == 7
    assert sum_divisors({"multipleOf": 0.25}) == 25
    assert sum_divisors({"items": {"multipleOf": 12}, "anyOf": [{"multipleOf": 1e-9}]}) == 13
    assert sum_divisors({"properties": {"multipleOf": {"type": "null"}}}) == 0
    assert sum_divisors({"multipleOf": float("inf")}) == sum_divisors(True) == 0


def test_plain_types_are_one_for_each_value_in_all_parts() -> None:
    schema = {
        "type": ["object", "null"],
        "properties": {
            "type": {"type": ["null", "integer"]},
            "none": {"type": "null", "const": None},
            "any": {"description": "anything"},
            "list": {"type": "array", "items": {"type": ["string", "number"]}},
        },
    }
    assert with_plain_types(schema) == {
        "type": "object",
        "properties": {
            "type": {"type": "integer"},
            "none": {"const": None},
            "any": {"description": "anything"},
            "list": {"type": "array", "items": {"type": "string"}},
        },
        "additionalProperties": {},
    }
    closed = {"type": "object", "additionalProperties": False}
    assert with_plain_types(closed) == closed


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False},
        {"not": False},
        {"propertyNames": True},
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {"format": "zip-code"}},
        {"unevaluatedItems": {}},
        {"unevaluatedProperties": True},
        {"dependentRequired": {}},
        {"dependentSchemas": {}},
        {"dependencies": {}},
        {"minContains": 2, "maxContains": 3},
        {"contains": {"type": "null"}, "minContains": 0},
        {"if": {"type": "null"}},
        {"then": {"type": "null"}, "else": {"type": "null"}},
    ],
)
def test_keywords_that_restrict_nothing_are_left_out_in_all_parts(keywords: Any) -> None:
    kept = without_annotations({"properties": {"a": {"title": "A", **keywords}}, **keywords})
    assert kept == {"properties": {"a": {"title": "A"}}}


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": True},
        {"not": {}},
        {"not": True},
        {"propertyNames": False},
        {"propertyNames": {"type": "string", "pattern": "a"}},
        {"unevaluatedItems": False},
        {"dependentRequired": {"a": ["b"]}},
        {"contains": True},
        {"contains": {}, "minContains": 0, "maxContains": 1},
        {"if": {"type": "null"}, "then": False},
    ],
)
def test_keywords_that_restrict_something_stay(keywords: Any) -> None:
    assert without_annotations(keywords) == keywords


def choice(name: str, more: Any = None) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": {"const": name}}, **(more or {})}


def test_the_field_of_a_discriminator_is_required() -> None:
    told: dict[str, Any] = {"discriminator": {"propertyName": "k"}}
    a, b = choice("a", {"required": ["x"]}), choice("b")
    schema = {"$defs": {"b": b}, "items": {**told, "oneOf": [a, {"$ref": "#/$defs/b"}]}}
    before = deepcopy(schema)
    kept = without_annotations(schema)
    assert schema == before
    assert kept["items"] == {"anyOf": [{**a, "required": ["x", "k"]}, {"$ref": "#/$defs/b"}]}
    assert kept["$defs"]["b"] == {**b, "required": ["k"]}


@pytest.mark.parametrize(
    "choices",
    [
        [choice("a"), choice("a")],
        [choice("a"), {"properties": {"k": {"const": "b"}}}],  # not only objects
        [choice("a"), {"type": "object"}],
        [choice("a"), {"$ref": "#/$defs/none"}],
        [choice("a"), choice("b", {"properties": {"k": {"type": "string"}}})],
        [choice("a"), True],
    ],
)
def test_choices_that_a_discriminator_does_not_tell_apart_stay(choices: list[Any]) -> None:
    schema = {"discriminator": {"propertyName": "k"}, "oneOf": choices}
    assert without_annotations(schema) == {"oneOf": choices}


def test_references_of_a_schema_that_becomes_a_part_are_moved() -> None:
    schema = {
        "items": {"$ref": "#"},
        "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "https://example.org/#/a"}, {"$ref": "#name"}],
        "const": {"$ref": "#"},
    }
    assert relocated(schema, "/$defs/p") == {
        "items": {"$ref": "#/$defs/p"},
        "anyOf": [
            {"$ref": "#/$defs/p/$defs/a"},
            {"$ref": "https://example.org/#/a"},
            {"$ref": "#name"},
        ],
        "const": {"$ref": "#"},
    }


def test_each_discriminator_is_looked_at_alone() -> None:
    told: dict[str, Any] = {"discriminator": {"propertyName": "k"}}
    unclear = {**told, "oneOf": [choice("a"), choice("a")]}
    clear = {**told, "oneOf": [choice("a"), choice("b")]}
    for first, second in (("properties", "$defs"), ("items", "properties")):
        schema = {
            "properties": {"x": unclear}, "$defs": {"x": clear}, "items": unclear
        } if first == "properties" else {"items": unclear, "properties": {"x": clear}}  # fmt: skip
        kept = without_annotations(schema)
        assert "anyOf" in kept[second]["x"]
        assert "oneOf" in kept["items"]
