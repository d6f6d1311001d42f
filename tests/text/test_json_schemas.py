"""Parts of JSON schemas by path, and schemas without formats that restrict nothing."""

from headroom.text.json_schemas import count_remainders, parts_of, without_remarks


def test_parts_of_a_schema_have_paths() -> None:
    schema = {
        "properties": {"a": {"type": "null"}, "b~/": True},
        "items": [{"const": 1}],
        "additionalProperties": False,
        "anyOf": [{}, {"const": 2}],
        "$defs": {"x": {"const": 3}},
        "const": {"properties": {"no": {}}},
    }
    assert dict(parts_of(schema)) == {
        "/additionalProperties": False,
        "/anyOf/0": {},
        "/anyOf/1": {"const": 2},
        "/items/0": {"const": 1},
        "/properties/a": {"type": "null"},
        "/properties/b~0~1": True,
        "/$defs/x": {"const": 3},
    }
    assert list(parts_of(True)) == []


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

    assert without_remarks(schema("uuid")) == schema("uuid")
    kept = without_remarks(schema("zip-code"))
    assert kept["properties"] == {"format": {"type": "string"}}
    assert kept["items"] == {"type": "string"}
    assert kept["oneOf"] == [{"type": "string"}]
    assert kept["const"] == {"type": "string", "format": "zip-code"}
    assert "format" not in kept


def test_divisors_are_counted_by_their_digits_in_all_parts() -> None:
    assert count_remainders({"multipleOf": 700}) == 7
    assert count_remainders({"multipleOf": 0.25}) == 25
    assert count_remainders({"items": {"multipleOf": 12}, "anyOf": [{"multipleOf": 1e-9}]}) == 13
    assert count_remainders({"properties": {"multipleOf": {"type": "null"}}}) == 0
    assert count_remainders({"multipleOf": float("inf")}) == count_remainders(True) == 0
