"""Turns the string part of a JSON schema into a terminal of a Lark grammar.

For JSON, llguidance compiles schemas itself. This module is for tool-call formats in which strings
are written without quotes and escapes.
"""

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from headroom.errors import HeadroomError
from headroom.text.tool_values import find_reference, schema_types

ANY_TEXT = "/(?s:.*)/"
ASCII_CLASSES = "dws"  # \d, \w and \s of a regular expression match ASCII only, as in JSON schemas
_MAX_DEPTH = 16  # of references and choices
_UNSUPPORTED = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")


class SchemaError(HeadroomError):
    """A part of a schema that cannot be enforced in a model's tool-call format."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path  # a JSON pointer
        self.reason = reason


def _ipv6() -> str:
    group = "[0-9A-Fa-f]{1,4}"
    short = [
        (f"{group}(:{group}){{{left - 1}}}" if left else "")
        + "::"
        + (f"({group}(:{group}){{0,{6 - left}}})?" if left < 7 else "")
        for left in range(8)
    ]
    return "|".join([f"({group}:){{7}}{group}", *short])


_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_CLOCK = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_MAIL = r"[A-Za-z0-9!#$%&'*+\/=?^_`{|}~-]+"
_UNRESERVED = r"[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2}"
_PATH = rf"({_UNRESERVED}|[:@])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P(([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)({_CLOCK})?|{_CLOCK}"
    "|[0-9]+W)",
    "email": rf"{_MAIL}(\.{_MAIL})*@{_LABEL}(\.{_LABEL})*",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": _ipv6(),
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(\/\/(({_UNRESERVED}|:)*@)?(({_UNRESERVED})*|\[({_ipv6()})\])"
    rf"(:[0-9]*)?(\/{_PATH}*)*|\/?({_PATH}+(\/{_PATH}*)*)?)"
    rf"(\?({_PATH}|[\/?])*)?(\#({_PATH}|[\/?])*)?",
}


def string_terminal(schema: Any, root: Mapping[str, Any], path: str = "", depth: int = 0) -> str:
    """Return a terminal that matches the strings a schema allows; ANY_TEXT if it allows all.

    A schema that no terminal can express raises SchemaError.
    """
    if not isinstance(schema, Mapping):
        return ANY_TEXT
    if depth > _MAX_DEPTH:
        raise SchemaError(path, f"references and choices are more than {_MAX_DEPTH} deep")
    for key in _UNSUPPORTED:
        if key in schema:
            raise SchemaError(f"{path}/{key}", f"`{key}` cannot be enforced for strings")
    parts = [*_own_limits(schema, path)]
    if isinstance(reference := schema.get("$ref"), str):
        found = find_reference(reference, root)
        if found is None:
            raise SchemaError(f"{path}/$ref", f"{reference!r} is not a part of the schema")
        parts.append(string_terminal(found, root, f"{path}/$ref", depth + 1))
    for place, part in enumerate(_list(schema, "allOf")):
        parts.append(string_terminal(part, root, f"{path}/allOf/{place}", depth + 1))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts.append(_choice(schema, key, root, path, depth))
    limits = [part for part in dict.fromkeys(parts) if part != ANY_TEXT]
    return " & ".join(limits) or ANY_TEXT


def _choice(
    schema: Mapping[str, Any], key: str, root: Mapping[str, Any], path: str, depth: int
) -> str:
    """Return a terminal for strings that match any (anyOf) or exactly one (oneOf) of the parts."""
    choices = [
        string_terminal(part, root, f"{path}/{key}/{place}", depth + 1)
        for place, part in enumerate(_list(schema, key))
        if "string" in schema_types(part, root)
    ]
    if not choices:
        raise SchemaError(f"{path}/{key}", "no string matches it")
    if key == "anyOf":
        return ANY_TEXT if ANY_TEXT in choices else f"({' | '.join(choices)})"
    if len(choices) == 1:
        return choices[0]
    alone = [
        " & ".join([f"({one})", *(f"~({other})" for other in choices[:at] + choices[at + 1 :])])
        for at, one in enumerate(choices)
    ]
    return f"({' | '.join(alone)})"


def _own_limits(schema: Mapping[str, Any], path: str) -> list[str]:
    """Return the terminals of a schema's own keywords."""
    limits = []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = [json.dumps(value) for value in values if isinstance(value, str)]
        if not texts or _fault(" | ".join(texts)):
            raise SchemaError(path, "no string matches it")
        limits.append(f"({' | '.join(texts)})")
    if isinstance(pattern := schema.get("pattern"), str):
        limits.append(_searched(pattern, f"{path}/pattern"))
    if (form := schema.get("format")) in _FORMATS:
        limits.append(f"/{_FORMATS[form]}/")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    for key, value in (("minLength", least), ("maxLength", most)):
        if value != "" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise SchemaError(f"{path}/{key}", f"`{key}` is not a number of characters")
    if most != "" and least > most:
        raise SchemaError(f"{path}/maxLength", f"{most} is less than `minLength` ({least})")
    if least or most != "":
        limits.append(f"/(?s:.){{{least},{most}}}/" if most != 0 else '""')
    return limits


def _searched(pattern: str, path: str) -> str:
    """Return a terminal for texts in which a pattern is found anywhere, as JSON Schema says."""
    found = []
    for choice in _alternatives(pattern):
        start = "" if choice.startswith("^") else "(?s:.*)"
        end = "" if _ends_anchored(choice) else "(?s:.*)"
        inner = choice.removeprefix("^")
        found.append(f"{start}(?:{inner[:-1] if not end else inner}){end}")
    try:
        text = f"/{regex_to_lark('|'.join(found), ASCII_CLASSES)}/"
    except UnicodeError as error:
        raise SchemaError(path, "the pattern is not valid Unicode") from error
    if reason := _fault(text):
        raise SchemaError(path, f"the pattern cannot be used: {reason}")
    return text


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a pattern, between bars outside of groups and classes."""
    parts, depth, in_class, start, at = [], 0, False, 0, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            parts.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*parts, pattern[start:]]


def _ends_anchored(choice: str) -> bool:
    if not choice.endswith("$"):
        return False
    slashes = len(choice) - 1 - len(choice[:-1].rstrip("\\"))
    return slashes % 2 == 0


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


@lru_cache(maxsize=512)
def _fault(terminal: str) -> str:
    """Return why llguidance cannot use a terminal; "" if it can."""
    matcher = LLMatcher(_bytes(), f"start: {terminal}", log_level=0)
    return str(matcher.get_error()).splitlines()[0] if matcher.is_error() else ""


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
