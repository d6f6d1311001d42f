"""The fields of a request that say what the text of its answer must match.

These are OpenAI's `response_format`, and the fields that clients of other servers send: those of
vLLM (`guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`, `structured_outputs`), of
llama.cpp (`json_schema`, `grammar`) and of SGLang (`regex`).
"""

from typing import Any

from pydantic_core import from_json

from headroom.server.invalid_bodies import short
from headroom.server.schemas import Body, invalid, unsupported
from headroom.text.conversation import OutputFormat

GBNF_RULE = "::="  # every GBNF grammar has it, and no Lark grammar outside of a quoted text


class FormatFields(Body):
    """The fields that say what an answer must match; at most one may be set."""

    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    json_schema: Any = None
    grammar: Any = None
    regex: Any = None

    def output_format(self) -> OutputFormat | None:
        """Return what the answer must match; None for any text."""
        found: dict[str, OutputFormat] = {}
        for field, read in _READERS.items():
            value = getattr(self, field)
            if value is None or value == "":
                continue
            if (form := read(value, field)) is not None:
                found[field] = form
        if len(found) > 1:
            first, second = list(found)[:2]
            raise invalid(
                second,
                f"`{first}` and `{second}` both say what the answer must match; leave one out.",
            )
        return next(iter(found.values()), None)


def _response_format(value: Any, field: str) -> OutputFormat | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        if (schema := value.get("schema")) is not None:
            return _schema(schema, f"{field}.schema")
        return OutputFormat(kind="json_object", param=field)
    if kind == "json_schema":
        named = value.get("json_schema")
        if not isinstance(named, dict):
            raise invalid(f"{field}.json_schema", f"`{field}.json_schema` must be an object.")
        inner = f"{field}.json_schema.schema"
        if "schema" not in named:
            raise invalid(inner, f"`{inner}` is missing.")
        return _schema(named["schema"], inner)
    if kind == "regex" and "pattern" in value:
        return _regex(value["pattern"], f"{field}.pattern")
    if isinstance(kind, str):
        raise unsupported(
            field,
            f"`{field}.type` is {short(kind)!r}; it can be 'text', 'json_object' or 'json_schema'.",
        )
    raise invalid(field, f"`{field}` must be an object with a `type`.")


def _structured_outputs(value: Any, field: str) -> OutputFormat | None:
    if not isinstance(value, dict):
        raise invalid(field, f"`{field}` must be an object.")
    given = {name: entry for name, entry in value.items() if entry not in (None, False)}
    for name in given:
        if name not in _STRUCTURED:
            known = ", ".join(_STRUCTURED)
            raise unsupported(
                f"{field}.{name}",
                f"`{field}` cannot have {short(name)!r}; it can have one of {known}.",
            )
    if len(given) > 1:
        first, second = list(given)[:2]
        raise invalid(
            f"{field}.{second}",
            f"`{first}` and `{second}` both say what the answer must match; leave one out.",
        )
    for name, entry in given.items():
        return _STRUCTURED[name](entry, f"{field}.{name}")
    return None


def _schema(value: Any, field: str) -> OutputFormat:
    if isinstance(value, str):
        try:
            value = from_json(value, allow_inf_nan=False)
        except ValueError as error:
            raise invalid(field, f"`{field}` is text that is not JSON: {error}.") from error
    if not isinstance(value, dict | bool):
        raise invalid(field, f"`{field}` must be a JSON schema: an object, true or false.")
    return OutputFormat(kind="json_schema", value=value, param=field)


def _regex(value: Any, field: str) -> OutputFormat:
    if not isinstance(value, str) or not value:
        raise invalid(field, f"`{field}` must be text: a regular expression.")
    return OutputFormat(kind="regex", value=value, param=field)


def _choice(value: Any, field: str) -> OutputFormat | None:
    if value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise invalid(field, f"`{field}` must be a list of texts, none of them empty.")
    return OutputFormat(kind="choice", value=list(value), param=field)


def _grammar(value: Any, field: str) -> OutputFormat:
    if not isinstance(value, str):
        raise invalid(field, f"`{field}` must be text: a grammar in Lark's notation.")
    if GBNF_RULE in value:
        raise unsupported(
            field, f"`{field}` is in GBNF, llama.cpp's notation; write it in Lark's notation."
        )
    return OutputFormat(kind="lark", value=value, param=field)


def _json_object(value: Any, field: str) -> OutputFormat:
    if value is not True:
        raise invalid(field, f"`{field}` must be true or false.")
    return OutputFormat(kind="json_object", param=field)


_STRUCTURED = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_READERS = {
    "response_format": _response_format,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured_outputs,
    "json_schema": _schema,
    "grammar": _grammar,
    "regex": _regex,
}
