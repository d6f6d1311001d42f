"""/v1/responses with a fake model."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseInputMessageItem,
    ResponseOutputMessage,
    ResponseReasoningItem,
    ResponseStreamEvent,
)
from pydantic import BaseModel, TypeAdapter

from headroom.options import Options
from tests.server.fakes import FakeLLM, serving, wait_until

PATH = "/v1/responses"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
# The client's own types, checked strictly.
STRICT = TypeAdapter(Response)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def official(client: httpx.Client) -> Iterator[OpenAI]:
    url = client.base_url.join("/v1")
    with OpenAI(base_url=str(url), api_key="none", max_retries=0) as official:
        yield official


def ask(client: httpx.Client, status: int = 200, **fields: Any) -> Any:
    response = client.post(PATH, json={"input": "hi", **fields})
    assert response.status_code == status, response.text
    return response.json()


def refusal(client: httpx.Client, **fields: Any) -> tuple[str, str]:
    """Return the field at fault and the message of a body that is refused with 400."""
    error = ask(client, status=400, **fields)["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["message"]


def stream(client: httpx.Client, path: str = PATH, **fields: Any) -> list[Any]:
    """Return the events of a stream; each is named by its type and numbered from 0."""
    body = {"input": "hi", "stream": True, **fields}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return read_events(response)


def read_events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for number, block in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event, strict=True)
        events.append(event)
    return events


def kinds(events: list[Any]) -> list[str]:
    """Return the types of events; consecutive equal ones count once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for place, name in enumerate(names) if names[place - 1 : place] != [name]]


def test_a_response_has_every_documented_field_with_its_type(client: httpx.Client) -> None:
    answer = ask(client, seed=7, tools=[WEATHER, PATCH, {"type": "web_search"}])
    checked = STRICT.validate_python(answer, strict=True)
    # Optional fields of newer clients, about what this server does not do.
    later = {
        "access_programs", "image", "input_transformations", "moderation",
        "prompt_cache_diagnostics", "prompt_cache_options", "tool_usage",
    }  # fmt: skip
    missing = set(Response.model_fields) - set(answer) - later
    assert not missing
    assert checked.status == "completed"
    assert checked.id.startswith("resp_")
    assert checked.completed_at is not None
    assert checked.completed_at >= checked.created_at
    (message,) = checked.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.id[:4], message.status, message.role) == ("msg_", "completed", "assistant")
    assert checked.output_text == "Hello, world."
    assert checked.usage is not None
    assert (checked.usage.input_tokens, checked.usage.output_tokens) == (4, 14)
    assert checked.usage.total_tokens == 18
    assert (answer["model"], answer["seed"], answer["store"]) == ("fake", 7, True)
    assert answer["timings"]["prefill_ms"] == 2.0
    assert [tool["type"] for tool in answer["tools"]] == ["function", "custom", "web_search"]


def test_a_response_repeats_what_was_asked_for(client: httpx.Client, llm: FakeLLM) -> None:
    llm.default_sampling = {"temperature": 0.6, "top_p": 0.9}
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "metadata": {"topic": "greeting"},
        "top_p": 0.5,
        "max_output_tokens": 50,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "truncation": "auto",
        "user": "somebody",
        "safety_identifier": "hash",
        "prompt_cache_key": "key",
        "max_tool_calls": 3,
        "top_logprobs": 2,
    }
    answer = ask(client, **asked, store=False, service_tier="auto", stream_options={})
    STRICT.validate_python(answer, strict=True)
    assert {name: answer[name] for name in asked} == asked
    assert (answer["temperature"], answer["store"]) == (0.6, False)
    chat = llm.chats[-1]
    assert [turn["content"] for turn in chat.messages] == ["Be brief.", "hi"]
    assert chat.output_format is not None
    assert chat.output_format.kind == "json_object"
    assert (chat.thinking.enabled, chat.thinking.effort) == (True, "low")
    params = llm.engine.requests[-1].params
    assert (params.top_p, params.temperature, params.max_tokens) == (0.5, 0.6, 50)


