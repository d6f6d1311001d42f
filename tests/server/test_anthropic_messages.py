"""/v1/messages with a fake model; the types of Anthropic's own client check the format."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message, MessageParam, RawMessageStreamEvent, ToolParam
from pydantic import TypeAdapter

from headroom.answers import AnswerDelta
from headroom.options import Options
from headroom.server.anthropic_messages import BlockWriter, join_events, read_input
from headroom.text.answer_parser import CallDelta
from tests.server.fakes import CONTEXT, FakeLLM, serving, wait_until

PATH = "/v1/messages"
HI: list[MessageParam] = [{"role": "user", "content": "hi"}]
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "The forecast.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
)
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def official(client: httpx.Client) -> Iterator[Anthropic]:
    with Anthropic(base_url=str(client.base_url), api_key="none", max_retries=0) as official:
        yield official


def ask(client: httpx.Client, **fields: Any) -> Any:
    response = client.post(PATH, json={"max_tokens": 1000, "messages": HI, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["request-id"].startswith("req_")
    return response.json()


def stream(client: httpx.Client, **fields: Any) -> list[Any]:
    """Return the events of a stream; each carries its type as the event's name."""
    body = {"max_tokens": 1000, "messages": HI, "stream": True, **fields}
    response = client.post(f"{PATH}?beta=true", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["request-id"].startswith("req_")
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{**block, "id": ""} if "id" in block else block for block in message["content"]]
    return {**message, "id": "", "content": content}


def test_a_message_has_every_field_with_its_type(client: httpx.Client) -> None:
    message = ask(client)
    assert message["id"].startswith("msg_")
    text = {"type": "text", "text": "Hello, world.", "citations": None}
    assert {**message, "id": ""} == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [text],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 14,
            "output_tokens_details": {"thinking_tokens": 0},
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
        },
    }
    Message.model_validate(message, strict=True)


