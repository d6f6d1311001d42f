"""Turns arguments that a model writes as plain text into JSON, by the schema of the tool."""

import json
import re
from collections.abc import Mapping
from typing import Any

from headroom.text.call_scanner import whole_json
from headroom.text.conversation import Tool

ALL_TYPES = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0+")
_MAX_DEPTH = 16  # of references and choices in a schema
# Keywords that may stand beside a reference at the root of a tool's schema: they add no limits.
_BESIDE_REFERENCE = frozenset(
    [
        *("$ref", "type", "$schema", "$id", "$comment", "$defs", "definitions"),
        *("title", "description", "default", "examples"),
    ]
)
_BOOLEANS = {"true": "true", "false": "false"}


def argument_types(tool: Tool, name: str) -> frozenset[str]:
    """Return the JSON types that an argument may have; all types if the schema names none."""
    root = with_plain_root(tool.parameters)
    properties = root.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return schema_types(schema, root)


def with_plain_root(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema of arguments with the object at its root that its root only refers to."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    root = schema
    for _ in range(_MAX_DEPTH):
        reference = root.get("$ref")
        if not isinstance(reference, str) or not root.keys() <= _BESIDE_REFERENCE:
            break
        found = find_reference(reference, schema)
        if not isinstance(found, Mapping):
            break
        root = {**found, **shared}
    return root


def schema_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ALL_TYPES
    types = ALL_TYPES
    named = schema.get("type")
    if isinstance(named, str):
        types &= {named}
    elif isinstance(named, list):
        types &= {entry for entry in named if isinstance(entry, str)}
    if "const" in schema:
        types &= {_type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= {_type_of(value) for value in schema["enum"]}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            choices = (schema_types(choice, root, depth + 1) for choice in schema[key])
            types &= frozenset().union(*choices)
    if isinstance(schema.get("allOf"), list):
        for part in schema["allOf"]:
            types &= schema_types(part, root, depth + 1)
    if isinstance(schema.get("$ref"), str):
        types &= schema_types(find_reference(schema["$ref"], root), root, depth + 1)
    return types or ALL_TYPES  # a schema that contradicts itself is ignored


def find_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of a schema that a local reference names; None if there is none."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def json_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of an argument that a model wrote as plain text.

    Text that fits none of the types becomes a string, so that nothing is lost.
    """
    word = text.strip()
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    if word in ("null", "None") and ("null" in types or "string" not in types):
        return "null"
    if "boolean" in types and word.lower() in _BOOLEANS:
        return word.lower()
    if "integer" in types and _INTEGER.fullmatch(word):
        return word
    if types <= {"integer", "null"} and (whole := _WHOLE.fullmatch(word)):
        return whole[1]
    value = whole_json(text)
    if value is not None and _matches(value, types):
        return value
    return json.dumps(text, ensure_ascii=False)


def _matches(value: str, types: frozenset[str]) -> bool:
    start = value.lstrip()[0]
    if start == "{":
        return "object" in types
    if start == "[":
        return "array" in types
    if start in "-0123456789":
        return "number" in types
    if start == '"':  # if a string is allowed, the quotes are a part of it
        return "string" not in types
    return start == "n" and "null" in types
