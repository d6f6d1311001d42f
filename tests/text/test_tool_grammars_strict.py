"""Strict tools: random calls under the grammar have arguments that match the schema."""

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from headroom.errors import RequestError
from headroom.text.answer_parser import join_calls
from headroom.text.conversation import Tool, ToolChoice, text_tool
from headroom.text.plain_values import MAX_DEPTH
from headroom.text.tool_grammars import tool_grammar
from tests.text.matching import accepts
from tests.text.test_tool_grammars import Walker, parse
from tests.text.tool_models import NATIVE_MODELS, TOOL_MODELS, rendered_answer

PLAIN_MODELS = ("qwen35", "laguna", "laguna_control", "gemma4")  # strings stand as they are
# Marks that end arguments, and those that a text may contain or must not.
MARKUP = (
    *(
        "\n</parameter>\n",
        "</parameter>",
        "</parameter>\n</function>",
        "</parameter> <parameter=a>",
    ),
    *("</arg_value>\n", "</arg_value>", "</arg_value><arg_key>", '<|"|>', '"', "}", "\n", "null"),
    *("</arg_value>\n</tool_call>", "true", "False", "12", "[", '{"a": "', " 7", "c", "*** End"),
    *("\r\n", "+", "\\n"),
)
ONCE = ToolChoice(mode="required", name="f")
NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
# Schemas of one argument, of every kind that a strict tool may have.
STRINGS: dict[str, Any] = {
    "plain": {"type": "string"},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}$"},
    "search": {"type": "string", "pattern": "[0-9]<", "maxLength": 6},
    "alternatives": {"type": "string", "pattern": "^a+$|^b|c$"},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "empty": {"type": "string", "maxLength": 0},
    "list": {"type": "string", "enum": ["a", "</parameter>", "é\n", ""]},
    "const": {"const": "only\r\n"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "choice": {"anyOf": [{"type": "string", "pattern": "^x"}, {"enum": ["a", "b"]}]},
    "all": {"allOf": [{"type": "string", "pattern": "^a"}, {"maxLength": 3}, {"minLength": 2}]},
    "reference": {"$ref": "#/$defs/code"},
    "limited": {"$ref": "#/$defs/code", "maxLength": 2},
    "carriage": {"type": "string", "pattern": "^[\\r\\n]*$", "minLength": 1, "maxLength": 3},
}
MIXED: dict[str, Any] = {
    "nullable": {"type": ["string", "null"], "pattern": "^[a-z]{1,3}$"},
    "number": {"type": ["string", "integer"], "maxLength": 3},
    "bounded": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5, "maximum": 20}]},
    "truth": {"anyOf": [{"type": "string", "maxLength": 5}, {"const": True}]},
    "strings": {
        "anyOf": [
            {"type": "string", "maxLength": 4},
            {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
        ]
    },
    "object": {
        "anyOf": [
            {"type": "string", "maxLength": 4},
            {
                "type": "object",
                "properties": {"a": {"type": "string", "pattern": "^b*$"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        ]
    },
    "values": {"enum": ["a", 1, True, None, "1", 2.5]},
    "untyped": {"minLength": 2, "maxLength": 4},
    "anything": {},
}
OTHERS: dict[str, Any] = {
    "integer": {"type": "integer", "minimum": -3, "maximum": 30},
    "boolean": {"type": "boolean"},
    "list": {
        "type": "array",
        "items": {"type": "string", "pattern": "^[ab]*$", "maxLength": 3},
        "minItems": 1,
        "maxItems": 3,
    },
    "inner": {
        "type": "object",
        "properties": {
            "code": {"$ref": "#/$defs/code"},
            "more": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "required": ["code"],
        "additionalProperties": False,
    },
}
DEFS = {"code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]?$"}}
# In JSON, llguidance knows no oneOf of strings.
ONE = {
    "oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}],
    "maxLength": 4,
}
ALL = [*STRINGS.items(), *MIXED.items(), *OTHERS.items()]


def strict(**properties: Any) -> Tool:
    return Tool(
        name="f",
        strict=True,
        parameters={
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
            "$defs": DEFS,
        },
    )


def called(walker: Walker, tool: Tool, dice: random.Random, most: int = 1500) -> Any:
    """Return the arguments of one random call; None if it does not end."""
    grammar = tool_grammar(walker.form, [tool], ONCE)
    assert grammar is not None
    answer = walker.walk(grammar, dice, most, MARKUP)
    if answer is None:
        return None
    parts = parse(walker.form, [tool], answer)
    assert parts.text == "", answer
    (call,) = join_calls(parts.calls)
    return json.loads(call.arguments)


def check_schemas(model: str, rounds: int) -> None:
    walker, dice = Walker(model), random.Random(model)
    validator, finished = jsonschema.Draft202012Validator, 0
    only = [("one", ONE)] if model in PLAIN_MODELS else []
    for name, schema in [*ALL, *only]:
        tool, ended = strict(a=schema), 0
        for _ in range(rounds):
            if (arguments := called(walker, tool, dice)) is not None:
                # llguidance's own formats, in JSON, take the 29th of February of any year.
                formats = validator.FORMAT_CHECKER if model in PLAIN_MODELS else None
                check = validator(tool.parameters, format_checker=formats)
                assert check.is_valid(arguments), (name, arguments)
                ended += 1
        finished += ended > 0
    assert finished > len(ALL) * 0.6  # a random text at times does not come to its end


@pytest.mark.parametrize("model", PLAIN_MODELS)
def test_an_argument_matches_its_schema(model: str) -> None:
    check_schemas(model, 2)


@pytest.mark.slow
@pytest.mark.parametrize("model", TOOL_MODELS)
def test_many_arguments_match_their_schema(model: str) -> None:
    check_schemas(model, 100)


def random_schema(dice: random.Random, depth: int = 0) -> Any:
    """Return a schema that is put together from the ones above."""
    kind = dice.random()
    if kind < 0.6 or depth > 1:
        return dice.choice(ALL)[1]
    if kind < 0.8:
        names = dice.sample(["x", "y", "z"], dice.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(dice, depth + 1) for name in names},
            "required": dice.sample(names, dice.randint(0, len(names))),
            "additionalProperties": False,
        }
    least = dice.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(dice, depth + 1),
        "minItems": least,
        "maxItems": least + dice.randint(0, 2),
    }


def check_random(model: str, rounds: int) -> None:
    walker, dice = Walker(model), random.Random(model)
    ended = 0
    for _ in range(rounds):
        names = dice.sample(["a", "b-c", "d_e"], dice.randint(1, 3))
        tool = strict(**{name: random_schema(dice) for name in names})
        needed = dice.sample(names, dice.randint(0, len(names)))
        tool = replace(tool, parameters={**tool.parameters, "required": needed})
        if (arguments := called(walker, tool, dice)) is not None:
            jsonschema.validate(arguments, tool.parameters)
            ended += 1
    assert ended > rounds / 4


@pytest.mark.parametrize("model", PLAIN_MODELS)
def test_random_schemas_are_matched(model: str) -> None:
    check_random(model, 15)


@pytest.mark.slow
@pytest.mark.parametrize("model", PLAIN_MODELS)
def test_many_random_schemas_are_matched(model: str) -> None:
    check_random(model, 600)


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
ONE_OF_THREE = {
    "oneOf": [
        {"type": "string", "maxLength": 3},
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"type": "array", "items": {"type": "integer"}, "maxItems": 1},
    ]
}