ANSWERS = {
    "text": "Hello, world.",
    "thought and text": "<think>\nHm.\n</think>\n\nHello.\n",
    "call": CALL,
    "everything": f"<think>\nHm.\n</think>\n\nI look.\n\n{CALL}\n{CALL}",
    "text after a call": f"One.\n{CALL}\n Two. ",
    "nothing": "",
    "white space": " \n",
}
BLOCKS = {
    "text": ["text"],
    "thought and text": ["thinking", "text"],
    "call": ["tool_use"],
    "everything": ["thinking", "text", "tool_use", "tool_use"],
    "text after a call": ["text", "tool_use", "text"],
    "nothing": [],
    "white space": ["text"],
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_official_accumulator_builds_the_whole_message_from_a_stream(
    client: httpx.Client, official: Anthropic, llm: FakeLLM, kind: str
) -> None:
    llm.thinks, llm.engine.words = True, ANSWERS[kind]
    with official.messages.stream(
        model="fake", max_tokens=1000, messages=HI, tools=[WEATHER]
    ) as events:
        streamed = events.get_final_message()
        assert events.request_id is not None
    whole = official.messages.create(model="fake", max_tokens=1000, messages=HI, tools=[WEATHER])
    assert [block.type for block in streamed.content] == BLOCKS[kind]
    raw = ask(client, tools=[WEATHER])
    Message.model_validate(raw, strict=True)
    assert without_ids(raw) == without_ids(whole.to_dict(mode="json", exclude_unset=True))
    # The official accumulator drops what Anthropic's events do not have.
    thoughts = raw.pop("finish_details")["thinking_tokens"]
    assert thoughts == raw["usage"]["output_tokens_details"]["thinking_tokens"]
    assert without_ids(streamed.to_dict()) == without_ids(raw)


def test_events_come_in_the_official_order(client: httpx.Client, llm: FakeLLM) -> None:
    llm.thinks, llm.engine.words = True, ANSWERS["everything"]
    events = stream(client, tools=[WEATHER])
    for one in events:
        assert EVENT.validate_python(one, strict=True).type == one["type"]
    steps = [_step(one) for one in events]
    in_short = [step for place, step in enumerate(steps) if step != steps[place - 1]]
    assert in_short == [
        "message_start",
        "0 start thinking", "0 thinking_delta", "0 signature_delta", "0 stop",
        "1 start text", "1 text_delta", "1 stop",
        "2 start tool_use", "2 input_json_delta", "2 stop",
        "3 start tool_use", "3 input_json_delta", "3 stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert steps.count("2 input_json_delta") > 1
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == 4


def _step(one: Any) -> str:
    if "index" not in one:
        return str(one["type"])
    if one["type"] == "content_block_start":
        return f"{one['index']} start {one['content_block']['type']}"
    if one["type"] == "content_block_delta":
        return f"{one['index']} {one['delta']['type']}"
    return f"{one['index']} stop"


def test_calls_have_ids_names_and_inputs(official: Anthropic, llm: FakeLLM) -> None:
    llm.engine.words = f"I look.\n\n{CALL}"
    message = official.messages.create(model="m", max_tokens=1000, messages=HI, tools=[WEATHER])
    text, call = message.content
    assert text.type == "text"
    assert text.text == "I look."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Köln", "days": 2})
    assert call.id
    assert message.stop_reason == "tool_use"


def test_the_tools_of_a_request_reach_the_model(client: httpx.Client, llm: FakeLLM) -> None:
    choices = {
        "auto": {"type": "auto", "disable_parallel_tool_use": True},
        "any": {"type": "any"},
        "tool": {"type": "tool", "name": "get_weather"},
        "none": {"type": "none"},
    }
    for choice in choices.values():
        ask(client, tools=[{**WEATHER, "type": "custom", "strict": True}], tool_choice=choice)
    (tool,) = llm.chats[0].tools
    assert (tool.name, tool.description, tool.strict) == ("get_weather", "The forecast.", True)
    assert tool.parameters == WEATHER["input_schema"]
    seen = [(chat.tool_choice.mode, chat.tool_choice.name) for chat in llm.chats]
    required = "required"
    assert seen == [("auto", None), (required, None), (required, "get_weather"), ("none", None)]
    assert [chat.tool_choice.parallel for chat in llm.chats] == [False, True, True, True]


def test_calls_are_text_where_none_may_be_made(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.words = CALL
    message = ask(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block["text"] for block in message["content"]] == [CALL]
    assert message["stop_reason"] == "end_turn"


def test_half_an_input_does_not_look_like_a_whole_one(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.words = CALL
    cut = CALL.index('"days"')
    message = ask(client, tools=[WEATHER], max_tokens=len(CALL[:cut].encode()))
    call = message["content"][0]
    assert (call["name"], call["input"]) == ("get_weather", {"INVALID_JSON": '{"city": "Köln", '})
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("text", ["[1]", "{not json", "7", '{"a": '])
def test_the_input_of_a_call_is_always_an_object(text: str) -> None:
    assert read_input(text) == {"INVALID_JSON": text}
    assert read_input('{"a": [1]}') == {"a": [1]}


def test_a_thought_that_is_not_shown_comes_back_with_its_signature(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.thinks, llm.engine.words = True, "<think>\nSecret.\n</think>\n\nHello."
    thinking = {"type": "adaptive", "display": "omitted"}
    message = ask(client, thinking=thinking)
    thought, text = message["content"]
    assert thought["thinking"] == ""
    assert text["text"] == "Hello."
    kinds = [_step(one) for one in stream(client, thinking=thinking)]
    assert "0 thinking_delta" not in kinds
    assert "0 signature_delta" in kinds
    ask(client, messages=[*HI, {"role": "assistant", "content": message["content"]}, *HI])
    assert llm.conversations[-1][1]["reasoning_content"] == "Secret."


@pytest.mark.parametrize(
    ("fields", "enabled", "effort", "budget"),
    [
        ({}, False, None, None),
        ({"thinking": {"type": "disabled"}}, False, None, None),
        ({"output_config": {"effort": "high"}}, False, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 500}}, True, None, 500),
        ({"thinking": {"type": "adaptive"}}, True, None, None),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
            True,
            "high",
            None,
        ),
    ],
)
def test_the_model_thinks_only_when_asked_to(
    client: httpx.Client,
    llm: FakeLLM,
    fields: dict[str, Any],
    enabled: bool,
    effort: str | None,
    budget: int | None,
) -> None:
    ask(client, **fields)
    thinking = llm.chats[0].thinking
    assert (thinking.enabled, thinking.effort, thinking.budget) == (enabled, effort, budget)


def test_a_stop_text_is_named(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.pause_s = 0.002
    message = ask(client, stop_sequences=["zzz", ", w"])
    assert message["content"][0]["text"] == "Hello"
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ", w")
    wait_until(lambda: llm.engine.finished["cancelled"] == 1)
    *_, ending, _ = stream(client, stop_sequences=["wor"])
    delta = ending["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == ("stop_sequence", "wor")


def test_an_answer_may_end_by_its_limit_or_by_the_context(
    client: httpx.Client, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(client, max_tokens=5)["stop_reason"] == "max_tokens"
    # An engine ends an answer where the context ends, whatever was asked for.
    request = llm.request
    monkeypatch.setattr(
        llm,
        "request",
        lambda prompt, params, limits: request(prompt, replace(params, max_tokens=5), limits),
    )
    message = ask(client, max_tokens=64_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["output_tokens"] == 5


def test_settings_reach_the_engine(client: httpx.Client, llm: FakeLLM) -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 3, "seed": 5}
    ask(client, **given, stop_sequences=["x"])
    params = llm.engine.requests[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert params.stop == ("x",)


def test_fields_that_change_nothing_are_accepted(client: httpx.Client) -> None:
    message = ask(
        client,
        model="claude-opus-4-8",
        metadata={"user_id": "{}"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        inference_geo="eu",
        speed="fast",
        stream=False,
        betas=["x"],
    )
    assert message["context_management"] == {"applied_edits": []}


def test_a_format_reaches_the_model(client: httpx.Client, llm: FakeLLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "schema": schema}
    ask(client, output_config={"format": wanted})
    ask(client, output_format=wanted)
    formats = [chat.output_format for chat in llm.chats]
    assert [(form.kind, form.value) for form in formats if form] == [("json_schema", schema)] * 2
    assert [form.param for form in formats if form] == [
        "output_config.format.schema",
        "output_format.schema",
    ]


def test_the_last_words_of_the_assistant_are_continued(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.words = " 42."
    message = ask(client, messages=[*HI, {"role": "assistant", "content": "The answer is"}])
    assert llm.chats[0].continues
    assert message["content"][0]["text"] == " 42."
    ask(client)
    assert not llm.chats[1].continues


def test_prompts_of_claude_code_begin_alike(client: httpx.Client, llm: FakeLLM) -> None:
    for release in ("41f", "0aa"):
        billing = f"x-anthropic-billing-header: cc_version=2.1.197.{release}; cch={release};"
        blocks = [
            {"type": "text", "text": billing},
            {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}},
        ]
        ask(client, system=blocks)
    first, second = (request.prompt for request in llm.engine.requests)
    assert first == second
    assert bytes(first[1:]) == b"Be short.\nhi\n"


def test_tokens_are_counted_as_a_message_counts_them(
    client: httpx.Client, official: Anthropic
) -> None:
    counted = official.messages.count_tokens(model="fake", messages=HI, system="Be short.")
    used = official.messages.create(model="m", max_tokens=9, messages=HI, system="Be short.")
    assert counted.input_tokens == used.usage.input_tokens > 4
    edits: dict[str, Any] = {"edits": []}
    body = {"messages": HI, "context_management": edits}
    response = client.post(f"{PATH}/count_tokens?beta=true", json=body)
    management = {"original_input_tokens": 4}
    assert response.json() == {"input_tokens": 4, "context_management": management}


def test_pings_come_while_the_model_reads_the_prompt(llm: FakeLLM) -> None:
    llm.engine.prefill_s = 0.4
    with (
        serving(llm, Options(port=0, keep_alive=0.1)) as server,
        httpx.Client(base_url=server.address) as client,
    ):
        events = stream(client)
    assert events[0]["type"] == "message_start"
    assert events[1] == {"type": "ping"}
    assert ": keep-alive" not in str(events)
    with (
        serving(llm, Options(port=0, keep_alive=0.1)) as server,
        Anthropic(base_url=server.address, api_key="none", max_retries=0) as official,
        official.messages.stream(model="m", max_tokens=99, messages=HI) as streamed,
    ):
        assert streamed.get_final_text() == "Hello, world."


def test_an_error_in_a_stream_is_its_last_event(
    client: httpx.Client, official: Anthropic, llm: FakeLLM
) -> None:
    llm.engine.fails_after = 5
    *_, before, last = stream(client)
    assert before["type"] == "content_block_delta"
    error = {"type": "api_error", "message": "The step failed."}
    assert (last["type"], last["error"]) == ("error", error)
    assert last["request_id"].startswith("req_")
    with (
        official.messages.stream(model="m", max_tokens=99, messages=HI) as events,
        pytest.raises(anthropic.APIStatusError, match="The step failed"),
    ):
        events.until_done()
    response = client.post(PATH, json={"max_tokens": 99, "messages": HI})
    assert response.status_code == 500
    assert response.json()["error"] == error


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_agents_know(
    official: Anthropic,
) -> None:
    long: list[MessageParam] = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        official.messages.create(model="m", max_tokens=9, messages=long)
    words = f"prompt is too long: 5002 tokens > {CONTEXT} maximum"
    assert words in refused.value.message


def test_blocks_are_written_once_whatever_the_pieces() -> None:
    """Text and calls that come together in one delta are written as if they came one by one."""
    calls = (
        CallDelta(index=0, id="a", name="f"),
        CallDelta(index=0, arguments="{}"),
        CallDelta(index=1, id="b", name="g", arguments='{"x": 1}'),
    )
    together = [AnswerDelta(thought="T", text="Hi\n ", calls=calls), AnswerDelta(text="\n")]
    single = [
        AnswerDelta(thought="T"),
        *(AnswerDelta(text=letter) for letter in "Hi\n "),
        *(AnswerDelta(calls=(call,)) for call in calls),
        AnswerDelta(text="\n"),
    ]
    contents = []
    for deltas in (together, single):
        writer = BlockWriter()
        events = [event for delta in deltas for event in writer.add(delta)] + [*writer.finish()]
        opening = {"type": "message_start", "message": {"content": []}}
        contents.append(join_events([opening, *events])["content"])
    assert contents[0] == contents[1]
    kinds = [block["type"] for block in contents[0]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert contents[0][1]["text"] == "Hi"
    assert [block["input"] for block in contents[0][2:]] == [{}, {"x": 1}]


def test_a_client_that_leaves_ends_its_answer(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.pause_s = 0.05
    body = {"max_tokens": 99, "messages": HI, "stream": True}
    with client.stream("POST", PATH, json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: llm.engine.finished["cancelled"] == 1)