def test_a_stream_has_the_official_order(client: httpx.Client, llm: FakeLLM) -> None:
    llm.thinks = True
    llm.engine.words = f"<think>Hm.</think>Let me see.\n{CALL}"
    events = stream(client, tools=[WEATHER])
    assert kinds(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final = events[-1]["response"]
    assert final["output"] == items
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (items[0]["summary"], items[0]["encrypted_content"]) == ([], None)
    assert items[1]["content"][0]["text"] == "Let me see."
    assert json.loads(items[2]["arguments"]) == {"city": "Paris"}
    assert [item["id"].partition("_")[0] for item in items] == ["rs", "msg", "fc"]
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert final["finish_details"]["close_kind"] == "natural"
    first = events[0]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    # Deltas come as tokens come, and each byte is a token here.
    deltas = [event["delta"] for event in events if event["type"].endswith("output_text.delta")]
    assert len(deltas) > 5


def test_the_official_accumulator_gives_the_whole_response(official: OpenAI, llm: FakeLLM) -> None:
    llm.thinks = True
    llm.engine.words = f"<think>Hm.</think>Let me see.\n{CALL}\n{CALL}"
    with official.responses.stream(
        model="fake", input="hi", tools=[{**WEATHER, "strict": True}], reasoning={"summary": "auto"}
    ) as events:
        seen = list(events)
        final = events.get_final_response()
    assert isinstance(seen[-1], ResponseCompletedEvent)
    thought, message, first, second = final.output
    assert isinstance(thought, ResponseReasoningItem)
    assert [part.text for part in thought.summary] == ["Hm."]
    assert [part.text for part in thought.content or ()] == ["Hm."]
    assert final.output_text == "Let me see."
    assert isinstance(first, ResponseFunctionToolCall)
    assert isinstance(second, ResponseFunctionToolCall)
    assert first.parsed_arguments == {"city": "Paris"}  # type: ignore[attr-defined]
    assert first.call_id != second.call_id
    assert message.type == "message"
    summary = [event.delta for event in seen if event.type.endswith("summary_text.delta")]
    assert "".join(str(piece) for piece in summary) == "Hm."


def test_silence_is_broken_by_events_that_clients_count(llm: FakeLLM) -> None:
    """Codex gives a stream up after a time without events; comments are no events to it."""
    llm.engine.prefill_s = 0.4
    with (
        serving(llm, Options(port=0, keep_alive=0.05)) as server,
        OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as official,
    ):
        with official.responses.stream(model="m", input="hi") as stream:
            events = list(stream)
            whole = stream.get_final_response()
        raw = httpx.post(f"{server.address}{PATH}", json={"input": "hi", "stream": True}).text
    assert whole.output_text == llm.engine.words
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    repeats = types.count("response.in_progress") - 1
    assert 2 <= repeats <= 8
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[2 : 2 + repeats] == ["response.in_progress"] * repeats
    assert "keep-alive" not in raw


def test_the_official_client_parses_a_class(official: OpenAI, llm: FakeLLM) -> None:
    class City(BaseModel):
        name: str
        people: int

    llm.engine.words = '{"name": "Paris", "people": 2100000}'
    parsed = official.responses.parse(model="fake", input="hi", text_format=City)
    assert parsed.output_parsed == City(name="Paris", people=2100000)
    form = llm.chats[-1].output_format
    assert form is not None
    assert form.value["properties"].keys() == {"name", "people"}
    assert parsed.text is not None
    assert parsed.text.format is not None
    assert parsed.text.format.type == "json_schema"


def test_a_call_and_its_output_go_back_as_messages(official: OpenAI, llm: FakeLLM) -> None:
    llm.thinks = True
    llm.engine.words = f"<think>Hm.</think>Let me see.\n{CALL}"
    first = official.responses.create(model="fake", input="hi", tools=[WEATHER], store=False)
    call = first.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    llm.engine.words = "It is sunny."
    history: Any = [
        {"role": "user", "content": "hi"},
        *[item.to_dict() for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    second = official.responses.create(model="fake", input=history, tools=[WEATHER], store=False)
    assert second.output_text == "It is sunny."
    called = {"name": "weather", "arguments": '{"city": "Paris"}'}
    expected = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "name": "weather", "content": "sunny"},
    ]
    assert llm.conversations[-1] == expected
    # The id of a stored response gives the same messages.
    llm.engine.words = f"<think>Hm.</think>Let me see.\n{CALL}"
    kept = official.responses.create(model="fake", input="hi", tools=[WEATHER])
    call_id = kept.output[-1].call_id  # type: ignore[union-attr]
    official.responses.create(
        model="fake",
        previous_response_id=kept.id,
        input=[{"type": "function_call_output", "call_id": str(call_id), "output": "sunny"}],
    )
    again = json.dumps(llm.conversations[-1]).replace(str(call_id), call.call_id)
    assert json.loads(again) == expected


def test_instructions_are_not_carried_over(official: OpenAI, llm: FakeLLM) -> None:
    first = official.responses.create(model="fake", input="one", instructions="Be brief.")
    second = official.responses.create(
        model="fake", input="two", instructions="Be long.", previous_response_id=first.id
    )
    third = official.responses.create(model="fake", input="3", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    said = [(turn["role"], turn["content"]) for turn in llm.conversations[-1]]
    hello = ("assistant", "Hello, world.")
    assert said == [("user", "one"), hello, ("user", "two"), hello, ("user", "3")]
    assert llm.conversations[-2][0] == {"role": "system", "content": "Be long."}


def test_a_custom_tool_is_called_with_plain_text(client: httpx.Client, llm: FakeLLM) -> None:
    text = '*** "a"\n\tb\\ \N{GRINNING FACE} é'
    arguments = json.dumps({"input": text})
    llm.engine.words = (
        f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}</tool_call>'
    )
    events = stream(client, tools=[PATCH])
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "custom_tool_call_input.delta",
        "custom_tool_call_input.done", "output_item.done", "completed",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
    assert "".join(deltas) == text
    assert len(deltas) > 10
    (item,) = events[-1]["response"]["output"]
    call = ResponseCustomToolCall.model_validate(item)
    assert (call.name, call.input) == ("apply_patch", text)
    (tool,) = llm.chats[-1].tools
    assert "start: /.+/" in tool.description
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    ask(client, tools=[PATCH], input=[item, output])
    turn, result = llm.conversations[-1]
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"input": text}
    assert (result["role"], result["content"]) == ("tool", "Done.")


