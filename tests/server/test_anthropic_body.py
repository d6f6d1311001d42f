"""Bodies of /v1/messages that are wrong are refused, each with the field at fault."""

from typing import Any

import httpx
import pytest

HI = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [HI, {"role": role, "content": [*content]}]}


def result(content: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": [CALL]}
    block = {"type": "tool_result", "tool_use_id": "a", "content": content}
    return {"messages": [HI, answer, {"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: input should be a valid integer."),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1."),
        ({"max_tokens": "9"}, "max_tokens: input should be a valid integer."),
        ({"messages": []}, "messages: list should have at least 1 item"),
        ({"messages": "hi"}, "messages: input should be a valid list."),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user"}]}, "messages[0].content: this field is required."),
        (blocks("x"), "messages[1].content[0]: input should be a block with a type."),
        (blocks(PICTURE), "messages[1].content[0]: blocks of type 'image' cannot be read here"),
        (blocks({"type": "document"}), "blocks of type 'document' cannot be read here"),
        (blocks({"type": "server_tool_use"}), "blocks of type 'server_tool_use' cannot be read"),
        (blocks({"type": "text"}), "messages[1].content[0].text.text: this field is required."),
        (blocks(CALL), "role 'user' cannot have blocks of type 'tool_use'"),
        (blocks({**CALL, "input": "x"}, role="assistant"), "tool_use.input: input should be"),
        (blocks({**CALL, "id": ""}, role="assistant"), "tool_use.id: string should have at least"),
        (blocks(CALL, role="assistant"), "The last message calls tools"),
        (blocks({"type": "tool_result"}), "tool_result.tool_use_id: this field is required."),
        (
            blocks({"type": "tool_result", "tool_use_id": "z"}),
            "messages[1].content: a tool_result is about the call 'z', and no tool_use block",
        ),
        (result(7), "tool_result.content: input should be a text or a list of blocks."),
        (result([CALL]), "tool_result.content[0]: blocks of type 'tool_use' cannot be read here"),
        ({"system": 7}, "system: input should be a text or a list of blocks."),
        ({"system": [PICTURE]}, "system[0]: blocks of type 'image' cannot be read here"),
        ({"tools": {}}, "tools: input should be a valid list."),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: this field is required."),
        ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name: string should match pattern"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name: another tool has the name 'f', too."),
        (
            {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]},
            "tools[1]: tools of type 'web_search_20250305' are not there",
        ),
        ({"tool_choice": "auto"}, "tool_choice: input should be an object."),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type: input should be 'auto'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice has the type 'any', and there are no tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice.name 'g' is no tool; the tools are: f.",
        ),
        ({"thinking": {"type": "often"}}, "thinking.type: input should be 'enabled'"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 0}},
            "thinking.budget_tokens: input should be greater than or equal to 1.",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}, "max_tokens": 9},
            "thinking.budget_tokens is 9; it must be less than max_tokens, which is 9.",
        ),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display: "),
        ({"stop_sequences": [""]}, "stop_sequences: a stop text has 0 characters"),
        ({"stop_sequences": [7]}, "stop_sequences: input should be a text or a list of texts."),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: 17 stop texts were given"),
        ({"temperature": -1}, "temperature is -1.0; it must be from 0 to 100."),
        ({"temperature": "hot"}, "temperature: input should be a valid number."),
        ({"top_p": 2}, "top_p is 2.0; it must be from 0 to 1."),
        ({"top_k": -1}, "top_k: input should be greater than or equal to 0."),
        ({"stream": "yes"}, "stream: input should be a valid boolean."),
        ({"model": 7}, "model: input should be a valid string."),
        ({"output_config": {"effort": "huge"}}, "output_config.effort: input should be 'none'"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type: "),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema: this field is required.",
        ),
        ({"output_format": {"type": "json_schema", "schema": 7}}, "output_format.schema: "),
        ({"context_management": 7}, "context_management: input should be a valid dictionary."),
        ({"mcp_servers": [{"name": "x"}]}, "`mcp_servers` cannot be honoured; leave it out."),
        ({"container": "x"}, "`container` cannot be honoured; leave it out."),
        ({"n": 2}, "`n` cannot be honoured; leave it out."),
        ({"response_format": {"type": "json_object"}}, "`response_format` cannot be honoured"),
    ],
)
def test_a_wrong_field_is_named(shared: httpx.Client, fields: dict[str, Any], words: str) -> None:
    response = shared.post("/v1/messages", json={"max_tokens": 99, "messages": [HI], **fields})
    error = response.json()
    assert (response.status_code, error["type"]) == (400, "error")
    assert error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]
    assert error["request_id"] == response.headers["request-id"]


def test_the_limit_of_an_answer_is_required(shared: httpx.Client) -> None:
    response = shared.post("/v1/messages", json={"messages": [HI]})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "max_tokens: this field is required."
    assert shared.post("/v1/messages/count_tokens", json={"messages": [HI]}).status_code == 200


def test_the_start_of_an_answer_cannot_have_a_format(shared: httpx.Client) -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    messages = [HI, {"role": "assistant", "content": "{"}]
    body = {"max_tokens": 9, "messages": messages, "output_config": form}
    response = shared.post("/v1/messages", json=body)
    assert response.status_code == 400
    assert "An answer whose first words are given cannot have a format" in response.text
