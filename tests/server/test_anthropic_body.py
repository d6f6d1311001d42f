"""Wrong bodies of /v1/messages are refused, and the error names the wrong field."""

from typing import Any

import httpx
import pytest

from headroom.server.anthropic_body import MessagesBody

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
        ({"max_tokens": None}, "`max_tokens` must be a whole number, not null."),
        ({"max_tokens": 0}, "`max_tokens` must be at least 1, not 0."),
        ({"max_tokens": "9"}, "`max_tokens` must be a whole number, not a text."),
        ({"messages": []}, "`messages` must have at least 1 entry, and has 0."),
        ({"messages": "hi"}, "`messages` must be a list, not a text."),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "`messages[0].role` must be 'user'",
        ),
        ({"messages": [{"role": "user"}]}, "`messages[0].content` is required."),
        (blocks("x"), "`messages[1].content[0]` must be a block with a type."),
        (
            blocks(PICTURE),
            "`messages[1].content[0]`: blocks of type 'image' are not supported here",
        ),
        (blocks({"type": "document"}), "`messages[1].content[0].source` is required."),
        (
            blocks({"type": "document", "source": {"type": "base64", "data": ""}}),
            "[0].source`: documents from a source of type 'base64' are not supported, only of text",
        ),
        (
            blocks({"type": "document", "source": {"type": "content", "content": [PICTURE]}}),
            "blocks of type 'image' are not supported here, only: text",
        ),
        (
            blocks({"type": "search_result", "source": "x", "title": "y", "content": [PICTURE]}),
            "[0].content[0]`: blocks of type 'image' are not supported here",
        ),
        (
            blocks({"type": "document", "source": {"type": "text", "data": "x"}}, role="assistant"),
            "role 'assistant' cannot have blocks of type 'document'",
        ),
        (blocks({"type": "container_upload"}), "blocks of type 'container_upload' are not support"),
        (blocks({"type": "text"}), "`messages[1].content[0].text` is required."),
        (blocks(CALL), "role 'user' cannot have blocks of type 'tool_use'"),
        (
            blocks({**CALL, "input": "x"}, role="assistant"),
            "[0].input` must be an object",
        ),
        (blocks({**CALL, "id": ""}, role="assistant"), "[0].id` must have at least 1 character"),
        (blocks(CALL, role="assistant"), "The last message calls tools"),
        (blocks({"type": "tool_result"}), "`messages[1].content[0].tool_use_id` is required."),
        (
            blocks({"type": "tool_result", "tool_use_id": "z"}),
            "messages[1].content: a tool_result answers the call 'z', but no tool_use block",
        ),
        (result(7), "content[0].content` must be a text or a list of blocks."),
        (
            result([CALL]),
            "content[0].content[0]`: blocks of type 'tool_use' are not supported here",
        ),
        ({"system": 7}, "`system` must be a text or a list of blocks."),
        ({"system": [PICTURE]}, "`system[0]`: blocks of type 'image' are not supported here"),
        ({"tools": {}}, "`tools` must be a list, not an object."),
        ({"tools": [{"name": "f"}]}, "`tools[0].input_schema` is required."),
        ({"tools": [{**TOOL, "name": ""}]}, "`tools[0].name` is '', which does not match"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name: two tools have the name 'f'."),
        (
            {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]},
            "`tools[1]`: tools of type 'web_search_20250305' are not supported",
        ),
        ({"tool_choice": "auto"}, "`tool_choice` must be an object, not a text."),
        ({"tool_choice": {"type": "all"}}, "`tool_choice.type` must be 'auto'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice has the type 'any', but there are no tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice.name 'g' is not a tool; the tools are: f.",
        ),
        ({"thinking": {"type": "often"}}, "`thinking.type` must be 'enabled'"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 0}},
            "`thinking.budget_tokens` must be at least 1, not 0.",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}, "max_tokens": 9},
            "thinking.budget_tokens is 9; it must be less than max_tokens, which is 9.",
        ),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "`thinking.display` must be"),
        ({"stop_sequences": ["x" * 1025]}, "`stop_sequences`: a stop text has 1025 characters"),
        ({"stop_sequences": [7]}, "`stop_sequences` must be a text or a list of texts."),
        ({"stop_sequences": ["x"] * 17}, "`stop_sequences`: 17 stop texts were given"),
        ({"temperature": -1}, "temperature is -1.0; it must be from 0 to 100."),
        ({"temperature": "hot"}, "`temperature` must be a number, not a text."),
        ({"top_p": 2}, "top_p is 2.0; it must be from 0 to 1."),
        ({"top_k": -2}, "`top_k` must be at least 0, not -2."),
        ({"stream": "yes"}, "`stream` must be true or false, not a text."),
        ({"model": 7}, "`model` must be a text, not 7."),
        ({"output_config": {"effort": "huge"}}, "`output_config.effort` must be 'none'"),
        (
            {"output_config": {"format": {"type": "text"}}},
            "`output_config.format.type` must be",
        ),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "`output_config.format.schema` is required.",
        ),
        (
            {"output_format": {"type": "json_schema", "schema": 7}},
            "output_format.schema` must be",
        ),
        ({"context_management": 7}, "`context_management` must be an object, not 7."),
        ({"mcp_servers": [{"name": "x"}]}, "`mcp_servers` cannot be honoured; leave it out."),
        ({"container": "x"}, "`container` cannot be honoured; leave it out."),
        ({"n": 2}, "`n` cannot be honoured; leave it out."),
        (
            {"response_format": {"type": "json_object"}},
            "`response_format` cannot be honoured here; use `output_config.format`.",
        ),
        (
            {"guided_json": {}, "json_schema": {"type": "object"}},
            "`json_schema` cannot be honoured",
        ),
        ({"max_completion_tokens": 5}, "cannot be honoured here; use `max_tokens`."),
        ({"reasoning_effort": "high"}, "cannot be honoured here; use `output_config.effort`."),
        (
            {"chat_template_kwargs": {"messages": []}},
            "`chat_template_kwargs` cannot have `messages`: the server sets it itself.",
        ),
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
    assert response.json()["error"]["message"] == "`max_tokens` is required."
    assert shared.post("/v1/messages/count_tokens", json={"messages": [HI]}).status_code == 200


def test_the_start_of_an_answer_may_have_a_format() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    messages = [HI, {"role": "assistant", "content": "{"}]
    body = {"max_tokens": 9, "messages": messages, "output_config": form}
    chat = MessagesBody.model_validate(body).conversation()
    assert chat.continues
    assert chat.output_format is not None
    assert chat.output_format.value == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, False),
        ({"chat_template_kwargs": {"style": "brief"}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        (
            {
                "chat_template_kwargs": {"enable_thinking": True},
                "thinking": {"type": "disabled"},
            },
            False,
        ),
        ({"enable_thinking": False, "reasoning_effort": "none", "stop_sequences": [""]}, False),
    ],
)
def test_variables_of_the_template_are_passed_on_and_may_turn_thoughts_on(
    fields: dict[str, Any], thinking: bool
) -> None:
    body = MessagesBody.model_validate({"max_tokens": 9, "messages": [HI], **fields})
    chat = body.conversation()
    assert chat.thinking.enabled is thinking
    assert chat.template_variables == fields.get("chat_template_kwargs", {})
    assert "stop" not in body.sampling() or body.sampling()["stop"] == ()
