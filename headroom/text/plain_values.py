"""Which texts a schema allows for an argument that a model writes without quotes.

The parser of calls decides the type of such a text (`tool_values.json_value`): an argument that may
be a string or a number is a number if it looks like one. So a schema with several types allows a
text only if the schema also allows the value that the parser makes of it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headroom.text.string_schemas import ANY_TEXT, SchemaError, string_terminal
from headroom.text.tool_values import find_reference, json_value, schema_types

MAX_DEPTH = 8  # of references, and of objects and lists in each other
_CHOICES = ("anyOf", "oneOf", "allOf")
# Keywords that limit values of a type.
_NUMBER_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
TYPE_LIMITS: Mapping[str, frozenset[str]] = {
    "string": frozenset(["pattern", "format", "minLength", "maxLength"]),
    "integer": frozenset(_NUMBER_LIMITS),
    "number": frozenset(_NUMBER_LIMITS),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(
        [
            *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
            *("minContains", "maxContains", "minItems", "maxItems", "uniqueItems"),
        ]
    ),
    "object": frozenset(
        [
            *("properties", "required", "additionalProperties", "patternProperties"),
            *("unevaluatedProperties", "propertyNames", "minProperties", "maxProperties"),
            *("dependentRequired", "dependentSchemas", "dependencies"),
        ]
    ),
}
_ANY_LIMITS = frozenset(["enum", "const", "not", "if"])  # keywords that limit values of any type
_ALL_LIMITS = frozenset[str](["type", *_CHOICES, *_ANY_LIMITS]).union(*TYPE_LIMITS.values())
_WORDS: tuple[tuple[str, Any, str], ...] = (
    ("null", None, r"(null|None)"),
    ("true", True, "(?i:true)"),
    ("false", False, "(?i:false)"),
)
_BLANKS = r"[\s\x1C-\x1F]*"
# The beginnings of texts that the parser reads as a number, an object or a list.
_BEGINNINGS = {"integer": "-?[0-9]", "number": "-?[0-9]", "object": r"\{", "array": r"\["}
_NUMBERS = {
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainValue:
    """What may be written as an argument: plain texts, and values in JSON."""

    terminal: str | None  # matches the plain texts; None: none is allowed
    json_schema: Mapping[str, Any] | None  # of the values in JSON; None: none is allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member that an object may have."""

    name: str
    schema: Any
    needed: bool
    path: str  # a JSON pointer to its schema


def plain_value(schema: Any, root: Mapping[str, Any], path: str) -> PlainValue:
    """Return what may be written as an argument; raise SchemaError if no grammar can express it."""
    schema = resolved(schema, root, path)
    types = schema_types(schema, root)
    if "string" not in types:
        return PlainValue(terminal=None, json_schema=schema)
    if types == {"string"}:
        return PlainValue(terminal=string_terminal(schema, root, path), json_schema=None)
    if not isinstance(schema, Mapping):
        return PlainValue(terminal=ANY_TEXT, json_schema=None)
    if "enum" in schema or "const" in schema:
        return PlainValue(terminal=_fixed_values(schema, types, path), json_schema=None)
    limited = [kind for kind in _BEGINNINGS if kind in types and limits(schema, kind, root)]
    if "integer" in limited or "number" in limited:  # one lexeme cannot be of both
        limited = [kind for kind in _BEGINNINGS if kind in types and kind in (*limited, *_NUMBERS)]
    texts, others = [string_terminal(schema, root, path)], []
    for word, value, spelling in _WORDS:
        if ("null" if value is None else "boolean") not in types:
            continue
        if _may_be(schema, value, root):
            others.append(f'"{word}"')
        else:
            texts.append(f"~/{_BLANKS}{spelling}{_BLANKS}/")
    # A text that begins like a value of a limited type must match the schema as JSON.
    beginnings = dict.fromkeys(_BEGINNINGS[kind] for kind in limited)
    texts += [f"~/{_BLANKS}{beginning}(?s:.*)/" for beginning in beginnings]
    others += [_NUMBERS[kind] for kind in _NUMBERS if kind in types and kind not in limited]
    text = " & ".join(texts)
    return PlainValue(
        terminal=text if text == ANY_TEXT else f"({' | '.join([text, *others])})",
        json_schema={**schema, "type": limited} if limited else None,
    )


