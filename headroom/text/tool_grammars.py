"""Writes grammars of tool calls, in llguidance's Lark: for required calls and strict tools."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headroom.errors import RequestError
from headroom.text.conversation import INPUT, Tool, ToolChoice
from headroom.text.grammar import check_divisors
from headroom.text.json_regex import RegexError
from headroom.text.json_schemas import JSON_OPTIONS, relocated, without_annotations
from headroom.text.lark_embedding import EmbeddedGrammar, LarkError, coded, embed_lark
from headroom.text.plain_values import (
    MAX_DEPTH,
    TYPE_LIMITS,
    Member,
    limits,
    members,
    plain_value,
    resolved,
)
from headroom.text.schema_faults import LENIENT_OPTIONS, enforceable, find_fault, without_unknown
from headroom.text.string_schemas import ANY_TEXT, SchemaError, string_terminal
from headroom.text.tool_formats import FOLLOWS, QUOTE, SHORT_ID, ToolFormat
from headroom.text.tool_values import ALL_TYPES, schema_types, with_plain_root

_SHORT_ID = f"/{SHORT_ID.pattern}/"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT = {"type": "object"}
# Keywords that may allow members that `properties` does not name.
_MORE_MEMBERS = (
    *("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else"),
    *("dependentSchemas", "dependencies", "$dynamicRef"),
)
_LINE_BREAK = '"\\n"?'


def tool_grammar(form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice) -> str | None:
    """Return the grammar of answers that the tools and the choice allow; None if all are.

    With the choice "required" the answer is one or several calls. Otherwise it is text with calls
    in it, and the arguments of strict tools match their schemas. A named tool is called exactly
    once, as in OpenAI's API. Several calls are possible only if calls may be parallel.

    A part of a schema that no grammar can enforce raises RequestError if the tool is strict, and is
    left out if it is not.
    """
    if not tools or choice.mode == "none":
        return None
    if choice.mode == "auto" and choice.parallel and not any(tool.strict for tool in tools):
        return None
    if choice.name is not None:
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise RequestError(
                f"tool_choice names {choice.name!r}, but no tool has that name.",
                hint="Name one of the tools, or leave tool_choice out.",
                param="tool_choice",
            )
    grammar = _GrammarWriter(form, required=choice.mode == "required")
    return grammar.write(tools, parallel=choice.parallel and choice.name is None)


class _GrammarWriter:
    """Writes the rules of one grammar."""

    def __init__(self, form: ToolFormat, *, required: bool) -> None:
        self._format = form
        self._required = required
        self._rules: list[str] = []
        # If a tool has a Lark grammar, rules for JSON calls write the object's keys as text instead
        # of compiling one schema for the whole object: llguidance's parser would have to choose
        # between both kinds of rules at the first bracket.
        self._spells_json = False
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
        self._spells_json = any(tool.grammar for tool in tools)
        call = self._rule(self._choice(map(self._call, tools)))
        # A block is what follows the start mark, up to the end of the last call.
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

    def _call(self, tool: Tool) -> str:
        """Return the rule of a tool's calls; raise RequestError if they cannot be enforced."""
        if self._constrains(tool):
            check_divisors(tool.parameters, tool.param)
        root = with_plain_root(without_annotations(tool.parameters))
        if not tool.strict:  # the root keeps what tells whether it may have more members
            kept = {key: root[key] for key in _MORE_MEMBERS if key in root}
            root = {**without_unknown(root), **kept}
        tool = replace(tool, parameters=root)
        try:
            return self._writers[self._format.name](tool)
        except SchemaError as error:
            where = f"at {error.path}" if error.path else "at its root"
            raise RequestError(
                f"The schema of the tool {tool.name!r} cannot be enforced in the tool-call format "
                f"of this model, {where}: {error.reason}.",
                hint="Leave that out, describe it in another way, or leave out `strict`.",
                param=tool.param,
            ) from error
        except (LarkError, RegexError) as error:
            raise RequestError(
                f"The grammar of the tool {tool.name!r} cannot be used: {error}.", param=tool.param
            ) from error

    def _text_and_calls(self, mark: str, block: str, *, parallel: bool) -> str:
        """Return the rule of text with calls: after each start mark, a call must follow."""
        if mark in self._format.control:
            head = f"text {self._mark(mark)}"
            self._rules.append(f"text: {ANY_TEXT}")
        else:
            head = "head"
            self._rules += ["text: TEXT", f"head[lazy]: TEXT {json.dumps(mark)}"]
            self._rules.append(f"TEXT: {ANY_TEXT}")
        return f"({head} {block})* text" if parallel else f"text | {head} {block}"

    def _rule(self, body: str) -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        """Add a terminal and return its name."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _choice(self, bodies: Iterable[str]) -> str:
        return " | ".join(bodies)

    def _mark(self, mark: str) -> str:
        """Return the rule of a mark: a token if it is a control token, else its text."""
        token = self._format.control.get(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"

    def _marked(self, *parts: str) -> str:
        """Return the rule of several marks and texts, one after the other."""
        return " ".join(self._mark(part) for part in parts if part)

    def _json(
        self,
        schema: Any,
        *,
        root: Mapping[str, Any] | None = None,  # has the definitions that the schema refers to
        strict: bool,
        path: str = "",  # of the schema, for errors
    ) -> str:
        """Return the rule of JSON that matches a schema."""
        whole = dict(schema) if isinstance(schema, Mapping) else {}
        for key in ("$defs", "definitions"):
            if root is not None and key in root:
                whole.setdefault(key, root[key])
        return self._json_rule(_checked(whole, path) if strict else enforceable(whole), strict)

    def _json_rule(self, schema: Mapping[str, Any], strict: bool) -> str:
        options = JSON_OPTIONS if strict else LENIENT_OPTIONS
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"

    def _arguments(self, tool: Tool) -> str:
        """Return the rule of a call's arguments in JSON."""
        if tool.grammar:
            start = self._embedded(tool, in_json=True).start
            opening, closing = '{"' + INPUT + '": "', '"}'
            return self._rule(f"{json.dumps(opening)} {start} {json.dumps(closing)}")
        return self._rule(self._json_rule(self._schema(tool), tool.strict))

    def _embedded(self, tool: Tool, *, in_json: bool = False, end: str = "") -> EmbeddedGrammar:
        """Add the grammar of a custom tool's text to the rules, and return it."""
        prefix = f"g{len(self._rules)}"
        embedded = embed_lark(tool.grammar, prefix, in_json=in_json, end=end)
        self._rules += embedded.definitions
        return embedded

    def _schema(self, tool: Tool) -> Mapping[str, Any]:
        """Return the schema of a tool's arguments; any object if they need not match."""
        if not tool.parameters:
            return _NO_ARGUMENTS
        if not self._constrains(tool):
            return _ANY_OBJECT
        schema = {**_ANY_OBJECT, **tool.parameters}
        unnamed = _unnamed_members(schema)
        if _names_members(schema, strict=tool.strict):
            schema.setdefault("additionalProperties", False)
        if tool.strict:
            if unnamed and schema.get("additionalProperties") is False:
                reason = f"`properties` does not have the required member {unnamed[0]!r}"
                raise SchemaError("/required", reason)
            return _checked(schema, "")
        if unnamed:
            schema["required"] = [name for name in schema["required"] if name not in unnamed]
        return enforceable({**schema, **_ANY_OBJECT})

    def _constrains(self, tool: Tool) -> bool:
        return self._required or tool.strict or not tool.parameters

    def _json_tags(self, tool: Tool) -> str:
        start = self._mark(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        end = self._marked("}\n", "</tool_call>")
        return f"{start} {self._arguments(tool)} {end}"

    def _bare_json(self, tool: Tool) -> str:
        if self._spells_json:
            start = self._mark(f'{{"name": {json.dumps(tool.name)}, "parameters": ')
            return f"{start} {self._arguments(tool)} {self._mark('}')}"
        # The call is compiled as one JSON object, because an answer without calls may be another
        # JSON object, which begins in the same way.
        schema = {key: value for key, value in self._schema(tool).items() if key != "$id"}
        call = {
            "$defs": {"parameters": relocated(schema, "/$defs/parameters")},
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": {"$ref": "#/$defs/parameters"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        return self._rule(self._json_rule(call, tool.strict))

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
        end = _End("\n</parameter>\n", line_break=True)
        parts = [self._mark(f"\n<function={tool.name}>\n")]
        for member in self._members(tool):
            key = self._mark(f"<parameter={member.name}>\n")
            part = f"{key} {self._plain_value(member, tool, end)}"
            parts.append(part if member.needed else f"({part})?")
        if self._may_have_more(tool):
            name = self._rule("/[^\\s<>]{1,200}/")
            parts.append(f'("<parameter=" {name} ">\\n" {self._any_until(end)})*')
        return " ".join([*parts, self._marked("</function>\n", "</tool_call>")])

    def _argument_tags(self, tool: Tool) -> str:
        # Of the models that write this format, some write these line breaks and some do not.
        end = _End("</arg_value>", then=_LINE_BREAK)
        parts = [f"{self._mark(tool.name)} {_LINE_BREAK}"]
        opening = f"{self._mark('</arg_key>')} {_LINE_BREAK} {self._mark('<arg_value>')}"
        for member in self._members(tool):
            key = f"{self._marked('<arg_key>', member.name)} {opening}"
            part = f"{key} {self._plain_value(member, tool, end)}"
            parts.append(part if member.needed else f"({part})?")
        if self._may_have_more(tool):
            name = self._rule("/[^\\s<>]{1,200}/")
            key = f"{self._mark('<arg_key>')} {name} {opening}"
            parts.append(f"({key} {self._any_until(end)})*")
        return " ".join([*parts, self._mark("</tool_call>")])

    def _may_have_more(self, tool: Tool) -> bool:
        """Whether a call may have arguments that the tool's `properties` do not name."""
        if not self._constrains(tool):
            return True
        return not (
            tool.strict
            or not tool.parameters
            or tool.parameters.get("additionalProperties") is False
            or _names_members(tool.parameters, strict=False)
        )

    def _members(self, tool: Tool) -> list[Member]:
        """Return the arguments of a tool; none if they need not match its schema."""
        if not self._constrains(tool):
            return []
        return list(members(tool.parameters, "", strict=tool.strict))

    def _plain_value(self, member: Member, tool: Tool, end: "_End") -> str:
        """Return the rule of an argument that is written as plain text, with its end mark."""
        if tool.grammar:
            return self._grammar_value(tool, end)
        try:
            value = plain_value(member.schema, tool.parameters, member.path)
        except SchemaError:
            if tool.strict:
                raise
            return self._until(ANY_TEXT, end)
        choices = []
        if value.terminal is not None:
            choices.append(self._until(value.terminal, end))
        if value.json_schema is not None:
            rule = self._json(
                value.json_schema, root=tool.parameters, strict=tool.strict, path=member.path
            )
            choices.append(f"{self._rule(rule)} {self._ended(end)}")
        return f"({self._choice(choices)})"

    def _grammar_value(self, tool: Tool, end: "_End") -> str:
        """Return the rule of a text that matches the tool's grammar, with its end mark."""
        mark = "" if end.text in self._format.control else end.text.strip()
        embedded = self._embedded(tool, end=mark)
        if embedded.is_terminal:
            return self._until(embedded.start, end)
        return f"{embedded.start} {self._ended(end)}"

    def _ended(self, end: "_End") -> str:
        return f"{self._mark(end.text)} {end.then}"

    def _until(self, terminal: str, end: "_End") -> str:
        """Return the rule of a text up to its end mark; the parser must not end it earlier."""
        if end.text in self._format.control:
            return f"{self._terminal(terminal)} {self._ended(end)}"
        follows = "|".join(map(coded, FOLLOWS[self._format.name]))
        mark = f"{coded(end.text.strip())}[\\s\\x1C-\\x1F]*({follows})"
        body = f"({terminal}) & ~/(?s:.*)({coded(end.text)}|{mark})(?s:.*)/"
        if end.line_break:  # a carriage return before the line break belongs to it
            body += " & ~/(?s:.*)\\r/"
        return self._suffixed(body, end)

    def _any_until(self, end: "_End") -> str:
        """Return the rule of any text up to an end mark."""
        if end.text in self._format.control:
            return f"{self._rule(ANY_TEXT)} {self._ended(end)}"
        return self._suffixed(ANY_TEXT, end)

    def _suffixed(self, body: str, end: "_End") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[suffix={json.dumps(end.text)}]: {body}")
        return f"{name} {end.then}"

    def _plain_keys(self, tool: Tool) -> str:
        start = self._mark(f"call:{tool.name}{{")
        if tool.grammar:
            quoted = f"{self._mark(QUOTE)} {self._grammar_value(tool, _End(QUOTE))}"
            inner = f"{self._mark(f'{INPUT}:')} {quoted}"
        elif self._constrains(tool):
            inner = self._plain_keys_members(tool.parameters, tool, "", 0)
        else:
            inner = self._plain_keys_any_members()
        return f"{start} {inner} {self._marked('}', '<tool_call|>')}"

    def _plain_keys_members(
        self, schema: Mapping[str, Any], tool: Tool, path: str, depth: int
    ) -> str:
        """Return the rule of an object's members, in the order of their names."""
        follow = {False: '""', True: '""'}  # by whether a member came before
        if not path and self._may_have_more(tool):
            follow = {False: self._plain_keys_any_members(), True: '("," KEY ":" any)*'}
        found = members(schema, path, strict=tool.strict)
        for member in sorted(found, reverse=True, key=lambda member: member.name):
            value = self._plain_keys_value(member.schema, tool, member.path, depth)
            written = f"{self._mark(f'{member.name}:')} {value}"
            follow = {
                before: self._rule(
                    (f'"," {written}' if before else written)
                    + f" {follow[True]}"
                    + ("" if member.needed else f" | {follow[before]}")
                )
                for before in (False, True)
            }
        return follow[False]

    def _plain_keys_value(
        self, schema: Any, tool: Tool, path: str, depth: int, kinds: frozenset[str] = ALL_TYPES
    ) -> str:
        """Return the rule of a value of certain types."""
        try:
            return self._plain_keys_choice(schema, tool, path, depth, kinds)
        except SchemaError:
            if tool.strict:
                raise
            return self._plain_keys_any()

    def _plain_keys_choice(
        self, schema: Any, tool: Tool, path: str, depth: int, kinds: frozenset[str]
    ) -> str:
        root = tool.parameters
        schema = resolved(schema, root, path)
        if depth >= MAX_DEPTH:
            raise SchemaError(path, f"objects and lists are more than {MAX_DEPTH} deep")
        types = schema_types(schema, root) & kinds
        if not isinstance(schema, Mapping) or (
            types == ALL_TYPES and not any(limits(schema, kind, root) for kind in types)
        ):
            return self._plain_keys_any()
        choices = []
        for kind in sorted(types):
            if kind == "string":
                terminal = string_terminal(schema, root, path)
                choices.append(f"{self._mark(QUOTE)} {self._until(terminal, _End(QUOTE))}")
            elif kind in ("object", "array"):
                choices += self._plain_keys_nested(schema, kind, tool, path, depth)
            else:  # numbers and words are written as in JSON
                only = {**schema, "type": kind}
                rule = self._json(only, root=root, strict=tool.strict, path=path)
                choices.append(self._rule(rule))
        return self._rule(self._choice(choices))

    def _plain_keys_nested(
        self, schema: Mapping[str, Any], kind: str, tool: Tool, path: str, depth: int
    ) -> list[str]:
        """Return the rules of the objects or of the lists that a schema allows."""
        root = tool.parameters
        if not limits(schema, kind, root):
            inner, any_value = self._plain_keys_any_members(), self._plain_keys_any()
            if kind == "object":
                return [f'"{{" {inner} "}}"']
            return [f'"[" ({any_value} ("," {any_value})*)? "]"']
        for key in ("anyOf", "oneOf"):
            if not isinstance(parts := schema.get(key), list):
                continue
            if own := sorted(key for key in schema if key in TYPE_LIMITS[kind]):
                raise SchemaError(f"{path}/{own[0]}", f"it cannot be enforced beside `{key}`")
            fitting = [
                place for place, part in enumerate(parts) if kind in schema_types(part, root)
            ]
            if key == "oneOf" and len(fitting) > 1:
                raise SchemaError(f"{path}/oneOf", f"several choices of type {kind} in a `oneOf`")
            only = frozenset([kind])
            return [
                self._plain_keys_value(parts[at], tool, f"{path}/{key}/{at}", depth + 1, only)
                for at in fitting
            ]
        if kind == "array":
            return [self._plain_keys_list(schema, tool, path, depth)]
        rest = schema.get("additionalProperties")
        if not schema.get("properties") and rest is not False and "required" not in schema:
            list(members(schema, path, strict=tool.strict))  # refuses what cannot be enforced
            value = self._plain_keys_value(rest, tool, f"{path}/additionalProperties", depth + 1)
            self._plain_keys_any_members()  # has the terminal of keys
            member = f'KEY ":" {value}'
            return [f'"{{" ({member} ("," {member})*)? "}}"']
        return [f'"{{" {self._plain_keys_members(schema, tool, path, depth + 1)} "}}"']

    def _plain_keys_list(self, schema: Mapping[str, Any], tool: Tool, path: str, depth: int) -> str:
        known = ("items", "minItems", "maxItems")
        for key in sorted(key for key in schema if key not in known):
            if key in TYPE_LIMITS["array"] or key in (
                "enum",
                "const",
                "not",
                "if",
                "allOf",
                "$ref",
            ):
                raise SchemaError(f"{path}/{key}", f"`{key}` of a list cannot be enforced")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        item = self._plain_keys_value(schema.get("items"), tool, f"{path}/items", depth + 1)
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        if most == 1:
            more = ""
        inner = f"{item} {more}"
        return f'"[" {inner} "]"' if least else f'"[" ({inner})? "]"'

    def _plain_keys_any(self) -> str:
        """Return the rule of any value."""
        if not any(rule.startswith("any: ") for rule in self._rules):
            self._rules.append("any: ")  # the place of the rule, which refers to itself
            place = len(self._rules) - 1
            plain = self._rule(self._json({"type": ["number", "boolean", "null"]}, strict=True))
            inner = self._plain_keys_any_members()
            text = f"{self._mark(QUOTE)} {self._any_until(_End(QUOTE))}"
            self._rules[place] = (
                f'any: {text} | {plain} | "[" (any ("," any)*)? "]" | "{{" {inner} "}}"'
            )
        return "any"

    def _plain_keys_any_members(self) -> str:
        """Return the rule of any object's members."""
        if not any(rule.startswith("members: ") for rule in self._rules):
            self._rules.append('members: (KEY ":" any ("," KEY ":" any)*)?')
            self._rules.append("KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,99}/")
            self._plain_keys_any()
        return "members"


def _names_members(schema: Mapping[str, Any], *, strict: bool) -> bool:
    """Whether the `properties` of an object are taken for all members that it may have."""
    return (
        isinstance(schema.get("properties"), Mapping)
        and not any(key in schema for key in _MORE_MEMBERS)
        and (strict or not _unnamed_members(schema))
    )


def _unnamed_members(schema: Mapping[str, Any]) -> list[Any]:
    """Return the required members of an object that its `properties` do not name."""
    named, required = schema.get("properties"), schema.get("required")
    if (
        not isinstance(named, Mapping)
        or not isinstance(required, list)
        or "patternProperties" in schema
    ):
        return []
    return [name for name in required if not isinstance(name, str) or name not in named]


def _checked(schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return a schema that can be compiled; raise SchemaError if it cannot be."""
    if fault := find_fault(schema):
        shared = fault.path.startswith(("/$defs/", "/definitions/"))
        raise SchemaError(fault.path if shared else path + fault.path, fault.reason)
    return schema


@dataclass(frozen=True, slots=True)
class _End:
    """The end of an argument."""

    text: str  # the end mark, with the line breaks around it
    then: str = ""  # a rule of what may follow the mark
    line_break: bool = False  # the mark begins with a line break
