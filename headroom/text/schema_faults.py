"""Finds what llguidance cannot compile in JSON schemas, and leaves it out where that is allowed."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from itertools import chain, combinations, takewhile
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headroom.text.json_schemas import JSON_OPTIONS, schema_parts, with_parts, without_annotations
from headroom.text.string_schemas import SchemaError

MOST_GRAMMAR_CHARACTERS = 256 * 1024  # of a schema or grammar: it then compiles within seconds
LIMITS = LLParserLimits(max_grammar_size=200_000, verbose_errors=False)
QUIET = 0  # log level of llguidance: errors are raised here, not printed by the library
# A `oneOf` is enforced as an `anyOf`. llguidance's option `lenient` is not used: with it, version
# 1.9.1 refuses the members that `properties` names in an object with `minProperties`.
LENIENT_OPTIONS = {**JSON_OPTIONS, "coerce_one_of": True}

_CACHED_CHARACTERS = 32_768  # longer schemas are compiled again for each request
_MOST_CHARACTERS = 1_000_000  # of all schemas that are compiled to find the faults of one
_NEVER_ENFORCED = (
    *("not", "if", "then", "else", "$dynamicRef", "$recursiveRef"),
    *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    *("propertyNames", "unevaluatedProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
_LAST = ("required", "properties", "items", "type")  # the keywords that are left out last
_TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_DEFS = ("/$defs/", "/definitions/")
_NOT_A_SCHEMA = "a schema is not an object"
_CIRCLE = "a reference leads back to itself"
_ONLY_ALONE = ("Pointer ", _CIRCLE)  # reasons of parts that can be compiled in the whole schema


def find_fault(schema: Any) -> SchemaError | None:
    """Return why a schema cannot be compiled and where; None if it can be.

    The place is the smallest part that fails for the same reason. A schema that is too long for
    any grammar is not looked at.
    """
    text = json.dumps(without_annotations(schema))
    if len(text) > MOST_GRAMMAR_CHARACTERS:
        return None
    fault = _fault_of(text) if len(text) <= _CACHED_CHARACTERS else _fault_of.__wrapped__(text)
    return None if fault is None else SchemaError(*fault)


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without what llguidance cannot compile.

    Each keyword that fails is left out. A schema with too many of them keeps only its type, and one
    that is too long for any grammar stays as it is.
    """
    text = json.dumps(without_unknown(without_annotations(schema)))
    if len(text) <= _CACHED_CHARACTERS:
        text = _repaired(text)
    elif len(text) <= MOST_GRAMMAR_CHARACTERS:
        text = _repaired.__wrapped__(text)
    found: dict[str, Any] = json.loads(text)
    return found


def without_unknown(schema: Any) -> Any:
    """Return a schema without the keywords that llguidance does not know, also in its parts."""
    if not isinstance(schema, Mapping):
        return schema
    kept = with_parts(schema, without_unknown)
    return {key: value for key, value in kept.items() if key not in _NEVER_ENFORCED}


@lru_cache(maxsize=512)
def _fault_of(text: str) -> tuple[str, str] | None:
    """Return the path and the reason of a schema's fault; None if there is none."""
    schema = json.loads(text)
    if not (reason := _Compiler(JSON_OPTIONS).reason(schema)):
        return None
    path, reason, _ = _failing_part(schema, reason, _Compiler(JSON_OPTIONS))
    return path, reason


@lru_cache(maxsize=512)
def _repaired(text: str) -> str:
    schema, compiler = json.loads(text), _Compiler(LENIENT_OPTIONS)
    while (reason := compiler.reason(schema)) and compiler.may_go_on:
        path, _, shared = _failing_part(schema, reason, compiler, any_reason=True)
        part = _part_at(schema, path)
        tried = takewhile(lambda _: compiler.may_go_on, _weaker(part))
        fitting = (one for one in tried if not compiler.reason({**shared, **one}))
        schema = _with_part(schema, path, next(fitting, {}))
    if reason:
        kind = schema.get("type") if isinstance(schema, dict) else None
        schema = {"type": kind} if kind in ("object", "array") else {}
    return json.dumps(schema)


