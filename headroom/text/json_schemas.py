"""JSON schemas: their parts, by path, and what is taken out before they become a grammar."""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

# Where a schema holds other schemas: one, a list of them, or one for each name.
_ONE = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not"),
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Formats that a grammar can hold a text to. JSON Schema takes any other format as a remark.
FORMATS = frozenset(
    [
        *("date-time", "date", "time", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri", "unknown"),
    ]
)

# White space between the parts of a JSON text: one blank, or a new line with its indentation.
# Without a limit, a model may write blanks until its answer is cut.
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,32})"}


def parts_of(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that a schema holds directly, each with its path as a JSON pointer."""
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


def count_remainders(schema: Any) -> int:
    """Return how many remainders a grammar keeps apart for all `multipleOf` of a schema."""
    divisor = schema.get("multipleOf") if isinstance(schema, Mapping) else None
    own = 0
    if isinstance(divisor, int | float) and math.isfinite(divisor):
        own = int("".join(map(str, Decimal(str(divisor)).normalize().as_tuple().digits)))
    return own + sum(count_remainders(part) for _, part in parts_of(schema))


def without_remarks(schema: Any) -> Any:
    """Return a schema without formats that restrict nothing, in all its parts."""
    if not isinstance(schema, Mapping):
        return schema
    kept = dict(schema)
    if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
        del kept["format"]
    for key in _ONE:
        if isinstance(kept.get(key), Mapping):
            kept[key] = without_remarks(kept[key])
    for key in _LISTS:
        if isinstance(kept.get(key), list):
            kept[key] = [without_remarks(part) for part in kept[key]]
    for key in _BY_NAME:
        if isinstance(kept.get(key), Mapping):
            kept[key] = {name: without_remarks(part) for name, part in kept[key].items()}
    return kept
