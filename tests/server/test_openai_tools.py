"""Tools in chat bodies: what reaches the model, and what is refused by name."""

from typing import Any

import pytest

from headroom.server.openai_tools import ToolFields
from headroom.server.refusals import RefusalError
from headroom.text.conversation import Tool, ToolChoice

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TWO = [function("weather", description="The weather.", parameters=SCHEMA), function("time")]


def read(**body: Any) -> tuple[tuple[Tool, ...], ToolChoice]:
    fields = ToolFields.model_validate(body)
    offer = fields.tool_offer(fields.offered_tools())
    return offer.tools, offer.choice


def test_tools_come_with_their_schema_and_strictness() -> None:
    tools, choice = read(tools=[*TWO, function("strict-one", parameters=SCHEMA, strict=True)])
    assert tools == (
        Tool(name="weather", description="The weather.", parameters=SCHEMA),
        Tool(name="time"),
        Tool(name="strict-one", parameters=SCHEMA, strict=True),
    )
    assert choice == ToolChoice(mode="auto", name=None, parallel=True)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(mode="none")),
        ("required", ToolChoice(mode="required")),
        ("any", ToolChoice(mode="required")),
        (function("time"), ToolChoice(mode="required", name="time")),
    ],
)
def test_a_choice_says_whether_and_what_must_be_called(given: Any, choice: ToolChoice) -> None:
    tools, read_choice = read(tools=TWO, tool_choice=given)
    assert [tool.name for tool in tools] == ["weather", "time"]
    assert read_choice == choice


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones_that_the_model_hears_of(mode: str) -> None:
    allowed = {"mode": mode, "tools": [function("time")]}
    tools, choice = read(tools=TWO, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [tool.name for tool in tools] == ["time"]
    assert choice.mode == mode


def test_parallel_calls_can_be_switched_off() -> None:
    assert read(tools=TWO, parallel_tool_calls=False)[1] == ToolChoice(parallel=False)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice(parallel=False)),
        ("none", ToolChoice(mode="none", parallel=False)),
        ({"name": "time"}, ToolChoice(mode="required", name="time", parallel=False)),
    ],
)
def test_older_functions_are_tools_of_which_one_is_called(given: Any, choice: ToolChoice) -> None:
    functions = [tool["function"] for tool in TWO]
    tools, read_choice = read(functions=functions, function_call=given)
    assert tools == read(tools=TWO)[0]
    assert read_choice == choice


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_choice_that_asks_for_nothing_needs_no_tools(choice: Any) -> None:
    assert read(tool_choice=choice)[0] == ()


ALLOWED = {"type": "allowed_tools"}
FIELD = "tool_choice.allowed_tools"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [function("f"), function("f")]}, "tools[1].function.name"),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
        ({"tools": TWO, "functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TWO, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TWO, "tool_choice": 5}, "tool_choice"),
        ({"tools": TWO, "tool_choice": {"type": "custom"}}, "tool_choice.custom.name"),
        ({"tools": TWO, "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": TWO, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": TWO, "tool_choice": function("f")}, "tool_choice.function.name"),
        ({"tools": TWO, "tool_choice": ALLOWED}, FIELD),
        ({"tools": TWO, "tool_choice": {**ALLOWED, "allowed_tools": {"tools": []}}},
         f"{FIELD}.tools"),
        ({"tools": TWO, "tool_choice": {
            **ALLOWED, "allowed_tools": {"tools": [function("f")]}}},
         f"{FIELD}.tools[0].function.name"),
        ({"tools": TWO, "tool_choice": {
            **ALLOWED, "allowed_tools": {"mode": "none", "tools": [function("time")]}}},
         f"{FIELD}.mode"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": 5}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_made_is_refused_by_its_field(
    body: dict[str, Any], param: str
) -> None:
    with pytest.raises(RefusalError) as caught:
        read(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_tool_that_is_missing_is_named_with_those_that_there_are() -> None:
    with pytest.raises(RefusalError, match="no tool 'f'; the tools are: weather, time"):
        read(tools=TWO, tool_choice=function("f"))
