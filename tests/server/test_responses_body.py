"""The body of /v1/responses: what is refused, by the name of the field."""

from typing import Any

import httpx
import pytest

from tests.server.fakes import FakeLLM
from tests.server.test_responses import PATCH, WEATHER, ask, refusal

USER = {"role": "user", "content": "hi"}
SPACE = {"type": "namespace", "name": "sky", "tools": [WEATHER]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"role": "boss", "content": "hi"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": [USER, {"role": "user", "content": ["hi"]}]}, "input[1].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "x"}]},
            "input[0]",
        ),
        ({"instructions": 7}, "instructions"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{**WEATHER, "name": "two words"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "parameters": "{}"}]}, "tools[0].parameters"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
        ({"tools": [{"type": "file_search"}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools[0]"),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice.name",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "none"}},
            "tool_choice.mode",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": []}},
            "tool_choice.tools",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": ["x"]}},
            "tool_choice.tools[0].name",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "web_search"}],
                },
            },
            "tool_choice.tools",
        ),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": "much"}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"metadata": {"a": 7}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"truncation": "middle"}, "truncation"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"n": 2}, "n"),
        ({"messages": [USER]}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_wrong_field_is_named(shared: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert refusal(shared, **body)[0] == param


def test_a_forced_call_goes_before_a_format(client: httpx.Client, llm: FakeLLM) -> None:
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    named = {"type": "function", "name": "weather"}
    ask(client, tools=[WEATHER], tool_choice=named, text={"format": form})
    chat = llm.chats[-1]
    assert (chat.tool_choice.mode, chat.tool_choice.name) == ("required", "weather")
    assert chat.output_format is None
    ask(client, tools=[WEATHER], text={"format": form})
    chat = llm.chats[-1]
    assert chat.output_format is not None
    assert (chat.output_format.kind, chat.output_format.value) == ("json_schema", schema)


def test_choices_limit_the_tools(client: httpx.Client, llm: FakeLLM) -> None:
    tools = [WEATHER, PATCH, {"type": "web_search", "external_web_access": True}]
    modes = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
    for choice, expected in modes.items():
        answer = ask(client, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        assert answer["tool_choice"] == expected
        chat = llm.chats[-1]
        assert (chat.tool_choice.mode, chat.tool_choice.parallel) == (expected, False)
        assert [tool.name for tool in chat.tools] == ["weather", "apply_patch"]
    ask(client, tools=tools, tool_choice={"type": "custom", "name": "apply_patch"})
    assert llm.chats[-1].tool_choice.name == "apply_patch"
    listed = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": listed}
    ask(client, tools=tools, tool_choice=allowed)
    assert [tool.name for tool in llm.chats[-1].tools] == ["apply_patch"]
    assert llm.chats[-1].tool_choice.mode == "required"


def test_a_custom_tool_of_a_regular_expression_is_strict(
    client: httpx.Client, llm: FakeLLM
) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "a+|b"}
    ask(client, tools=[{"type": "custom", "name": "letters", "format": form}])
    (tool,) = llm.chats[-1].tools
    assert tool.strict
    assert tool.parameters["properties"]["input"]["pattern"] == "^(?:a+|b)$"


def test_fields_that_do_not_change_the_answer_are_accepted(shared: httpx.Client) -> None:
    harmless: dict[str, Any] = {
        "background": False,
        "conversation": None,
        "service_tier": "flex",
        "prompt_cache_retention": "24h",
        "client_metadata": {"x": "y"},
        "stream_options": {"include_obfuscation": False},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "reasoning": {"effort": "low", "context": "all_turns"},
        "truncation": "disabled",
        "n": 1,
    }
    assert ask(shared, **harmless)["status"] == "completed"
