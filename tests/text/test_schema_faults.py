"""What llguidance cannot compile in a schema: found with its path, or left out."""

import json
import random
from typing import Any

import pytest

from headroom.text.schema_faults import (
    LENIENT_OPTIONS,
    MOST_GRAMMAR_CHARACTERS,
    enforceable,
    find_fault,
    plain_reason,
)
from tests.text.matching import accepts


def matches(schema: Any, value: Any) -> bool:
    """Whether a value matches what is enforced of a schema."""
    written = {**enforceable(schema), "x-guidance": LENIENT_OPTIONS}
    grammar = f"start: %json {json.dumps(written)}"
    return accepts(grammar, json.dumps(value, separators=(",", ":")))


def nested(part: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"a": part, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
        **more,
    }


# Parts of schemas, and values that may be written for each because something is not enforced.
BAD: list[tuple[Any, list[Any]]] = [
    ({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}, ["a1", "!"]),
    ({"type": "string", "pattern": "("}, ["("]),
    ({"type": "any"}, [1, "x", {"y": []}]),
    ({"type": "OBJECT", "properties": {"x": {"type": "STRING"}}}, [{}, {"x": "y"}, "z"]),
    ({"type": None, "description": None}, [None, 1]),
    ({"type": "object", "properties": None}, [{}, {"x": 1}]),
    ({"type": "object", "required": True}, [{}, {"x": 1}]),
    ({"type": "object", "required": [["x"], "x"], "properties": {"x": {}}}, [{"x": 1}]),
    ({"type": "string", "minLength": -1}, [""]),
    ({"type": "integer", "multipleOf": 0}, [7]),
    ({"$ref": "#/$defs/none"}, [7]),
    ({"$ref": "https://example.org/schema"}, [7]),
    ("string", ["x"]),
    (None, [1]),
    ({"type": "array", "items": {"type": "string", "pattern": "(?!a)b"}}, [[], ["c"]]),
    ({"$ref": "#/$defs/bad"}, ["c"]),
    ({"type": "object", "minProperties": 2, "properties": {"x": {}, "y": {}}}, [{"x": 1, "y": 2}]),
    ({"not": {"const": 1}}, [1]),
    ({"type": "string", "pattern": "\ud800"}, ["a"]),
    ({"type": "array", "items": {"type": "any"}, "minItems": 1}, [[1], ["x"]]),
]  # fmt: skip
# Parts that no value matches. They stay where a value need not be written.
EMPTY: list[tuple[Any, list[Any]]] = [
    ({"enum": []}, [1]),
    ({"anyOf": []}, [1]),
    ({"type": "integer", "minimum": 5, "maximum": 3}, [3]),
    ({"type": "object", "required": ["y"], "properties": {"x": {}}, "additionalProperties": False},
     [{}, {"x": 1}]),
]  # fmt: skip
DEFS = {"bad": {"type": "string", "pattern": "(?<=a)c"}}


@pytest.mark.parametrize(("part", "values"), [*BAD, *EMPTY])
def test_only_the_part_that_cannot_be_compiled_is_left_out(part: Any, values: list[Any]) -> None:
    schema = nested(part, **{"$defs": DEFS})
    before = json.dumps(schema)
    for value in values:
        assert matches(schema, {"a": value, "b": 1}), value
        # Another part is enforced as before, unless the object itself is at fault.
        assert not matches(schema, {"a": value, "b": "x"})
    assert json.dumps(schema) == before


