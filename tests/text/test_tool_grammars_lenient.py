"""Required calls of tools that are not strict: what no grammar enforces is left free."""

import json
import random
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field

from headroom.errors import RequestError
from headroom.text.answer_limits import compile_chat
from headroom.text.answer_parser import join_calls
from headroom.text.conversation import Conversation, OutputFormat, Tool, ToolChoice
from headroom.text.grammar import GrammarCompiler
from headroom.text.tool_formats import find_tool_format
from tests.text.test_schema_faults import BAD, DEFS, EMPTY, UNKNOWN
from tests.text.test_tool_grammars import Walker, parse
from tests.text.test_tool_grammars_strict import call_of, called
from tests.text.tool_models import NATIVE_MODELS, TOOL_MODELS, tool_template, tool_tokenizer

REQUIRED = ToolChoice(mode="required")
JSON_MODELS = [model for model in NATIVE_MODELS if "json" in Walker(model).form.name]
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}},
    "required": ["v"],
    "additionalProperties": False,
}
GOOD = Tool(name="g", parameters={"type": "object", "properties": {"w": {"type": "string"}}})


@cache
def compiler(model: str) -> GrammarCompiler:
    tokenizer = tool_tokenizer(model)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def takes(model: str, tools: list[Tool], arguments: Any, choice: ToolChoice = REQUIRED) -> bool:
    """Whether the compiled grammar of a chat takes a call as the model's template writes it."""
    form = find_tool_format(tool_tokenizer(model), tool_template(model))
    chat = Conversation(messages=(), tools=tuple(tools), tool_choice=choice)
    grammar = compile_chat(compiler(model), chat, form, after_thought=False)
    assert grammar is not None
    tokens = compiler(model).tokenizer.encode(call_of(model, arguments))
    return grammar.count_matching(tokens) == len(tokens) and grammar.after(tokens).begin().may_end


def tool(parameters: Any, **more: Any) -> Tool:
    return Tool(name="f", parameters=parameters, param="tools[0].function.parameters", **more)


