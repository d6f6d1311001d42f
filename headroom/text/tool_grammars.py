"""Grammars of tool calls, in llguidance's Lark: for calls that must come, and for strict tools."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headroom.errors import RequestError
from headroom.text.conversation import Tool, ToolChoice
from headroom.text.json_schemas import JSON_OPTIONS, without_remarks
from headroom.text.tool_formats import SHORT_ID, ToolFormat
from headroom.text.tool_values import find_reference, schema_types

_ANY_TEXT = r"/(?s:.*)/"
_SHORT_ID = f"/{SHORT_ID.pattern}/"
_MAX_DEPTH = 8  # of objects and lists in Gemma 4's calls; what is deeper may have any form
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_grammar(form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice) -> str | None:
    """Return the grammar of answers that call tools as asked; None if any answer may come.

    With tool_choice "required" the answer is one or more calls. Otherwise it is text with calls in
    it, whose arguments match the schemas of strict tools. A named tool is called exactly once, as
    in OpenAI's API; of the others at most one call comes unless calls may be parallel.
    """
    if not tools or choice.mode == "none":
        return None
    if choice.mode == "auto" and choice.parallel and not any(tool.strict for tool in tools):
        return None
    if choice.name is not None:
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise RequestError(
                f"tool_choice names {choice.name!r}, and no tool has that name.",
                param="tool_choice",
            )
    grammar = _Grammar(form, required=choice.mode == "required")
    return grammar.write(tools, parallel=choice.parallel and choice.name is None)


class _Grammar:
    """The rules of one grammar, while they are written."""

    def __init__(self, form: ToolFormat, *, required: bool) -> None:
        self._format = form
        self._required = required
        self._rules: list[str] = []
        self._writers: Mapping[str, Callable[[Tool], str]] = {
            "json_tags": self._json_tags,
            "function_tags": self._function_tags,
            "argument_tags": self._argument_tags,
            "plain_keys": self._plain_keys,
            "bare_json": self._bare_json,
            "json_list": self._json_list,
            "named_json": self._named_json,
        }

    def write(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the grammar as text."""
        call = self._rule(self._choice(map(self._writers[self._format.name], tools)))
        # A block is what stands between the mark before calls and the end of its last call.
        mark, block, between = self._format.starts[0], call, '"\\n"'
        if self._format.name == "bare_json":
            mark = ""
            parallel = False  # the templates refuse several calls
        elif self._format.name == "json_list":
            more = f' (", " {call})*' if parallel else ""
            block = f'"[" {call}{more} "]"'
            parallel = False  # all calls are in one block
        elif self._format.name in ("named_json", "plain_keys"):
            between = '""'
        if self._required:
            opened = f"{self._mark(mark)} {block}" if mark else block
            more = f" ({between} {opened})*" if parallel else ""
            start = opened + more
            if self._format.end == "</tool_call>":  # models write line breaks around such calls
                start = f'/\\n{{0,2}}/ {start} "\\n"?'
        elif not mark:
            start = f'TEXT | {block}\nTEXT: /[^{{](?s:.)*/ | ""'
        else:
            start = self._text_and_calls(mark, block, parallel=parallel)
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _text_and_calls(self, mark: str, block: str, *, parallel: bool) -> str:
        """Return the rule of text with calls in it: a call follows wherever its mark comes."""
        if mark in self._format.control:
            head = f"text {self._mark(mark)}"
            self._rules.append(f"text: {_ANY_TEXT}")
        else:
            head = "head"
            self._rules += ["text: TEXT", f"head[lazy]: TEXT {json.dumps(mark)}"]
            self._rules.append(f"TEXT: {_ANY_TEXT}")
        return f"({head} {block})* text" if parallel else f"text | {head} {block}"

    def _rule(self, body: str) -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _choice(self, bodies: Iterable[str]) -> str:
        return " | ".join(bodies)

    def _mark(self, mark: str) -> str:
        """Return markup: as a token where it is a control token, else as text."""
        token = self._format.control.get(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"

    def _marked(self, *parts: str) -> str:
        """Return texts and markup in a row."""
        return " ".join(self._mark(part) for part in parts if part)

    def _json(self, schema: Any, root: Mapping[str, Any] | None = None) -> str:
        """Return the rule of JSON that matches a schema."""
        whole = dict(schema) if isinstance(schema, Mapping) else {}
        for key in ("$defs", "definitions"):
            if root is not None and key in root:
                whole.setdefault(key, root[key])
        return f"%json {json.dumps({**without_remarks(whole), 'x-guidance': JSON_OPTIONS})}"

    def _arguments(self, tool: Tool) -> str:
        return self._rule(self._json(self._schema(tool)))

    def _schema(self, tool: Tool) -> Mapping[str, Any]:
        """Return the schema of a tool's arguments, as strict as the choice demands."""
        if not tool.parameters:
            return _NO_ARGUMENTS
        if self._required or tool.strict:
            return {"additionalProperties": False, "type": "object", **tool.parameters}
        return {"type": "object"}

    def _json_tags(self, tool: Tool) -> str:
        start = self._mark(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        end = self._marked("}\n", "</tool_call>")
        return f"{start} {self._arguments(tool)} {end}"

    def _bare_json(self, tool: Tool) -> str:
        # One JSON object: an answer without calls may be another one, and both begin alike.
        schema = self._schema(tool)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        inner = {key: value for key, value in schema.items() if key not in shared}
        call = {
            **shared,
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": inner},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        return self._rule(self._json(call))

    def _json_list(self, tool: Tool) -> str:
        start = self._mark(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        before, after = self._mark(', "id": "'), self._mark('"')
        call_id = f"({before} {_SHORT_ID} {after})?"
        return f"{start} {self._arguments(tool)} {call_id} {self._mark('}')}"

    def _named_json(self, tool: Tool) -> str:
        call_id = f"{self._mark('[CALL_ID]')} {_SHORT_ID}" if self._format.writes_ids else ""
        name = self._mark(tool.name)
        return f"{name} {call_id} {self._mark('[ARGS]')} {self._arguments(tool)}"

    def _function_tags(self, tool: Tool) -> str:
        parts = [self._mark(f"\n<function={tool.name}>\n")]
        for name, schema, needed in self._properties(tool):
            value = self._plain_value(schema, tool, "\n</parameter>\n", ())
            part = f"{self._mark(f'<parameter={name}>' + chr(10))} {value}"
            parts.append(part if needed else f"({part})?")
        if not self._constrains(tool):
            value = self._until(_ANY_TEXT, "\n</parameter>\n", ())
            name = self._rule("/[^\\s<>]{1,200}/")
            parts.append(f'("<parameter=" {name} ">\\n" {value})*')
        return " ".join([*parts, self._marked("</function>\n", "</tool_call>")])

    def _argument_tags(self, tool: Tool) -> str:
        parts = [self._mark(f"{tool.name}\n")]
        for name, schema, needed in self._properties(tool):
            key = self._marked("<arg_key>", name, "</arg_key>", "\n", "<arg_value>")
            value = self._plain_value(schema, tool, "</arg_value>", ("\n",))
            parts.append(f"{key} {value}" if needed else f"({key} {value})?")
        if not self._constrains(tool):
            name = self._rule("/[^\\s<>]{1,200}/")
            key = f"{self._mark('<arg_key>')} {name} "
            key += self._marked("</arg_key>", "\n", "<arg_value>")
            value = self._until(_ANY_TEXT, "</arg_value>", ("\n",))
            parts.append(f"({key} {value})*")
        return " ".join([*parts, self._mark("</tool_call>")])

    def _constrains(self, tool: Tool) -> bool:
        return self._required or tool.strict or not tool.parameters

    def _properties(self, tool: Tool) -> list[tuple[str, Any, bool]]:
        """Return name and schema of each argument, and whether the call needs it."""
        if not self._constrains(tool):
            return []
        return _properties(tool.parameters)

    def _plain_value(self, schema: Any, tool: Tool, end: str, after: Sequence[str]) -> str:
        """Return the rule of an argument that is written as plain text, with its end mark."""
        schema = _resolved(schema, tool.parameters)
        types = schema_types(schema, tool.parameters)
        if (texts := _fixed_texts(schema)) is not None:
            ends = self._marked(end, *after)
            return f"({self._choice(self._mark(text) for text in texts)}) {ends}"
        if "string" in types:
            text = self._until(_text_pattern(_string_schema(schema, tool.parameters)), end, after)
            return f'("null" {self._marked(end, *after)} | {text})' if "null" in types else text
        return f"{self._rule(self._json(schema, tool.parameters))} {self._marked(end, *after)}"

    def _until(self, pattern: str, end: str, after: Sequence[str]) -> str:
        """Return the rule of a text that ends at the first end mark."""
        if end in self._format.control:
            return f"{self._rule(pattern)} {self._marked(end, *after)}"
        name = f"r{len(self._rules)}"
        whole = "".join([end, *after])
        self._rules.append(f"{name}[suffix={json.dumps(whole)}]: {pattern}")
        return name

    def _plain_keys(self, tool: Tool) -> str:
        start = self._mark(f"call:{tool.name}{{")
        if self._constrains(tool):
            members = self._plain_keys_members(tool.parameters, tool.parameters, 0)
        else:
            members = self._plain_keys_any_members()
        return f"{start} {members} {self._marked('}', '<tool_call|>')}"

    def _plain_keys_members(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
    ) -> str:
        """Return the rule of an object's members, in the order of their names."""
        follow = {False: '""', True: '""'}  # by whether a member came before
        for name, inner, needed in sorted(_properties(schema), reverse=True, key=lambda p: p[0]):
            value = self._plain_keys_value(inner, root, depth)
            member = f"{self._mark(f'{name}:')} {value}"
            follow = {
                before: self._rule(
                    (f'"," {member}' if before else member)
                    + f" {follow[True]}"
                    + ("" if needed else f" | {follow[before]}")
                )
                for before in (False, True)
            }
        return follow[False]

    def _plain_keys_value(self, schema: Any, root: Mapping[str, Any], depth: int) -> str:
        schema = _resolved(schema, root)
        if depth >= _MAX_DEPTH:
            return self._plain_keys_any()
        if isinstance(schema, Mapping) and isinstance(schema.get("anyOf"), list):
            inner = (self._plain_keys_value(part, root, depth + 1) for part in schema["anyOf"])
            return self._rule(self._choice(inner))
        if (texts := _fixed_texts(schema)) is not None:
            quoted = (
                f"{self._plain_keys_quote()} {self._mark(text)} {self._plain_keys_quote()}"
                for text in texts
            )
            return self._rule(self._choice(quoted))
        types = schema_types(schema, root)
        if len(types) > 2 or not isinstance(schema, Mapping):
            return self._plain_keys_any()
        choices = []
        for kind in sorted(types):
            if kind == "object" and schema.get("properties"):
                choices.append(f'"{{" {self._plain_keys_members(schema, root, depth + 1)} "}}"')
            elif kind == "array":
                item = self._plain_keys_value(schema.get("items"), root, depth + 1)
                choices.append(f'"[" ({item} ("," {item})*)? "]"')
            elif kind == "string":
                choices.append(self._plain_keys_string(_text_pattern(schema)))
            elif kind == "object":
                choices.append(f'"{{" {self._plain_keys_any_members()} "}}"')
            else:  # numbers and words are written as in JSON
                alone = {**schema, "type": kind}
                choices.append(self._rule(self._json(alone, root)))
        return self._rule(self._choice(choices))

    def _plain_keys_quote(self) -> str:
        return self._mark('<|"|>')

    def _plain_keys_string(self, pattern: str = _ANY_TEXT) -> str:
        return f"{self._plain_keys_quote()} {self._until(pattern, '<|' + chr(34) + '|>', ())}"

    def _plain_keys_any(self) -> str:
        """Return the rule of any value."""
        if not any(rule.startswith("any: ") for rule in self._rules):
            self._rules.append("any: ")  # the place of the rule, which refers to itself
            place = len(self._rules) - 1
            plain = self._rule(self._json({"type": ["number", "boolean", "null"]}))
            members = self._plain_keys_any_members()
            self._rules[place] = (
                f"any: {self._plain_keys_string()} | {plain} | "
                f'"[" (any ("," any)*)? "]" | "{{" {members} "}}"'
            )
        return "any"

    def _plain_keys_any_members(self) -> str:
        """Return the rule of any object's members."""
        if not any(rule.startswith("members: ") for rule in self._rules):
            self._rules.append('members: (KEY ":" any ("," KEY ":" any)*)?')
            self._rules.append("KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,99}/")
            self._plain_keys_any()
        return "members"


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return name, schema and need of each property; markup in a name is not possible."""
    properties = schema.get("properties")
    needed = schema.get("required")
    if not isinstance(properties, Mapping):
        return []
    wanted = needed if isinstance(needed, list) else []
    return [
        (name, inner, name in wanted)
        for name, inner in properties.items()
        if not re.search(r"[<>\n:{}]", name) and name
    ]


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what a schema refers to, if it is but a reference."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = find_reference(schema["$ref"], root)
    return schema


def _string_schema(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the only choice of a schema that allows strings; the schema itself if it has none."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema, Mapping) and isinstance(schema.get(key), list):
            choices = [_resolved(choice, root) for choice in schema[key]]
            texts = [choice for choice in choices if "string" in schema_types(choice, root)]
            if len(texts) == 1:
                return texts[0]
    return schema


def _fixed_texts(schema: Any) -> list[str] | None:
    """Return the texts that a string may be, if the schema lists them."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    if not all(isinstance(value, str) and value for value in values):
        return None
    return values


def _text_pattern(schema: Any) -> str:
    """Return the pattern of a string by its length; other limits of strings are not enforced."""
    if not isinstance(schema, Mapping):
        return _ANY_TEXT
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if not isinstance(least, int) or not (most == "" or isinstance(most, int)):
        return _ANY_TEXT
    return f"/(?s:.){{{least},{most}}}/" if least or most != "" else _ANY_TEXT