@pytest.mark.parametrize("model", NATIVE_MODELS)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (STRINGS["pattern"], ["ab", "abca"], ["a", "abd", "abcab"]),
        (STRINGS["lengths"], ["ab", "日本語é"], ["a", "abcde"]),
        (STRINGS["date"], ["2024-02-29", "1999-12-31"], ["2023-02-30", "1999-13-01", ""]),
        (STRINGS["choice"], ["a", "xyz\n"], ["c", "ax"]),
        (MIXED["nullable"], ["ab"], ["ABC", "null "]),
        (MIXED["bounded"], ["ab", 5, 20], [4, 21]),
        (MIXED["strings"], ["ab", ["ab", "c"]], ["abcde", ["a", "b", "c"], ["abc"]]),
        (OTHERS["list"], [["a"], ["a", "bab"]], [[], ["c"], ["a"] * 4]),
        (ONE_OF_THREE, ["ab", {"a": 1}, [2]], ["abcd", {"b": 1}, {}, [1, 2], ["a"]]),
        (OPEN, [{"a": 1}, {}], [{"a": "x"}]),
    ],
)  # fmt: skip
def test_calls_of_the_template_are_taken_if_they_match(
    model: str, schema: Any, good: list[Any], bad: list[Any]
) -> None:
    walker = Walker(model)
    grammar = tool_grammar(walker.form, [strict(a=schema)], ToolChoice(mode="required"))
    assert grammar is not None
    for values, fits in ((good, True), (bad, False)):
        for value in values:
            assert walker.accepts(grammar, call_of(model, {"a": value})) == fits, value