def one(part: Any) -> Tool:
    """Return a tool with an argument of a schema."""
    return tool(
        {
            "type": "object",
            "properties": {"a": part, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "$defs": DEFS,
        }
    )


@pytest.mark.parametrize("model", JSON_MODELS)
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_part_that_no_grammar_enforces_is_free_in_json(model: str, name: str) -> None:
    part, good, bad = UNKNOWN[name]
    for tools in ([one(part)], [GOOD, one(part)]):
        for value in good:
            assert takes(model, tools, {"a": value, "b": 1}), value
            assert not takes(model, tools, {"a": value, "b": "1"}), value
        for value in bad:
            assert not takes(model, tools, {"a": value, "b": 1}), value


@pytest.mark.parametrize("model", NATIVE_MODELS)
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_part_that_no_grammar_enforces_is_free_in_every_format(model: str, name: str) -> None:
    part, good, _ = UNKNOWN[name]
    if model == "gemma4":  # in its format, inner objects have only members of their `properties`
        named = part.get("properties")
        good = [value for value in good if not named or value.keys() <= named.keys()]
    for value in good:
        assert takes(model, [GOOD, one(part)], {"a": value, "b": 1}), value
        assert not takes(model, [GOOD, one(part)], {"a": value, "b": "x"}), value


@pytest.mark.parametrize("model", JSON_MODELS)
@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_part_that_is_wrong_is_free_in_json(model: str, number: int) -> None:
    part, values = BAD[number]
    for value in values:
        assert takes(model, [one(part), GOOD], {"a": value, "b": 1}), value


@pytest.mark.parametrize("model", TOOL_MODELS)
def test_any_schema_can_be_compiled_in_any_format(model: str) -> None:
    form = find_tool_format(tool_tokenizer(model), tool_template(model))
    parts = [part for part, *_ in [*BAD, *EMPTY, *UNKNOWN.values()]]
    for root in [*map(one, parts), *map(tool, filter(None, parts))]:
        if not isinstance(root.parameters, dict):
            continue
        for choice in (REQUIRED, ToolChoice(mode="required", name="f")):
            chat = Conversation(messages=(), tools=(root, GOOD), tool_choice=choice)
            assert compile_chat(compiler(model), chat, form, after_thought=False)


class Cat(BaseModel):
    """A choice of a discriminated union, whose field has a default, so that it is not required."""

    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    """The other choice, which contains the union."""

    kind: Literal["dog"] = "dog"
    friends: "list[Annotated[Cat | Dog, Field(discriminator='kind')]]"


class Owner(BaseModel):
    """A class as users of instructor and langchain write it."""

    names: set[str]
    pet: Cat | Dog = Field(discriminator="kind")
    ages: dict[Annotated[str, Field(pattern="^[a-z]+$")], int]


@pytest.mark.parametrize("model", NATIVE_MODELS)
def test_a_class_with_a_set_and_a_discriminated_union_is_a_tool(model: str) -> None:
    cat, asked = {"kind": "cat", "lives": 9}, [tool(Owner.model_json_schema())]
    good = {"names": ["x"], "pet": {"kind": "dog", "friends": [cat]}, "ages": {"x": 1}}
    assert takes(model, asked, good)
    assert Owner.model_validate(good)
    assert not takes(model, asked, {**good, "names": "x"})
    if model in JSON_MODELS:  # other formats do not enforce all choices of objects
        assert not takes(model, asked, {**good, "pet": {"lives": 9}})
        assert not takes(model, asked, {**good, "pet": {"kind": "cat", "friends": [cat]}})


UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


@pytest.mark.parametrize("model", NATIVE_MODELS)
def test_a_set_of_strings_is_written_as_a_list(model: str) -> None:
    assert takes(model, [one(UNIQUE)], {"a": ["x", "y"], "b": 1})
    assert not takes(model, [one(UNIQUE)], {"a": ["x", "y"], "b": "z"})


@pytest.mark.parametrize("model", NATIVE_MODELS)
@pytest.mark.parametrize(
    ("parameters", "good"),
    [
        ({"$ref": "#/$defs/N", "$defs": {"N": NODE}}, [{"v": 1}]),
        ({"type": "object", "$ref": "#/$defs/N", "$defs": {"N": NODE}}, [{"v": 1}]),
        ({"allOf": [NODE]}, [{"v": 1}]),
        ({"anyOf": [NODE, {"type": "object", "required": ["w"]}]}, [{"v": 1}, {"w": 1}]),
        ({"oneOf": [NODE, {**NODE, "required": []}]}, [{"v": 1}]),
        ({"properties": {"v": {"type": "integer"}}, "required": ["v", "w"]},
         [{"v": 1}, {"v": 1, "w": 2}]),
        ({"type": "object", "minProperties": 1}, [{"v": 1}]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"v": 1}]),
        ({**NODE, "minProperties": 1}, [{"v": 1}]),
        ({"properties": None, "required": None, "type": None}, [{}, {"v": 1}]),
        ({"type": "OBJECT", "properties": {"v": {"type": "INTEGER"}}}, [{"v": 1}]),
        ({"properties": {"v": {}}, "if": {"required": ["v"]}, "then": {"required": ["w"]}},
         [{"v": 1, "w": 2}, {"w": 3}]),
        ({"properties": {"v": {"type": "integer"}},
          "anyOf": [{"required": ["v"]}, {"required": ["w"]}]}, [{"v": 1}, {"v": 1, "w": 1}]),
    ],
)  # fmt: skip
def test_arguments_of_any_shape_may_be_written(
    model: str, parameters: Any, good: list[Any]
) -> None:
    for arguments in good:
        assert takes(model, [tool(parameters)], arguments), arguments
        assert takes(model, [GOOD, tool(parameters)], arguments), arguments


@pytest.mark.parametrize("model", NATIVE_MODELS)
@pytest.mark.parametrize("strict", [False, True])
def test_an_object_behind_a_reference_is_enforced(model: str, strict: bool) -> None:
    linked = {
        "type": "object",
        "properties": {"v": {"type": "string"}, "n": {"$ref": "#/$defs/M"}},
        "required": ["v"],
        "additionalProperties": False,
    }
    defs = {"N": linked, "M": NODE}
    referred = tool({"$ref": "#/$defs/N", "$defs": defs}, strict=strict)
    for arguments in ({"v": "x"}, {"v": "12"}, {"v": "x", "n": {"v": 1}}):
        assert takes(model, [referred], arguments)
        (call,) = join_calls(parse(Walker(model).form, [referred], call_of(model, arguments)).calls)
        assert json.loads(call.arguments) == arguments
    for wrong in ({}, {"n": {"v": 1}}, {"v": "x", "n": {"v": "y"}}, {"v": "x", "w": 1}):
        assert not takes(model, [referred], wrong), wrong