# Keywords that no grammar enforces beside some that one does; values that match and that do not.
UNKNOWN: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "uniqueItems": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        [[], [1, 2], [1, 1]],
        [["x"], {}],
    ),
    "not": ({"type": "string", "not": {"const": "x"}}, ["y", "x"], [1]),
    "propertyNames": (
        {
            "type": "object",
            "propertyNames": {"pattern": "^a"},
            "additionalProperties": {"type": "integer"},
        },
        [{"a": 1}, {"b": 1}],
        [{"a": "x"}],
    ),
    "dependentRequired": (
        {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {}},
            "dependentRequired": {"x": ["y"]},
        },
        [{"x": 1, "y": 2}, {"x": 1}, {"z": 1}],
        [{"x": "z"}],
    ),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"x": {"required": ["y"]}}},
        [{"x": 1, "y": 2}, {"x": 1}],
        [1],
    ),
    "if": (
        {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "if": {"properties": {"x": {"const": 1}}},
            "then": {"required": ["y"]},
            "else": {"required": ["z"]},
        },
        [{"x": 1, "y": 1}, {"x": 1}, {"x": 2, "z": 1}],
        [{}, {"x": "1"}],
    ),
    "oneOf": (
        {
            "oneOf": [
                {"type": "object", "properties": {"x": {"type": "integer"}}},
                {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]},
            ]
        },
        [{"x": 1}, {"y": 1}, {"x": 1, "y": 1}],
        [{"x": "1"}, 1],
    ),
    "contains": (
        {"type": "array", "contains": {"const": 1}, "minContains": 2, "maxItems": 2},
        [[1, 1], [], [2]],
        [[1, 2, 3]],
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [{"type": "string"}], "unevaluatedItems": False},
        [["x"], ["x", 1]],
        [[1]],
    ),
    "unevaluatedProperties": (
        {
            "type": "object",
            "allOf": [{"properties": {"x": {"type": "integer"}}}],
            "unevaluatedProperties": False,
        },
        [{"x": 1}, {}, {"y": 1}],
        [{"x": "1"}],
    ),
    "minProperties": (
        {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {}},
            "minProperties": 1,
            "maxProperties": 2,
        },
        [{}, {"x": 1}, {"y": 1}, {"z": 1}, {"x": 1, "y": 2}],
        [{"x": "1"}],
    ),
    "several": (
        {
            "type": "array",
            "items": {"type": "object", "not": {}, "if": {}, "then": False, "propertyNames": False},
            "uniqueItems": True,
            "contains": False,
            "maxItems": 1,
        },
        [[], [{}], [{"a": 1}]],
        [[1], [{}, {}]],
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_grammar_enforces_is_free_and_the_rest_of_its_part_is_not(name: str) -> None:
    part, good, bad = UNKNOWN[name]
    for value in good:
        assert matches(nested(part), {"a": value, "b": 1}), value
        assert not matches(nested(part), {"a": value, "b": "1"}), value
    for value in bad:
        assert not matches(nested(part), {"a": value, "b": 1}), value
    assert find_fault(nested(part)) is not None


def test_what_else_a_part_says_is_enforced() -> None:
    assert not matches(nested({"type": "string", "pattern": "("}), {"a": 1, "b": 1})
    items = {"type": "array", "items": {"type": "any"}, "minItems": 1}
    assert not matches(nested(items), {"a": [], "b": 1})
    members: Any = {"type": "OBJECT", "properties": {"x": {"type": "integer", "minimum": "1"}}}
    assert matches(nested(members), {"a": {"x": 0}, "b": 1})
    assert not matches(nested(members), {"a": {"x": "y"}, "b": 1})


def test_a_schema_that_compiles_stays_as_it_is() -> None:
    schema = nested({"type": "array", "items": {"oneOf": [{"type": "string"}, {}]}})
    assert enforceable(schema) == schema
    assert find_fault(nested({"enum": ["x", 1]})) is None


def test_a_schema_with_very_many_faults_keeps_its_type() -> None:
    names = [f"p{place}" for place in range(3000)]
    schema = {"type": "object", "properties": {name: {"type": "any"} for name in names}}
    assert enforceable(schema) == {"type": "object"}
    deep: Any = {"type": "integer"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    assert matches(deep, [])


def test_any_mixture_of_faults_can_be_compiled_and_takes_what_matches() -> None:
    dice = random.Random(7)
    for _ in range(60):
        chosen = {f"m{place}": dice.choice(BAD) for place in range(dice.randint(1, 5))}
        schema: Any = {
            "type": "object",
            "properties": {name: part for name, (part, _) in chosen.items()},
            "required": dice.sample(sorted(chosen), dice.randint(0, len(chosen))),
        }
        value: Any = {name: dice.choice(values) for name, (_, values) in chosen.items()}
        for _ in range(dice.randint(0, 2)):
            schema = dice.choice(
                [
                    {"type": "array", "items": schema},
                    {"anyOf": [{"type": "array", "items": schema}, {"type": "any"}]},
                ]
            )
            value = [value]
        assert matches({**schema, "$defs": DEFS}, value)


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        (nested({"type": "array", "uniqueItems": True, "not": {}}), "/properties/a",
         "`not` and `uniqueItems` cannot be enforced"),
        (nested({"enum": []}), "/properties/a", "no value can match it (anyOf is empty)"),
        (nested({}, required=["c"]), "", "no value can have the required member 'c'"),
        (nested({"type": "string", "pattern": "a("}), "/properties/a",
         "the pattern cannot be used: unclosed group"),
        ({"$ref": "#"}, "", "no answer can match it"),
    ],
)  # fmt: skip
def test_a_fault_has_the_path_of_the_smallest_part_and_a_plain_reason(
    schema: Any, path: str, reason: str
) -> None:
    fault = find_fault(schema)
    assert fault is not None
    assert (fault.path, fault.reason) == (path, reason)


