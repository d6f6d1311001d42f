"""Tools of a conversation: as clients give them, and as chat templates and the model see them."""

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from headroom.errors import RequestError
from headroom.text.conversation import (
    INPUT,
    Conversation,
    OutputFormat,
    Thinking,
    Tool,
    ToolChoice,
    as_tool,
    text_tool,
)

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}


def test_a_template_gets_a_tool_as_openai_writes_it() -> None:
    tool = Tool(name="read", description="Reads a file.", parameters=PARAMETERS, strict=True)
    assert tool.for_template() == {
        "type": "function",
        "function": {"name": "read", "description": "Reads a file.", "parameters": PARAMETERS},
    }


def test_a_template_gets_an_empty_object_for_a_tool_without_arguments() -> None:
    function = Tool(name="now").for_template()["function"]
    assert function["parameters"] == {"type": "object", "properties": {}}
    assert function["description"] == ""


def test_tools_are_equal_wherever_the_client_sent_them() -> None:
    assert Tool(name="read", param="tools[0]") == Tool(name="read", param="functions[3]")
    assert Tool(name="read", strict=True) != Tool(name="read")


@pytest.mark.parametrize(
    ("text", "fits"), [("a1", True), ("b22", True), ("a1 ", False), ("xa1", False), ("", False)]
)
def test_the_input_of_a_custom_tool_must_match_its_whole_expression(text: str, fits: bool) -> None:
    tool = text_tool("code", "Runs code.", regex="a1|b2+", param="tools[2].format")
    check = jsonschema.Draft202012Validator(tool.parameters)
    assert check.is_valid({INPUT: text}) == fits
    assert not check.is_valid({})
    assert not check.is_valid({INPUT: "a1", "more": 1})
    assert (tool.strict, tool.grammar, tool.param) == (True, "", "tools[2].format")
    assert tool.description == "Runs code."


def test_a_custom_tool_without_a_format_takes_any_text() -> None:
    tool = text_tool("note", "")
    assert jsonschema.Draft202012Validator(tool.parameters).is_valid({INPUT: "anything\n"})
    assert (tool.strict, tool.grammar, tool.param) == (False, "", "tools")


def test_the_model_is_told_the_grammar_of_a_custom_tool() -> None:
    lark = "start: /[a-z]+/"
    told = f"The input must match this Lark grammar:\n{lark}"
    tool = text_tool("word", "Takes a word.", lark=lark)
    assert tool.description == f"Takes a word.\n\n{told}"
    assert (tool.strict, tool.grammar) == (True, lark)
    assert text_tool("word", "", lark=lark).description == told


def test_a_tool_may_be_given_with_or_without_its_envelope() -> None:
    function = {"name": "read", "parameters": PARAMETERS, "strict": True}
    wanted = Tool(name="read", parameters=PARAMETERS, strict=True)
    assert as_tool(function) == as_tool({"type": "function", "function": function}) == wanted
    assert as_tool(wanted) is wanted
    bare = {"name": "now", "description": None, "parameters": None, "strict": None}
    assert as_tool(bare) == Tool(name="now")


@pytest.mark.parametrize(
    "given", [{}, {"function": 1}, {"function": {"name": 1}}, {"name": None}, "read"]
)
def test_what_names_no_function_is_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="not an object with the name of a function") as caught:
        as_tool(given)
    assert caught.value.param == "tools"
    assert '"function": {"name"' in caught.value.hint


@pytest.mark.parametrize(
    ("made", "param", "message"),
    [
        (lambda: ToolChoice(mode="read"), "tool_choice", "tool_choice is 'read'; it must be"),
        (lambda: ToolChoice(mode={"type": "function"}), "tool_choice", "tool_choice is {'type':"),
        (lambda: OutputFormat(kind="xml"), "response_format", "is of the kind 'xml'; it must be"),
        (lambda: Thinking(enabled="high"), "thinking", "thinking is 'high'; it must be true"),
        (
            lambda: Conversation(messages=[], output_format="json"),
            "output_format",
            "output_format is 'json', not an `OutputFormat`",
        ),
        (lambda: Conversation(messages="hi"), "messages", "are not a list of messages"),
        (lambda: Conversation(messages=["hi"]), "messages", "are not a list of messages"),
        (
            lambda: Conversation(messages=[], tool_choice=ToolChoice(mode="required")),
            "tool_choice",
            "there are no tools",
        ),
    ],
)
def test_a_wrong_value_is_refused_when_it_is_given(
    made: Callable[[], object], param: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        made()
    assert caught.value.param == param


@pytest.mark.parametrize(("length", "shown"), [(38, "x" * 38 + "'"), (39, "x" * 39 + "...")])
def test_a_wrong_value_is_shown_up_to_40_characters(length: int, shown: str) -> None:
    with pytest.raises(RequestError) as caught:
        ToolChoice(mode="x" * length)  # type: ignore[arg-type]
    assert f"tool_choice is '{shown}; it must be" in caught.value.message