def call_of(model: str, arguments: dict[str, Any]) -> str:
    function = {"name": "f", "arguments": arguments}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    return rendered_answer(model, {"role": "assistant", "content": "", "tool_calls": [call]})


@pytest.mark.parametrize("model", ["laguna", "laguna_control"])
def test_line_breaks_between_argument_tags_may_be_left_out(model: str) -> None:
    walker = Walker(model)
    tool = strict(a=STRINGS["pattern"], b=OTHERS["list"])
    grammar = tool_grammar(walker.form, [tool], ONCE)
    assert grammar is not None
    written = call_of(model, {"a": "ab", "b": ["a"]}).strip()
    assert "\n" in written
    for answer in (written, written.replace("\n", "")):
        assert walker.accepts(grammar, answer)
        (call,) = join_calls(parse(walker.form, [tool], answer).calls)
        assert json.loads(call.arguments) == {"a": "ab", "b": ["a"]}


NESTED_ONE = {"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object"}]}


@pytest.mark.parametrize(
    ("models", "schema", "path"),
    [
        (PLAIN_MODELS, {"type": "string", "not": {"const": "a"}}, "/properties/a/not"),
        (PLAIN_MODELS, {"type": "string", "pattern": "(?=a)b"}, "/properties/a/pattern"),
        (PLAIN_MODELS, {"type": "string", "pattern": "(a^|b)c"}, "/properties/a/pattern"),
        (PLAIN_MODELS, {"type": "string", "minLength": -1}, "/properties/a/minLength"),
        (PLAIN_MODELS, {"type": "string", "$ref": "#/$defs/none"}, "/properties/a/$ref"),
        (PLAIN_MODELS[:3], {"enum": ["1", 2], "pattern": "1"}, "/properties/a/pattern"),
        (["gemma4"], {"type": "array", "uniqueItems": True}, "/properties/a/uniqueItems"),
        (["gemma4"], {"type": "object", "minProperties": 1}, "/properties/a/minProperties"),
        (["gemma4"], NESTED_ONE, "/properties/a/oneOf"),
        (["gemma4"], {"enum": [["x"]]}, "/properties/a/enum"),
    ],
)
def test_what_no_grammar_can_hold_is_refused_with_its_path(
    models: list[str], schema: Any, path: str
) -> None:
    tool = replace(strict(a=schema), param="tools[0].function.parameters")
    for model in models:
        with pytest.raises(RequestError, match="of the tool 'f' cannot be enforced") as caught:
            tool_grammar(Walker(model).form, [tool], ToolChoice())
        assert f" at {path}: " in caught.value.message
        assert caught.value.param == "tools[0].function.parameters"
        lenient = replace(tool, strict=False)
        if "$ref" not in schema:
            assert tool_grammar(Walker(model).form, [lenient], ToolChoice(mode="required"))


@pytest.mark.parametrize("model", sorted({*NATIVE_MODELS} - {*PLAIN_MODELS}))
def test_a_strict_tool_whose_calls_are_json_is_held_to_its_whole_schema(model: str) -> None:
    tool = strict(a={"type": "array", "uniqueItems": True})
    with pytest.raises(RequestError, match="uniqueItems"):
        tool_grammar(Walker(model).form, [tool], ONCE)
    assert tool_grammar(Walker(model).form, [replace(tool, strict=False)], ONCE)


@pytest.mark.parametrize("model", PLAIN_MODELS)
@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "/anyOf"),
        ({"minProperties": 1}, "/minProperties"),
        ({"required": ["b"]}, "/required"),
        ({"properties": {"a>b": {}}, "required": ["a>b"]}, "/required"),
    ],
)
def test_arguments_that_no_grammar_can_hold_are_refused(
    model: str, more: dict[str, Any], path: str
) -> None:
    tool = strict(a={"type": "string"})
    tool = replace(tool, parameters={**tool.parameters, **more})
    with pytest.raises(RequestError, match=f" at {path}: "):
        tool_grammar(Walker(model).form, [tool], ToolChoice())


PATCH = r"""
start: "*** Begin" LF file+ "*** End" LF?
file: "*** File: " /(.+)/ LF ("+" /(.*)/ LF -> add)+
%import common.LF
"""
SUMS = r"""
start: sum
sum: sum "+" atom | atom
atom: /[0-9]{1,3}/ | "(" sum ")"
%ignore /[ \n]/
"""
TEXTS = {
    PATCH: ('*** Begin\n*** File: a "b"\\c\n+x\ty\n+\n*** End\n', "*** Begin\n*** End"),
    SUMS: ("(1 +\n 2) + 34", "(1 + 2"),
}
OTHER = Tool(name="g", parameters={"type": "object", "properties": {"b": {"type": "string"}}})


