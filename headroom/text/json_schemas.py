"""JSON schemas: walks through their parts, and prepares them for llguidance's compiler."""

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

# Keywords whose value is a schema, a list of schemas, or an object with a schema for each name.
_ONE = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not"),
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Keywords that restrict nothing if their value is true or an empty object.
_TRUE_IS_NO_OP = (
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
# Values of `format` that llguidance enforces. All others are annotations, as JSON Schema allows.
FORMATS = frozenset(
    [
        *("date-time", "date", "time", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri", "unknown"),
    ]
)

# White space between the parts of a JSON text: one blank, or a line break with indentation. If any
# amount were allowed, a model could write blanks until it reaches the token limit.
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,32})"}


def schema_parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the direct parts of a schema: the path (a JSON pointer) and the schema of each."""
    if not isinstance(schema, Mapping):
        return
    for key in _ONE:
        if isinstance(schema.get(key), Mapping | bool):
            yield f"/{key}", schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"/{key}/{place}", part) for place, part in enumerate(schema[key]))
    for key in _BY_NAME:
        if isinstance(schema.get(key), Mapping):
            for name, part in schema[key].items():
                yield f"/{key}/{str(name).replace('~', '~0').replace('/', '~1')}", part


def sum_divisors(schema: Any) -> int:
    """Return the sum of all `multipleOf` of a schema, each without its decimal point and zeros.

    The compiled grammar has a state for every remainder of such a division: 0.25 gives 25 states.
    """
    divisor = schema.get("multipleOf") if isinstance(schema, Mapping) else None
    own = 0
    if isinstance(divisor, int | float) and math.isfinite(divisor):
        own = int("".join(map(str, Decimal(str(divisor)).normalize().as_tuple().digits)))
    return own + sum(sum_divisors(part) for _, part in schema_parts(schema))


def without_annotations(schema: Any) -> Any:
    """Return a schema without keywords that restrict nothing, also in its parts.

    A `oneOf` with a discriminator becomes an `anyOf` whose choices require the discriminator's
    field: then the choices exclude each other, which llguidance would have to prove of a `oneOf`.
    """
    kept = _without_no_ops(schema)
    _tell_apart(kept)
    return kept


def _without_no_ops(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    kept = with_parts(schema, _without_no_ops)
    if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
        del kept["format"]
    for key in ("uniqueItems", "not"):
        if kept.get(key) is False:
            del kept[key]
    for key in _TRUE_IS_NO_OP:
        if kept.get(key) is True or kept.get(key) == {}:
            del kept[key]
    if kept.get("propertyNames") == {"type": "string"}:
        del kept["propertyNames"]
    if kept.get("minContains") == 0 and "maxContains" not in kept:
        kept.pop("contains", None)
    if "contains" not in kept:
        kept.pop("minContains", None)
        kept.pop("maxContains", None)
    if "then" not in kept and "else" not in kept:
        kept.pop("if", None)
    if "if" not in kept:
        kept.pop("then", None)
        kept.pop("else", None)
    return kept


def _tell_apart(schema: Any) -> None:
    """Replace each `oneOf` in a copied schema whose choices a discriminator tells apart."""
    parts = {path: part for path, part in _all_parts(schema) if isinstance(part, dict)}
    for part in parts.values():
        # Beside `anyOf`, it would make llguidance refuse choices that contain themselves.
        found, choices = part.pop("discriminator", None), part.get("oneOf")
        field = found.get("propertyName") if isinstance(found, dict) else None
        if not isinstance(field, str) or not isinstance(choices, list) or "anyOf" in part:
            continue
        objects = [_referenced(choice, parts) for choice in choices]
        values = [value for choice in objects for value in _fixed_texts(choice, field)]
        if len(set(values)) < len(values) or not all(_fixed_texts(one, field) for one in objects):
            continue
        for one in objects:
            required = one.setdefault("required", [])
            if isinstance(required, list) and field not in required:
                one["required"] = [*required, field]
        part["anyOf"] = part.pop("oneOf")


def _all_parts(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a schema and all parts of it, each with its path."""
    yield path, schema
    for step, part in schema_parts(schema):
        yield from _all_parts(part, path + step)


def _referenced(choice: Any, parts: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the part that a choice names with `$ref`, or the choice itself."""
    if isinstance(choice, dict) and isinstance(reference := choice.get("$ref"), str):
        choice = parts.get(reference.removeprefix("#"))
    return choice if isinstance(choice, dict) else {}


def _fixed_texts(schema: Mapping[str, Any], name: str) -> list[str]:
    """Return the texts that a member of an object may be; none if it may be something else."""
    named = schema.get("properties")
    member = named.get(name) if isinstance(named, dict) else None
    if schema.get("type") != "object" or not isinstance(member, dict):
        return []
    values = [member["const"]] if "const" in member else member.get("enum")
    texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return list(values) if texts and isinstance(values, list) else []


def relocated(schema: Any, place: str) -> Any:
    """Return a schema whose references hold when it is a part of another schema."""
    if not isinstance(schema, Mapping):
        return schema
    kept = with_parts(schema, lambda part: relocated(part, place))
    reference = kept.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        kept["$ref"] = f"#{place}{reference[1:]}"
    return kept


def with_plain_types(schema: Any) -> Any:
    """Return a schema for chat templates that read only one type for each value.

    A list of types becomes its first type other than null, and an object that says nothing of
    further properties says that they may be anything, which means the same.
    """
    if not isinstance(schema, Mapping):
        return schema
    kept = with_parts(schema, with_plain_types)
    types = kept.get("type")
    named = [name for name in (types if isinstance(types, list) else [types]) if name != "null"]
    if named and named[0] is not None:
        kept["type"] = named[0]
    else:
        kept.pop("type", None)
    if kept.get("type") == "object":
        kept.setdefault("additionalProperties", {})
    return kept


def with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with each of its direct parts changed."""
    kept = dict(schema)
    for key in _ONE:
        if isinstance(kept.get(key), Mapping):
            kept[key] = change(kept[key])
    for key in _LISTS:
        if isinstance(kept.get(key), list):
            kept[key] = [change(part) for part in kept[key]]
    for key in _BY_NAME:
        if isinstance(kept.get(key), Mapping):
            kept[key] = {name: change(part) for name, part in kept[key].items()}
    return kept