class _Compiler:
    """Compiles schemas, up to a number of characters."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._characters = 0

    @property
    def may_go_on(self) -> bool:
        return self._characters < _MOST_CHARACTERS

    def reason(self, schema: Any) -> str:
        """Return why a schema cannot be compiled; "" if it can be."""
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": self._options}
        text = json.dumps({"grammars": [{"json_schema": schema}]})
        self._characters += len(text)
        matcher = LLMatcher(_bytes(), text, log_level=QUIET, limits=LIMITS)
        if matcher.is_error():
            return plain_reason(matcher.get_error())
        matcher.compute_bitmask()
        return "no answer can match it" if matcher.is_error() else ""


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def plain_reason(error: str) -> str:
    """Return why a schema cannot be used, in words that do not depend on llguidance."""
    text = error.partition("<backtrace>")[0].strip()
    text = text.rpartition("failed to compile JSON schema: ")[2]
    is_pattern = text.startswith("regex parse error")
    if is_pattern:
        text = text.rpartition("error: ")[2]
    text = re.sub(r" at line \d+ column \d+$", "", text.partition("\n")[0])
    if is_pattern:
        return f"the pattern cannot be used: {text}"
    if text.startswith("Unimplemented keys: "):
        keys = " and ".join(f"`{key}`" for key in json.loads(text.partition(": ")[2]))
        return f"{keys} cannot be enforced"
    if text == "schema must be an object or boolean":
        return _NOT_A_SCHEMA
    if text.startswith("oneOf constraints are not supported"):
        return (
            "the choices of `oneOf` do not exclude each other (use `anyOf`, or require a field "
            "that has another `const` in each choice)"
        )
    if text.startswith("circular references"):
        return _CIRCLE
    if text.startswith("Resource "):
        return f"{text.split(chr(39))[1]!r} is not a part of the schema"
    if text.startswith("Unsatisfiable schema: required property "):
        return f"no value can have the required member {text.split(chr(39))[1]!r}"
    if text.startswith("Unsatisfiable schema: "):
        return f"no value can match it ({text.partition(': ')[2][:100]})"
    return text


def _failing_part(
    schema: Any, reason: str, compiler: _Compiler, *, any_reason: bool = False
) -> tuple[str, str, Mapping[str, Any]]:
    """Return the path of the smallest part that fails, why, and what the part may refer to.

    It fails for the same reason as the whole, unless it may fail for any reason.
    """
    shared = {}
    if isinstance(schema, dict):
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, part = "", schema
    while compiler.may_go_on:
        failing = []
        for step, inner in _ordered_parts(part):
            found = _own_reason(inner, shared, compiler)
            # What no value can match makes the object around it fail for a reason of its own.
            if found == reason or (found and reason.startswith("no value")):
                break
            if found and not found.startswith(_ONLY_ALONE):
                failing.append((step, inner, found))
        else:
            if not failing or not any_reason:
                break
            step, inner, found = failing[0]
        path, part, reason = path + step, inner, found
    return path, reason, shared


def _own_reason(part: Any, shared: Mapping[str, Any], compiler: _Compiler) -> str:
    """Return why a part of a schema fails alone; "" if it does not."""
    if not isinstance(part, dict):
        return "" if isinstance(part, bool) else _NOT_A_SCHEMA
    return compiler.reason({**shared, **part})


def _ordered_parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the direct parts of a schema, definitions first: other parts fail because of them."""
    parts = list(schema_parts(schema))
    yield from sorted(parts, key=lambda part: not part[0].startswith(_DEFS))


def _weaker(schema: Any) -> Iterator[Any]:
    """Yield schemas that say less than one that cannot be compiled."""
    if not isinstance(schema, dict):
        return
    types, required, named = (schema.get(key) for key in ("type", "required", "properties"))
    if not all(kind in _TYPES for kind in (types if isinstance(types, list) else [types])):
        yield {key: value for key, value in schema.items() if key != "type"}
    if isinstance(required, list) and isinstance(named, dict):
        yield {**schema, "required": [name for name in named if name in required]}
    others = [key for key in schema if key not in _LAST]
    faults: Iterator[tuple[str, ...]] = chain(combinations(others, 1), combinations(others, 2))
    for left_out in chain(faults, ((*others, *_LAST[:count]) for count in range(len(_LAST) + 1))):
        yield {key: value for key, value in schema.items() if key not in left_out}


def _steps(path: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]


def _part_at(schema: Any, path: str) -> Any:
    for step in _steps(path):
        schema = schema[int(step)] if isinstance(schema, list) else schema[step]
    return schema


def _with_part(schema: Any, path: str, part: Any) -> Any:
    """Replace one part of a schema, in place unless it is the whole; return the schema."""
    if not path:
        return part
    above, _, last = path.rpartition("/")
    holder = _part_at(schema, above)
    holder[int(last) if isinstance(holder, list) else _steps(f"/{last}")[0]] = part
    return schema