@pytest.mark.parametrize("model", TOOL_MODELS)
@pytest.mark.parametrize("lark", [PATCH, SUMS])
def test_the_text_of_a_custom_tool_matches_its_lark_grammar(model: str, lark: str) -> None:
    walker, dice = Walker(model), random.Random(model)
    tool, ended = text_tool("f", "Takes a text.", lark=lark), 0
    for _ in range(6):
        if (arguments := called(walker, tool, dice, 800)) is not None:
            assert accepts('%llguidance {"allow_initial_skip": true}\n' + lark, arguments["input"])
            ended += 1
    assert ended


@pytest.mark.parametrize("model", NATIVE_MODELS)
@pytest.mark.parametrize("lark", [PATCH, SUMS])
def test_a_call_of_the_template_with_a_text_of_the_grammar_is_taken(model: str, lark: str) -> None:
    walker = Walker(model)
    good, bad = TEXTS[lark]
    for tools in ([text_tool("f", "", lark=lark)], [OTHER, text_tool("f", "", lark=lark)]):
        for mode in ("required", "auto"):
            grammar = tool_grammar(walker.form, tools, ToolChoice(mode=mode))  # type: ignore[arg-type]
            assert grammar is not None
            assert walker.accepts(grammar, call_of(model, {"input": good}))
            assert not walker.accepts(grammar, call_of(model, {"input": bad}))


@pytest.mark.parametrize("model", NATIVE_MODELS)
def test_a_grammar_that_cannot_stand_in_a_call_is_refused_by_the_name_of_its_tool(
    model: str,
) -> None:
    tool = text_tool("shell", "", lark="start: <|end|>", param="tools[0].custom.format")
    with pytest.raises(RequestError, match=r"'shell' cannot be used: <\|end\|>") as caught:
        tool_grammar(Walker(model).form, [tool], ToolChoice())
    assert caught.value.param == "tools[0].custom.format"


@pytest.mark.parametrize("least", [0, 1, 2, 3])
@pytest.mark.parametrize("most", [None, 0, 1, 2, 3])
def test_a_list_in_gemma_s_calls_has_as_many_items_as_its_schema_says(
    least: int, most: int | None
) -> None:
    walker = Walker("gemma4")
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": least}
    if most is not None:
        if most < least:
            return
        schema["maxItems"] = most
    for strict_tool in (True, False):
        tool = replace(strict(a=schema), strict=strict_tool)
        grammar = tool_grammar(walker.form, [tool], ONCE)
        assert grammar is not None
        for count in range(6):
            fits = least <= count and (most is None or count <= most)
            answer = call_of("gemma4", {"a": list(range(count))})
            assert walker.accepts(grammar, answer) == fits, count


@pytest.mark.parametrize("model", NATIVE_MODELS)
def test_arguments_that_are_not_required_may_be_left_out(model: str) -> None:
    walker = Walker(model)
    tool = strict(a={"type": "integer"}, b={"type": "integer"}, c={"type": "integer"})
    for needed in ([], ["b"], ["a", "c"]):
        asked = replace(tool, parameters={**tool.parameters, "required": needed})
        grammar = tool_grammar(walker.form, [asked], ONCE)
        assert grammar is not None
        for size in range(4):
            for names in itertools.combinations("abc", size):
                answer = call_of(model, dict.fromkeys(names, 1))
                assert walker.accepts(grammar, answer) == ({*needed} <= {*names}), names


def nested_lists(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_values_in_gemma_s_calls_are_enforced_to_a_depth() -> None:
    walker = Walker("gemma4")
    assert tool_grammar(walker.form, [strict(a=nested_lists(MAX_DEPTH - 1))], ONCE)
    with pytest.raises(RequestError, match=f"more than {MAX_DEPTH} deep"):
        tool_grammar(walker.form, [strict(a=nested_lists(MAX_DEPTH))], ONCE)


@pytest.mark.parametrize(
    ("model", "mark"), [("qwen35", "</parameter>"), ("laguna", "</arg_value>")]
)
def test_the_text_of_a_grammar_that_refers_to_itself_never_has_the_end_mark(
    model: str, mark: str
) -> None:
    walker = Walker(model)
    tool = text_tool("f", "", lark='start: "(" start ")" | /[^()]+/')
    grammar = tool_grammar(walker.form, [tool], ToolChoice(mode="required"))
    assert grammar is not None
    for text, fits in (("((a b))", True), ("(a", False), (f"((a {mark} b))", False), (mark, False)):
        assert walker.accepts(grammar, call_of(model, {"input": text})) == fits, text