def test_a_reason_is_one_line_without_the_grammar() -> None:
    error = (
        'at 1(8): failed to compile JSON schema: Invalid type: any\n   1 | start: %json {"a": 1}'
    )
    assert plain_reason(error) == "Invalid type: any"
    assert plain_reason("panic: at 3\n<backtrace>\n 0: x") == "panic: at 3"


def test_of_a_part_that_is_wrong_as_little_as_possible_is_left_out() -> None:
    schema = {
        "type": "object",
        "description": "kept",
        "properties": {
            "a": {"type": "string", "pattern": "(?=x)", "maxLength": 3, "title": "A"},
            "b/c": {"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 0}]},
            "d~": {"type": "integer", "minimum": "1", "maximum": "3", "title": "D"},
            "e": {"anyOf": [{"type": "null"}, {"type": "any", "title": "E"}]},
        },
        "required": ["a", "d~", "z", 3],
        "additionalProperties": False,
    }
    found = enforceable(schema)
    parts = found["properties"]
    assert parts["a"] == {"type": "string", "maxLength": 3, "title": "A"}
    assert parts["b/c"] == {"type": "array", "prefixItems": [{"type": "integer"}]}
    assert parts["d~"] == {"type": "integer", "title": "D"}
    assert parts["e"] == {"anyOf": [{"type": "null"}, {"title": "E"}]}
    assert found["required"] == ["a", "d~"]
    assert (found["description"], found["additionalProperties"]) == ("kept", False)


def test_a_schema_that_is_too_long_for_any_grammar_is_not_looked_at() -> None:
    wrong = {"type": "any", "const": ""}
    frame = len(json.dumps(wrong))
    longest = {**wrong, "const": "x" * (MOST_GRAMMAR_CHARACTERS - frame)}
    assert find_fault(longest) is not None
    assert enforceable(longest) == {"const": longest["const"]}
    beyond = {**wrong, "const": longest["const"] + "x"}
    assert find_fault(beyond) is None
    assert enforceable(beyond) == beyond


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("failed to compile JSON schema: regex parse error:\n  (\nerror: unclosed group",
         "the pattern cannot be used: unclosed group"),
        ("failed to compile JSON schema: expected value at line 3 column 7", "expected value"),
        ('Unimplemented keys: ["a"]', "`a` cannot be enforced"),
        ('Unimplemented keys: ["a", "b"]', "`a` and `b` cannot be enforced"),
        ("schema must be an object or boolean", "a schema is not an object"),
        ("circular references: a", "a reference leads back to itself"),
        ("Resource 'x' is not there", "'x' is not a part of the schema"),
        ("Unsatisfiable schema: required property 'x' is gone",
         "no value can have the required member 'x'"),
        ("Unsatisfiable schema: a: b", "no value can match it (a: b)"),
        ("Unsatisfiable schema: " + "x" * 101, f"no value can match it ({'x' * 100})"),
        ("something else", "something else"),
    ],
)  # fmt: skip
def test_reasons_are_told_in_words_of_their_own(error: str, reason: str) -> None:
    assert plain_reason(error) == reason


@pytest.mark.parametrize(
    ("part", "kept"),
    [
        ({"type": "array", "items": 5, "maxItems": 2}, {"type": "array"}),
        ({"type": "object", "properties": 5, "title": "A"}, {"type": "object"}),
        ({"type": "object", "required": 5, "title": "A"}, {"type": "object"}),
        ({"type": "object", "required": 5, "properties": {"x": {"const": 1}}},
         {"type": "object", "properties": {"x": {"const": 1}}}),
        ({"type": ["string", "any"], "title": "A"}, {"title": "A"}),
    ],
)  # fmt: skip
def test_keywords_of_the_shape_are_left_out_last(part: Any, kept: Any) -> None:
    assert enforceable(nested(part))["properties"]["a"] == kept
    assert enforceable(part) == kept