def _fixed_values(schema: Mapping[str, Any], types: frozenset[str], path: str) -> str:
    """Return a terminal for the values of `enum` or `const` that the parser reads unchanged."""
    if others := sorted(key for key in schema if any(key in TYPE_LIMITS[kind] for kind in types)):
        raise SchemaError(
            f"{path}/{others[0]}", f"`{others[0]}` cannot be enforced together with listed values"
        )
    values = [schema["const"]] if "const" in schema else schema["enum"]
    texts = []
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        read = json.loads(json_value(text, types))
        if type(read) is type(value) and read == value:
            texts.append(json.dumps(text))
    if not texts:
        raise SchemaError(path, "none of the listed values can be written")
    return f"({' | '.join(texts)})"


def resolved(schema: Any, root: Mapping[str, Any], path: str = "") -> Any:
    """Return the schema that a plain reference names; a reference with other limits stays."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        if any(key in _ALL_LIMITS for key in schema):
            break
        found = find_reference(schema["$ref"], root)
        if found is None:
            raise SchemaError(f"{path}/$ref", f"{schema['$ref']!r} is not a part of the schema")
        schema = found
    return schema


def limits(schema: Any, kind: str, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the keywords of a schema and its parts that limit values of a type."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    found = {key for key in schema if key in TYPE_LIMITS[kind] | _ANY_LIMITS}
    parts = [part for key in _CHOICES if isinstance(schema.get(key), list) for part in schema[key]]
    if "$ref" in schema:
        parts.append({"$ref": schema["$ref"]})
    for part in parts:
        if kind in schema_types(part, root):
            found |= limits(part, kind, root, depth + 1)
    return found


def _may_be(schema: Any, value: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether a schema allows null, true or false."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return schema is not False
    listed = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    if not any(entry is value for entry in listed):
        return False
    if ("null" if value is None else "boolean") not in schema_types(schema, root):
        return False
    if "$ref" in schema and not _may_be({"$ref": schema["$ref"]}, value, root, depth + 1):
        return False
    for key, holds in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        parts = schema.get(key)
        if isinstance(parts, list) and not holds(_may_be(p, value, root, depth + 1) for p in parts):
            return False
    return True


def members(schema: Mapping[str, Any], path: str, *, strict: bool) -> Iterator[Member]:
    """Yield the members of an object that a call can write.

    If `strict`, this raises SchemaError for keywords that cannot be enforced, and for required
    members that cannot be written.
    """
    known = ("properties", "required", "additionalProperties")
    if strict:
        for key in schema:
            more = key in _ANY_LIMITS or key in (*_CHOICES, "$ref") or key in TYPE_LIMITS["object"]
            if more and key not in known:
                raise SchemaError(f"{path}/{key}", f"`{key}` of an object cannot be enforced")
    properties, required = schema.get("properties"), schema.get("required")
    named = properties if isinstance(properties, Mapping) else {}
    needed = (
        [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    )
    # A name that contains markup cannot be written.
    possible = {
        name: inner
        for name, inner in named.items()
        if name and not re.search(r"[<>\n:{}]", name) and inner is not False
    }
    if strict and (missing := [name for name in needed if name not in possible]):
        raise SchemaError(f"{path}/required", f"the member {missing[0]!r} cannot be written")
    for name, inner in possible.items():
        coded = name.replace("~", "~0").replace("/", "~1")
        yield Member(
            name=name, schema=inner, needed=name in needed, path=f"{path}/properties/{coded}"
        )