def test_tools_of_a_namespace_are_called_with_it(client: httpx.Client, llm: FakeLLM) -> None:
    space = {"type": "namespace", "name": "sky", "description": "", "tools": [WEATHER]}
    llm.engine.words = CALL
    (item,) = ask(client, tools=[space])["output"]
    assert (item["name"], item["namespace"]) == ("weather", "sky")
    # If two tools have one name, the model sees the second one with its namespace.
    llm.engine.words = CALL.replace("weather", "sky.weather")
    (item,) = ask(client, tools=[WEATHER, space])["output"]
    assert (item["name"], item["namespace"]) == ("weather", "sky")
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
    ask(client, tools=[WEATHER, space], input=[item, output])
    assert llm.conversations[-1][0]["tool_calls"][0]["function"]["name"] == "sky.weather"
    assert llm.conversations[-1][1]["name"] == "sky.weather"
    # An item may bring tools, too.
    ask(client, input=[{"type": "additional_tools", "role": "developer", "tools": [space]}, item])
    assert [tool.name for tool in llm.chats[-1].tools] == ["weather"]
    # A tool that an item brings again is not added twice.
    more = {"type": "additional_tools", "role": "developer", "tools": [space, PATCH]}
    ask(client, tools=[WEATHER], input=[more, more, item])
    names = [tool.name for tool in llm.chats[-1].tools]
    assert names == ["weather", "sky.weather", "apply_patch"]