@pytest.mark.parametrize("model", JSON_MODELS)
@pytest.mark.parametrize("key", ["allOf", "anyOf", "oneOf"])
def test_a_strict_root_may_be_a_choice_in_json(model: str, key: str) -> None:
    chosen = tool({key: [NODE]}, strict=True)
    assert takes(model, [chosen], {"v": 1})
    assert not takes(model, [chosen], {"v": "x"})
    assert not takes(model, [chosen], {})


@pytest.mark.parametrize("model", JSON_MODELS)
def test_a_schema_may_refer_to_itself_in_json(model: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}},
        "required": ["v"],
        "additionalProperties": False,
    }
    for strict in (False, True):
        chain = tool(parameters, strict=strict)
        assert takes(model, [chain], {"v": 1, "next": {"v": 2, "next": {"v": 3}}})
        assert not takes(model, [chain], {"v": 1, "next": {"next": {"v": 3}}})


@pytest.mark.parametrize("model", JSON_MODELS)
@pytest.mark.parametrize(
    ("parameters", "path", "reason"),
    [
        ({"properties": {"a": UNIQUE}}, "at /properties/a", "`uniqueItems` cannot be enforced"),
        ({"properties": {"a": {}}, "required": ["b"]}, "at /required",
         "`properties` does not have the required member 'b'"),
        ({"properties": {"a": {"type": "any"}}}, "at /properties/a", "Invalid type: any"),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"not": {}}}}, "at /$defs/n",
         "`not` cannot be enforced"),
        ({"oneOf": [NODE, NODE]}, "at its root", "the choices of `oneOf` do not exclude each"),
        ({"properties": None}, "at its root", "properties must be an object"),
        ({"$ref": "#"}, "at its root", "a reference leads back to itself"),
    ],
)  # fmt: skip
def test_a_strict_tool_is_refused_with_its_name_the_path_and_a_plain_reason(
    model: str, parameters: Any, path: str, reason: str
) -> None:
    lenient = replace(one(UNIQUE), name="h")
    with pytest.raises(RequestError) as caught:
        takes(model, [GOOD, lenient, tool(parameters, strict=True)], {}, ToolChoice())
    message = caught.value.message
    assert "The schema of the tool 'f'" in message
    assert f", {path}: {reason}" in message
    assert len(message.splitlines()) == 1
    assert "%json" not in message
    assert "coerce" not in message
    assert caught.value.param == "tools[0].function.parameters"


def test_a_wrong_format_beside_good_tools_is_what_is_refused() -> None:
    model = JSON_MODELS[0]
    form = find_tool_format(tool_tokenizer(model), tool_template(model))
    wanted = OutputFormat(kind="json_schema", value={"uniqueItems": True})
    chat = Conversation(messages=(), tools=(GOOD, one(UNIQUE)), output_format=wanted)
    with pytest.raises(RequestError, match="The JSON schema cannot be used") as caught:
        compile_chat(compiler(model), chat, form, after_thought=False)
    assert caught.value.param == "response_format"


def test_calls_whose_grammar_is_too_large_are_refused_without_it() -> None:
    model = JSON_MODELS[0]
    names = [f"{'long' * 2000}{place}" for place in range(20)]
    tools = [
        replace(GOOD, name=f"g{at}", parameters={"properties": {name: {}}})
        for at, name in enumerate(names * 2)
    ]
    with pytest.raises(RequestError, match="The grammar of the tool calls has 3") as caught:
        takes(model, tools, {})
    assert caught.value.param == "tools"


@pytest.mark.parametrize("model", TOOL_MODELS)
def test_random_calls_match_what_is_enforced_of_mixed_arguments(model: str) -> None:
    walker, dice, ended = Walker(model), random.Random(model), 0
    known: dict[str, Any] = {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "s": {"type": "string", "maxLength": 4},
        "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    }
    bad = [part for part, _ in BAD if part is not None]
    for _ in range(8):
        properties = {**known, "z": dice.choice(bad)}
        needed = dice.sample(sorted(known), dice.randint(0, 3))
        mixed = tool({"properties": properties, "required": needed, "$defs": DEFS})
        if (arguments := called(walker, mixed, dice)) is not None:
            jsonschema.validate(
                {name: value for name, value in arguments.items() if name in known},
                {"properties": known, "required": needed},
            )
            assert arguments.keys() <= properties.keys()
            ended += 1
    assert ended > 2
