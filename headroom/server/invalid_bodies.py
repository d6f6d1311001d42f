"""Error messages for request bodies that do not match their schema.

pydantic finds what is wrong. But its messages are written for Python programmers and change with
its versions, so clients get the sentences of this module instead.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from headroom.server.refusals import RefusalError

WRONG_TYPE, WRONG_VALUE = "wrong_type", "wrong_value"  # types of the errors that we raise ourselves
# Returns the end of a sentence about a wrong value, from the value and pydantic's error context.
Predicate = Callable[[Any, Mapping[str, Any]], str]
SHOWN_CHARACTERS = 40  # of a client's value in a message


def wrong_type(expected: str) -> PydanticCustomError:
    """Return the error for a value of the wrong type; `expected` says what it must be."""
    return PydanticCustomError(WRONG_TYPE, "must be {expected}", {"expected": expected})


def wrong_value(expected: str) -> PydanticCustomError:
    """Return the error for a value that the field cannot have; `expected` says what it must be."""
    return PydanticCustomError(WRONG_VALUE, "must be {expected}", {"expected": expected})


def short(value: object) -> str:
    """Return a client's value for an error message, cut after 40 characters."""
    text = str(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "beyond 64 bits"
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _kind(value: object) -> str:
    """Return how a message names a JSON value: plain values as they are, others by their type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else short(value)


def _quoted(value: object) -> str:
    return repr(short(value)) if isinstance(value, str) else _kind(value)


def _must_be(expected: str) -> Predicate:
    """Return the predicate for a value of the wrong type."""
    return lambda value, context: f"must be {expected}, not {_kind(value)}"


def _too_few(one: str, many: str) -> Predicate:
    """Return the predicate for a list or a text that is too short."""

    def predicate(value: Any, context: Mapping[str, Any]) -> str:
        least = context["min_length"]
        return f"must have at least {least} {one if least == 1 else many}, and has {len(value)}"

    return predicate


def _too_many(many: str) -> Predicate:
    """Return the predicate for a list or a text that is too long."""
    return lambda value, context: (
        f"must have at most {context['max_length']} {many}, and has {len(value)}"
    )


# The end of the sentence about a field, by the type of pydantic's error.
PREDICATES: Mapping[str, Predicate] = {
    "missing": lambda value, context: "is required",
    "none_required": lambda value, context: "cannot be honoured; leave it out",
    "model_type": _must_be("an object"),
    "dict_type": _must_be("an object"),
    "list_type": _must_be("a list"),
    "string_type": _must_be("a text"),
    "bool_type": _must_be("true or false"),
    "int_type": _must_be("a whole number"),
    "float_type": _must_be("a number"),
    "finite_number": lambda value, context: "must be a finite number",
    "literal_error": lambda value, context: f"must be {context['expected']}, not {_quoted(value)}",
    "greater_than_equal": lambda value, context: (
        f"must be at least {context['ge']}, not {short(value)}"
    ),
    "less_than_equal": lambda value, context: (
        f"must be at most {context['le']}, not {short(value)}"
    ),
    "too_short": _too_few("entry", "entries"),
    "too_long": _too_many("entries"),
    "string_too_short": _too_few("character", "characters"),
    "string_too_long": _too_many("characters"),
    "string_pattern_mismatch": lambda value, context: (
        f"is {_quoted(value)}, which does not match {context['pattern']}"
    ),
    WRONG_TYPE: lambda value, context: f"must be {context['expected']}",
    WRONG_VALUE: lambda value, context: f"must be {context['expected']}",
}


def refuse_invalid(error: ValidationError, body: object) -> RefusalError:
    """Return the refusal for the first error that pydantic found in a body."""
    first = error.errors(include_url=False)[0]
    kind = first["type"]
    param = _path(first, body)
    where = "The body" if param is None else f"`{param}`"
    if kind == "value_error":  # raised by one of our validators, with a message of its own
        sentence = f"{where}: {first['ctx']['error']}."
    elif (predicate := PREDICATES.get(kind)) is not None:
        sentence = f"{where} {predicate(first['input'], first.get('ctx', {}))}."
    else:
        sentence = f"{where} cannot be {_quoted(first['input'])}."
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    if kind == "missing":
        code = "missing_required_parameter"
    return RefusalError(400, code, sentence, param=param)


def _path(error: ErrorDetails, body: object) -> str | None:
    """Return the path of the wrong field, such as `messages[0].role`; None for the body itself.

    pydantic's path may also have the chosen type of a tagged union, which is left out here. A body
    need not have the first field: its value may have come under another name.
    """
    path, value, steps = "", body, error["loc"]
    for number, step in enumerate(steps):
        is_last = number == len(steps) - 1
        absent = number == 0 or (is_last and error["type"] == "missing")
        if isinstance(value, dict) and (step in value or absent):
            path, value = f"{path}.{step}", value.get(str(step))
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
    return path.removeprefix(".") or None
