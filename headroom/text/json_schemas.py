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
    """Return a schema without the values of `format` that llguidance does not know."""
    if not isinstance(schema, Mapping):
        return schema
    kept = _with_parts(schema, without_annotations)
    if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
        del kept["format"]
    return kept


def with_plain_types(schema: Any) -> Any:
    """Return a schema for chat templates that read only one type for each value.

    A list of types becomes its first type other than null, and an object that says nothing of
    further properties says that they may be anything, which means the same.
    """
    if not isinstance(schema, Mapping):
        return schema
    kept = _with_parts(schema, with_plain_types)
    types = kept.get("type")
    named = [name for name in (types if isinstance(types, list) else [types]) if name != "null"]
    if named and named[0] is not None:
        kept["type"] = named[0]
    else:
        kept.pop("type", None)
    if kept.get("type") == "object":
        kept.setdefault("additionalProperties", {})
    return kept


def _with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
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
