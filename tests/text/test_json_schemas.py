"""JSON schemas: their parts by path, and which values of `format` are left out."""

from headroom.text.json_schemas import (
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
