"""Ollama's chat, generate and embed calls: lines, fields, options and refusals."""

import json
import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from headroom.options import Options
from headroom.server.shelf import Shelf
from tests.server.fakes import FakeLLM, serving, wait_until
from tests.synth_models import write_model

CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def lines_of(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def check_end(line: dict[str, Any], reason: str = "stop") -> None:
    """Check the fields that every finished answer has."""
    assert (line["model"], line["done"], line["done_reason"]) == ("fake", True, reason)
    datetime.fromisoformat(line["created_at"])
    assert all(type(line[name]) is int and line[name] >= 0 for name in DURATIONS)
    assert line["prompt_eval_duration"] == 2_000_000
    assert line["eval_duration"] == 3_000_000
    assert line["prompt_eval_count"] > 0
    assert line["eval_count"] > 0


def test_a_chat_streams_messages_line_by_line_unless_told_otherwise(client: httpx.Client) -> None:
    *pieces, last = lines_of(client.post(CHAT, json={"model": "fake", "messages": HI}))
    assert "".join(piece["message"]["content"] for piece in pieces) == "Hello, world."
    for piece in pieces:
        assert set(piece) == {"model", "created_at", "message", "done"}
        assert (piece["message"]["role"], piece["done"]) == ("assistant", False)
    assert last["message"] == {"role": "assistant", "content": ""}
    check_end(last)
    whole = client.post(CHAT, json={"model": "fake", "messages": HI, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello, world."}
    check_end(whole)
    assert set(whole) == set(last)


def test_thoughts_come_apart_from_the_content(client: httpx.Client, llm: FakeLLM) -> None:
    llm.thinks, llm.engine.words = True, "<think>Hm.</think>Yes."
    body = {"model": "fake", "messages": HI, "think": True}
    lines = lines_of(client.post(CHAT, json=body))
    assert "".join(line["message"].get("thinking", "") for line in lines) == "Hm."
    assert "".join(line["message"]["content"] for line in lines) == "Yes."
    whole = client.post(CHAT, json={**body, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": "Yes.", "thinking": "Hm."}
    assert llm.chats[0].thinking.enabled is True
    client.post(CHAT, json={**body, "think": "high"})
    client.post(CHAT, json={**body, "think": False})
    client.post(CHAT, json={**body, "think": None})
    asked = [(chat.thinking.enabled, chat.thinking.effort) for chat in llm.chats[2:]]
    assert asked == [(True, "high"), (False, None), (None, None)]


def test_tool_calls_are_whole_objects_in_one_line(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.words = f"Look: {CALL}{CALL}"
    body = {"model": "fake", "messages": HI, "tools": [TOOL]}
    lines = lines_of(client.post(CHAT, json=body))
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Oslo"}] * 2
    assert [call["function"]["name"] for call in calls] == ["get_weather"] * 2
    assert len({call["id"] for call in calls}) == 2
    assert "".join(line["message"]["content"] for line in lines).strip() == "Look:"
    whole = client.post(CHAT, json={**body, "stream": False}).json()
    shown = whole["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in shown] == [{"city": "Oslo"}] * 2
    assert whole["done_reason"] == "stop"
    assert llm.chats[0].tools[0].name == "get_weather"


def test_a_call_that_breaks_off_reaches_the_client_as_text(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.words = CALL
    most = CALL.index("Oslo") + 2
    options = {"num_predict": most}
    body = {"model": "fake", "messages": HI, "tools": [TOOL], "options": options}
    lines = lines_of(client.post(CHAT, json=body))
    assert lines[-1]["done_reason"] == "length"
    assert not any("tool_calls" in line["message"] for line in lines)
    said = "".join(line["message"]["content"] for line in lines)
    assert "get_weather" in said
    assert "Os" in said
    whole = client.post(CHAT, json={**body, "stream": False}).json()
    assert "get_weather" in whole["message"]["content"]


def test_calls_and_their_results_reach_the_model_with_ids_that_match(
    client: httpx.Client, llm: FakeLLM
) -> None:
    called = [
        {"function": {"name": "one", "arguments": {"x": 1}}},
        {"id": "mine", "function": {"name": "two", "arguments": {}}},
        {"function": {"name": "one", "arguments": {"x": 2}}},
    ]
    messages = [
        *HI,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": called, "images": []},
        {"role": "tool", "tool_name": "two", "content": "2"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "tool_name": "one", "content": "3"},
    ]
    client.post(CHAT, json={"model": "fake", "messages": messages})
    _, assistant, *results = llm.conversations[0]
    calls = assistant["tool_calls"]
    assert assistant["reasoning_content"] == "Hm."
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [
        {"x": 1},
        {},
        {"x": 2},
    ]
    by_content = {turn["content"]: turn["tool_call_id"] for turn in results}
    assert by_content == {"2": "mine", "1": calls[0]["id"], "3": calls[2]["id"]}
    assert [turn["name"] for turn in results] == ["two", "one", "one"]


LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello " * 6000},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize("fields", [{}, {"truncate": True}, {"stream": False}])
def test_the_oldest_turns_of_a_chat_beyond_the_context_are_left_out(
    client: httpx.Client, llm: FakeLLM, fields: dict[str, Any]
) -> None:
    response = client.post(CHAT, json={"model": "fake", "messages": LONG, **fields})
    if fields.get("stream") is False:
        assert response.json()["message"]["content"] == "Hello, world."
    else:
        check_end(lines_of(response)[-1])
    assert [turn["content"] for turn in llm.conversations[-1]] == ["Be brief.", "And now?"]
    assert len(llm.prompts) == 1


def test_a_chat_beyond_the_context_is_refused_if_nothing_may_be_left_out(
    client: httpx.Client,
) -> None:
    body = {"model": "fake", "messages": LONG, "truncate": False}
    response = client.post(CHAT, json=body)
    assert response.status_code == 400
    assert "the context holds 4096" in response.json()["error"]


@pytest.mark.parametrize(
    ("choice", "mode", "tools"),
    [("none", "none", 1), ("required", "required", 1), ("any", "required", 1), ("", "auto", 1)],
)
def test_a_choice_of_tools_reaches_the_model(
    client: httpx.Client, llm: FakeLLM, choice: str, mode: str, tools: int
) -> None:
    body = {"model": "fake", "messages": HI, "tools": [TOOL], "tool_choice": choice}
    lines_of(client.post(CHAT, json=body))
    assert (llm.chats[0].tool_choice.mode, len(llm.chats[0].tools)) == (mode, tools)


def test_options_are_the_engines_settings(client: httpx.Client, llm: FakeLLM) -> None:
    options = {
        "temperature": 0.5, "top_k": 20.0, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2,
        "repeat_last_n": 32, "seed": 7, "num_predict": 5, "stop": ["x"], "presence_penalty": 0.25,
        "frequency_penalty": 0.75, "num_gpu": 99, "mirostat": 0, "typical_p": 1.0,
    }  # fmt: skip
    client.post(CHAT, json={"model": "fake", "messages": HI, "options": options})
    params = llm.engine.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 20, 0.9, 0.1)
    assert (params.repetition_penalty, params.penalty_window) == (1.2, 32)
    assert (params.presence_penalty, params.frequency_penalty) == (0.25, 0.75)
    assert (params.seed, params.max_tokens, params.stop) == (7, 5, ("x",))


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        ({"num_predict": -1}, "max_tokens", None),
        ({"num_predict": -2}, "max_tokens", None),
        ({"num_predict": 0}, "max_tokens", None),
        ({"repeat_last_n": -1}, "penalty_window", 0),
        ({"repeat_last_n": 0, "repeat_penalty": 1.5}, "repetition_penalty", 1.0),
        ({"top_k": -1}, "top_k", 0),
        ({"stop": "end"}, "stop", ("end",)),
    ],
)
def test_odd_numbers_mean_what_they_mean_to_ollama(
    client: httpx.Client, llm: FakeLLM, given: dict[str, Any], setting: str, value: object
) -> None:
    client.post(CHAT, json={"model": "fake", "messages": HI, "options": given})
    assert getattr(llm.engine.requests[0].params, setting) == value


def test_a_negative_seed_is_drawn_anew_each_time(client: httpx.Client, llm: FakeLLM) -> None:
    for _ in range(2):
        client.post(CHAT, json={"model": "fake", "messages": HI, "options": {"seed": -1}})
    first, second = (request.params.seed for request in llm.engine.requests)
    assert first != second
    assert min(first, second) >= 0


def test_formats_reach_the_model(client: httpx.Client, llm: FakeLLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given in ("json", schema, ""):
        client.post(CHAT, json={"model": "fake", "messages": HI, "format": given})
    formats = [chat.output_format for chat in llm.chats]
    assert [None if form is None else (form.kind, form.value) for form in formats] == [
        ("json_object", None),
        ("json_schema", schema),
        None,
    ]


def test_a_num_ctx_beyond_the_context_is_logged(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for wanted in (4096, 8192):
            options = {"num_ctx": wanted}
            client.post(CHAT, json={"model": "fake", "messages": HI, "options": options})
    (told,) = [record.getMessage() for record in caplog.records if "num_ctx" in record.getMessage()]
    assert "num_ctx is 8192, but the model was loaded with a context of 4096 tokens" in told


def test_generate_answers_a_prompt_with_a_context_that_continues_it(
    client: httpx.Client, llm: FakeLLM
) -> None:
    body = {"model": "fake", "prompt": "one", "system": "Be brief.", "stream": False}
    first = client.post(GENERATE, json=body).json()
    assert first["response"] == "Hello, world."
    check_end(first)
    assert bytes(first["context"][1:]) == b"Be brief.\none\nHello, world."
    assert [turn["role"] for turn in llm.conversations[0]] == ["system", "user"]
    more = {"model": "fake", "prompt": "two", "context": first["context"]}
    *pieces, last = lines_of(client.post(GENERATE, json=more))
    assert "".join(piece["response"] for piece in pieces) == "Hello, world."
    assert list(llm.engine.requests[1].prompt) == [*first["context"], *b"two\n"]
    assert last["context"] == [*first["context"], *b"two\nHello, world."]
    assert last["response"] == ""


def test_a_raw_prompt_is_continued_as_it_is(client: httpx.Client, llm: FakeLLM) -> None:
    body = {"model": "fake", "prompt": "one", "raw": True, "stream": False}
    answer = client.post(GENERATE, json=body).json()
    assert llm.conversations == []
    assert bytes(llm.engine.requests[0].prompt[1:]) == b"one"
    assert "context" not in answer


def test_logprobs_come_with_each_piece(client: httpx.Client) -> None:
    body = {"model": "fake", "messages": HI, "logprobs": True, "top_logprobs": 2, "stream": False}
    scored = client.post(CHAT, json=body).json()["logprobs"]
    assert "".join(entry["token"] for entry in scored) == "Hello, world."
    assert scored[1]["logprob"] == -0.25
    assert [len(entry["top_logprobs"]) for entry in scored] == [2] * 13
    lines = lines_of(client.post(CHAT, json={**body, "stream": True}))
    assert [entry for line in lines for entry in line.get("logprobs", [])] == scored


def test_texts_get_vectors_of_length_1(client: httpx.Client) -> None:
    answer = client.post("/api/embed", json={"model": "fake", "input": ["a", "b"]}).json()
    assert len(answer["embeddings"]) == 2
    assert sum(value * value for value in answer["embeddings"][0]) == pytest.approx(1)
    assert answer["prompt_eval_count"] == 4
    one = client.post("/api/embed", json={"model": "fake", "input": "a"}).json()
    assert one["embeddings"] == answer["embeddings"][:1]
    older = client.post("/api/embeddings", json={"model": "fake", "prompt": "a"}).json()
    assert older == {"embedding": one["embeddings"][0]}
    long = client.post("/api/embed", json={"model": "fake", "input": "x" * 5000})
    assert long.json()["prompt_eval_count"] == 4095
    short = client.post("/api/embeddings", json={"model": "fake", "prompt": "a" * 5000})
    assert short.json() == {"embedding": [1.0, *[0.0] * 7]}
    refused = client.post(
        "/api/embed", json={"model": "fake", "input": "x" * 5000} | {"truncate": False}
    )
    assert refused.status_code == 400
    nothing = client.post("/api/embed", json={"model": "fake", "input": ""})
    assert (nothing.status_code, nothing.json()["embeddings"]) == (200, [])


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (CHAT, {"messages": HI}, "model"),
        (CHAT, {"model": "", "messages": HI}, "model"),
        (CHAT, {"model": "fake", "messages": [{"role": "nobody", "content": "x"}]}, "nobody"),
        (CHAT, {"model": "fake", "messages": [{**HI[0], "images": ["aGk="]}]}, "pictures"),
        (CHAT, {"model": "fake", "messages": HI, "think": "lots"}, "think"),
        (CHAT, {"model": "fake", "messages": HI, "format": "xml"}, "format"),
        (CHAT, {"model": "fake", "messages": HI, "keep_alive": "soon"}, "keep_alive"),
        (CHAT, {"model": "fake", "messages": HI, "options": {"mirostat": 2}}, "mirostat"),
        (CHAT, {"model": "fake", "messages": HI, "options": {"temperature": -1}}, "temperature"),
        (CHAT, {"model": "fake", "messages": HI, "tools": [TOOL, TOOL]}, "get_weather"),
        (CHAT, {"model": "fake", "messages": [{"role": "user", "content": "x" * 5000}]}, "5002"),
        (GENERATE, {"model": "fake", "prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"model": "fake", "prompt": "x", "images": ["aGk="]}, "pictures"),
        (GENERATE, {"model": "fake", "prompt": "x", "suffix": "y"}, "`suffix` cannot be used"),
        (GENERATE, {"model": "fake", "prompt": "x", "context": [999]}, "999"),
        (GENERATE, {"model": "fake", "prompt": "x", "context": [1], "raw": True}, "context"),
        ("/api/embed", {"model": "fake", "input": 3}, "input"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_ollamas_shape(
    shared: httpx.Client, path: str, body: dict[str, Any], told: str
) -> None:
    response = shared.post(path, json=body)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert told in response.json()["error"]


def test_an_error_in_a_stream_is_its_last_line(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.fails_after = 3
    lines = lines_of(client.post(CHAT, json={"model": "fake", "messages": HI}))
    assert lines[-1] == {"error": "The step failed."}
    whole = client.post(CHAT, json={"model": "fake", "messages": HI, "stream": False})
    assert (whole.status_code, whole.json()) == (500, {"error": "The step failed."})


def test_a_client_that_waits_long_gets_lines_that_add_nothing(llm: FakeLLM) -> None:
    llm.engine.prefill_s = 0.3
    options = Options(port=0, keep_alive=0.05)
    with serving(llm, options) as server, httpx.Client(base_url=server.address) as http:
        lines = lines_of(http.post(CHAT, json={"model": "fake", "messages": HI}))
    assert lines[0]["message"] == {"role": "assistant", "content": ""}
    assert lines[0]["done"] is False
    assert "".join(line["message"]["content"] for line in lines) == "Hello, world."


def test_a_client_that_leaves_ends_its_request(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.pause_s = 0.05
    with client.stream("POST", CHAT, json={"model": "fake", "messages": HI}) as response:
        next(response.iter_lines())
    wait_until(lambda: llm.engine.was_cancelled(llm.engine.requests[0].id))


@pytest.fixture
def loadable(tmp_path: Path) -> Iterator[tuple[httpx.Client, Shelf]]:
    """A server over a model that can be unloaded."""
    path = write_model("qwen3", "q8_0", tmp_path, few_layers=True)
    options = Options(port=0, device="cpu", context=256, threads=1)
    with Shelf.of_files({"small": path}, options) as shelf:
        shelf.load_first()
        with serving(shelf, options) as server, httpx.Client(base_url=server.address) as http:
            yield http, shelf


def test_calls_without_words_load_and_unload_the_model(
    loadable: tuple[httpx.Client, Shelf],
) -> None:
    http, shelf = loadable
    gone = http.post(GENERATE, json={"model": "small", "keep_alive": 0}).json()
    assert (gone["done"], gone["done_reason"], gone["response"]) == (True, "unload", "")
    assert shelf.engines() == {}
    assert http.get("/api/ps").json() == {"models": []}
    back = http.post(CHAT, json={"model": "small:latest", "messages": []}).json()
    assert (back["done_reason"], back["model"]) == ("load", "small:latest")
    assert back["message"] == {"role": "assistant", "content": ""}
    assert list(shelf.engines()) == ["small"]


def test_keep_alive_says_when_the_model_goes(loadable: tuple[httpx.Client, Shelf]) -> None:
    http, shelf = loadable
    body = {"model": "small", "prompt": "one", "stream": False, "options": {"num_predict": 2}}
    assert http.post(GENERATE, json={**body, "keep_alive": "10m"}).json()["eval_count"] == 2
    assert 590 < shelf.models[0].idle_left_s <= 600
    assert http.post(GENERATE, json={**body, "keep_alive": -1}).json()["done"]
    assert shelf.models[0].idle_left_s == float("inf")
    assert http.post(GENERATE, json={**body, "keep_alive": 0}).json()["done"]
    wait_until(lambda: shelf.engines() == {})
    assert http.post(GENERATE, json={**body, "keep_alive": "5m"}).json()["done"]
    assert list(shelf.engines()) == ["small"]