def test_a_body_as_codex_sends_it_is_answered(client: httpx.Client, llm: FakeLLM) -> None:
    def said(role: str, *texts: str) -> dict[str, Any]:
        parts = [{"type": "input_text", "text": text} for text in texts]
        passed = {"internal_chat_message_metadata_passthrough": {"turn_id": "x"}}
        return {"type": "message", "id": "msg_x", "role": role, "content": parts, **passed}

    call = {
        "type": "function_call",
        "id": "fc_x",
        "status": "completed",
        "call_id": "call_x",
        "name": "weather",
        "arguments": "{}",
    }
    output = {"type": "function_call_output", "id": "fco_x", "call_id": "call_x", "output": "sun"}
    search = {"type": "tool_search", "execution": "client", "parameters": {}, "description": ""}
    nested = {"type": "namespace", "name": "agents", "description": "", "tools": [WEATHER]}
    told = [said("developer", "a"), said("developer", "b", "c")]
    events = stream(
        client,
        model="gpt-5.5",
        input=[*told, said("user", "hi"), call, output],
        tools=[WEATHER, PATCH, search, nested, {"type": "web_search", "external_web_access": True}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "low", "context": "all_turns", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="x",
        client_metadata={"x": "y"},
        text={"verbosity": "low"},
    )
    assert events[-1]["type"] == "response.completed"
    assert [turn["role"] for turn in llm.conversations[-1]] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert llm.conversations[-1][0]["content"] == "a\n\nb\nc"
    names = [tool.name for tool in llm.chats[-1].tools]
    assert names == ["weather", "apply_patch", "agents.weather"]


def test_a_websocket_is_refused_plainly(client: httpx.Client) -> None:
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "Ao29dOVVKxYjyoOd+nQ7xw==",
    }
    assert client.get(PATH, headers=headers).status_code == 405


def test_an_answer_that_is_cut_is_incomplete(client: httpx.Client, official: OpenAI) -> None:
    answer = ask(client, max_output_tokens=4)
    STRICT.validate_python(answer, strict=True)
    assert (answer["status"], answer["completed_at"]) == ("incomplete", None)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["output"][0]["content"][0]["text"] == "Hell"
    last = stream(client, max_output_tokens=4)[-1]
    assert last["type"] == "response.incomplete"
    # It can be continued.
    more = official.responses.create(model="m", input="on", previous_response_id=answer["id"])
    assert more.output_text == "Hello, world."


def test_an_answer_of_no_words_has_an_empty_message(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.words = ""
    (message,) = ask(client)["output"]
    assert message["content"][0]["text"] == ""
    llm.engine.words = " \n"
    assert ask(client)["output"][0]["content"][0]["text"] == " \n"
    # White space around calls makes no message.
    llm.engine.words = f"\n{CALL}\n"
    assert [item["type"] for item in ask(client, tools=[WEATHER])["output"]] == ["function_call"]


def test_logprobs_come_if_they_are_included(client: httpx.Client, llm: FakeLLM) -> None:
    llm.thinks = True
    llm.engine.words = "<think>no</think>Hi!"
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ask(client, **include)
    STRICT.validate_python(answer, strict=True)
    entries = answer["output"][1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["H", "i", "!"]
    assert entries[0]["logprob"] == -9999.0  # minus infinity
    assert [rival["logprob"] for rival in entries[1]["top_logprobs"]] == [-0.5, -1.5]
    events = stream(client, **include)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta["logprobs"]] == entries
    assert ask(client, top_logprobs=2)["output"][1]["content"][0]["logprobs"] == []


def test_thoughts_may_be_kept_in_an_opaque_field(client: httpx.Client, llm: FakeLLM) -> None:
    llm.thinks = True
    llm.engine.words = "<think>Hm, é.</think>Hi."
    thought, message = ask(client, include=["reasoning.encrypted_content"])["output"]
    only = {"type": "reasoning", "id": thought["id"], "summary": []}
    opaque = {**only, "encrypted_content": thought["encrypted_content"]}
    ask(client, input=[opaque, message, {"role": "user", "content": "more"}])
    assert llm.conversations[-1][0]["reasoning_content"] == "Hm, é."
    for other in ("of another server", "headroom:!", "headroom:/w=="):
        ask(client, input=[{**only, "encrypted_content": other}, message])
        assert "reasoning_content" not in llm.conversations[-1][0]


def test_a_thought_may_be_left_out(client: httpx.Client, llm: FakeLLM) -> None:
    llm.thinks = True
    llm.engine.words = "<think>Hm.</think>Hi."
    answer = ask(client, include_reasoning=False)
    assert [item["type"] for item in answer["output"]] == ["message"]
    ask(client, reasoning={"effort": "none"})
    assert llm.chats[-1].thinking.enabled is False


def test_a_kept_response_can_be_shown_listed_and_deleted(
    official: OpenAI, client: httpx.Client
) -> None:
    asked: Any = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    made = official.responses.create(model="fake", input=asked, metadata={"a": "b"})
    assert official.responses.retrieve(made.id).to_dict() == made.to_dict()
    page = official.responses.input_items.list(made.id, limit=2)
    assert page.has_more
    texts = []
    for item in page:  # the client asks for the next page by itself
        assert isinstance(item, ResponseInputMessageItem)
        texts.append(item.content[0].text)  # type: ignore[union-attr]
    assert texts == ["three", "two", "one"]
    up = official.responses.input_items.list(made.id, order="asc").data
    assert [item.id for item in up[::-1]][:2] == [item.id for item in page.data]
    official.responses.delete(made.id)
    for call in (
        lambda: official.responses.retrieve(made.id),
        lambda: official.responses.delete(made.id),
        lambda: official.responses.cancel(made.id),
        lambda: official.responses.input_items.list(made.id),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert made.id[:30] in str(error.value)
    with pytest.raises(openai.BadRequestError) as refused:
        official.responses.create(model="fake", input="hi", previous_response_id=made.id)
    assert refused.value.code == "previous_response_not_found"
    assert refused.value.param == "previous_response_id"
    for query, param in (("order=up", "order"), ("limit=0", "limit"), ("after=x", "after")):
        made = official.responses.create(model="fake", input="hi")
        response = client.get(f"{PATH}/{made.id}/input_items?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_response_that_is_not_stored_is_not_there(official: OpenAI) -> None:
    made = official.responses.create(model="fake", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        official.responses.retrieve(made.id)


def test_the_stream_of_a_kept_response_can_be_repeated(
    official: OpenAI, client: httpx.Client, llm: FakeLLM
) -> None:
    llm.thinks = True
    llm.engine.words = f"<think>Hm.</think>Let me see.\n{CALL}"
    first = stream(client, tools=[WEATHER])
    made = first[-1]["response"]
    events = read_events(client.get(f"{PATH}/{made['id']}?stream=true"))
    assert kinds(events) == kinds(first)
    assert (events[0], events[-1]["response"]) == (first[0], made)
    summarised = stream(client, tools=[WEATHER], reasoning={"summary": "auto"})[-1]["response"]
    again = read_events(client.get(f"{PATH}/{summarised['id']}?stream=true"))
    assert kinds(again)[3:7] == [
        "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done",
    ]  # fmt: skip
    with official.responses.stream(response_id=made["id"]) as helper:
        assert helper.get_final_response().output_text == "Let me see."
    response = client.get(f"{PATH}/{made['id']}?stream=true&starting_after=3")
    assert response.json()["error"]["param"] == "starting_after"


def test_items_may_be_referred_to(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.words = CALL
    made = ask(client, tools=[WEATHER])
    (call,) = made["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    ask(client, input=[{"type": "item_reference", "id": call["id"]}, output])
    assert [turn["role"] for turn in llm.conversations[-1]] == ["assistant", "tool"]
    # A reference to an item that the input has already adds nothing.
    ask(client, input=[{"id": call["id"]}, output], previous_response_id=made["id"])
    assert [turn["role"] for turn in llm.conversations[-1]] == ["user", "assistant", "tool"]
    error = ask(client, status=404, input=[{"type": "item_reference", "id": "fc_none"}])["error"]
    assert (error["param"], error["code"]) == ("input[0].id", "not_found")


def test_a_running_response_can_be_cancelled(
    official: OpenAI, client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.words, llm.engine.pause_s = "x" * 1000, 0.01
    with official.responses.stream(model="fake", input="hi") as events:
        running = next(event.response for event in events if event.type == "response.created")
        next(event for event in events if event.type == "response.output_text.delta")
        assert official.responses.retrieve(running.id).status == "in_progress"
        error = ask(client, status=400, previous_response_id=running.id)["error"]
        assert "in_progress" in error["message"]
        response = client.get(f"{PATH}/{running.id}?stream=true")
        assert response.json()["error"]["param"] == "stream"
        cancelled = official.responses.cancel(running.id)
        assert cancelled.status == "cancelled"
        last = list(events)[-1]
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"
    assert last.response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert last.response.output == cancelled.output
    assert 0 < len(cancelled.output_text) < 1000
    wait_until(lambda: llm.engine.finished["cancelled"] == 1)
    # Cancelling a response that has ended changes nothing.
    assert official.responses.cancel(running.id).to_dict() == cancelled.to_dict()


def test_a_response_that_the_client_leaves_is_cancelled(official: OpenAI, llm: FakeLLM) -> None:
    llm.engine.words, llm.engine.pause_s = "x" * 1000, 0.01
    with official.responses.stream(model="fake", input="hi") as events:
        left = next(event.response for event in events if event.type == "response.created")
        next(event for event in events if event.type == "response.output_text.delta")
    wait_until(lambda: llm.engine.finished["cancelled"] == 1)
    wait_until(lambda: official.responses.retrieve(left.id).status == "cancelled")


def test_a_failure_is_an_error_and_a_failed_response(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.fails_after = 3
    events = stream(client)
    assert kinds(events)[-3:] == ["output_item.done", "error", "failed"]
    assert events[-2]["code"] == "generation_failed"
    failed = events[-1]["response"]
    STRICT.validate_python(failed, strict=True)
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert "step failed" in failed["error"]["message"]
    assert failed["output"][0]["status"] == "incomplete"
    assert client.get(f"{PATH}/{failed['id']}").json()["status"] == "failed"
    error = ask(client, status=500)["error"]
    assert (error["type"], error["code"]) == ("server_error", "generation_failed")


def test_input_tokens_are_counted(official: OpenAI) -> None:
    counted = official.responses.input_tokens.count(model="fake", input="hello")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 7)
    made = official.responses.create(model="fake", input="hello")
    assert made.usage is not None
    assert made.usage.input_tokens == counted.input_tokens


def test_a_long_conversation_is_cut_only_if_asked(client: httpx.Client, llm: FakeLLM) -> None:
    turns = [
        {"role": role, "content": f"{number} {role} " + "x" * 500}
        for number in range(6)
        for role in ("user", "assistant")
    ]
    body = {"instructions": "Be brief.", "input": [*turns, {"role": "user", "content": "end"}]}
    error = ask(client, status=400, **body)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    ask(client, **body, truncation="auto")
    kept = llm.conversations[-1]
    assert kept[0] == {"role": "system", "content": "Be brief."}
    assert kept[-1]["content"] == "end"
    assert [turn["role"] for turn in kept[1:3]] == ["user", "assistant"]
    prompt = len(llm.engine.requests[-1].prompt)
    assert 4096 - 512 - 1100 < prompt <= 4096 - 512  # one turn more would be too much
    short = {**body, "input": "hi"}
    ask(client, **short, truncation="auto")
    assert len(llm.conversations[-1]) == 2


@pytest.mark.parametrize("path", [f"{PATH}/compact", f"{PATH}/resp_1"])
def test_a_call_that_is_not_there_is_a_404(shared: httpx.Client, path: str) -> None:
    response = shared.post(path, json={"input": "hi"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "unknown_url")
    assert error["message"] == f"POST {path} does not exist."


def test_old_responses_leave_the_store(llm: FakeLLM) -> None:
    options = Options(port=0, stored_responses=2)
    with serving(llm, options) as server, httpx.Client(base_url=server.address) as client:
        ids = [ask(client)["id"] for _ in range(3)]
        found = [client.get(f"{PATH}/{name}").status_code for name in ids]
        assert found == [404, 200, 200]
    with (
        serving(llm, Options(port=0, stored_responses=0)) as server,
        httpx.Client(base_url=server.address) as client,
    ):
        assert client.get(f"{PATH}/{ask(client)['id']}").status_code == 404
