"""/v1/chat/completions with a fake model."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.server.fakes import TIMINGS, FakeLLM, events_of, openai_usage, wait_until

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def ask(client: httpx.Client, **settings: Any) -> Any:
    response = client.post(PATH, json={"messages": [USER], **settings})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, **settings: Any) -> list[Any]:
    response = client.post(PATH, json={"messages": [USER], "stream": True, **settings})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(response.text)


def test_an_answer_has_text_reason_counts_and_times(client: httpx.Client) -> None:
    answer = ask(client, seed=7)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["model"], answer["seed"]) == ("fake", 7)
    choice = answer["choices"][0]
    message = {"role": "assistant", "content": "Hello, world.", "refusal": None, "annotations": []}
    assert choice == {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"] == openai_usage(4, 14)
    assert answer["timings"] == {
        "cached_tokens": 0,
        "queue_ms": 1.0,
        "prefill_ms": 2.0,
        "prefill_tokens_per_second": 2000.0,
        "decode_ms": 3.0,
        "decode_tokens_per_second": 4333.333,
    }


def test_the_timings_of_an_answer_have_the_cost_of_cold_experts(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.timings = replace(TIMINGS, experts={"hit_rate": 0.9, "cold_picks": 7})
    answer = ask(client)
    assert answer["timings"]["experts"] == {"hit_rate": 0.9, "cold_picks": 7}
    assert stream(client)[-2]["timings"]["experts"]["hit_rate"] == 0.9


def test_an_answer_that_a_stop_text_ends_reports_the_cost_of_its_experts(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.cost, llm.engine.pause_s = {"hit_rate": 0.5}, 0.01
    # An engine that reports no expert costs.
    assert "experts" not in ask(client, stop=["wor"])["timings"]
    llm.engine.reports_costs = True
    answer = ask(client, stop=["wor"])
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello, ", "stop")
    assert answer["usage"]["completion_tokens"] == len("Hello, wor")
    assert answer["timings"]["experts"] == {"hit_rate": 0.5}
    assert stream(client, stop=["wor"])[-2]["timings"]["experts"] == {"hit_rate": 0.5}


def test_a_stream_names_the_speaker_then_the_text_then_the_reason(client: httpx.Client) -> None:
    *chunks, end = stream(client, seed=7)
    assert end == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[:-1]) == "Hello, world."
    assert deltas[-1] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["timings"]["decode_ms"] == 3.0
    assert chunks[-1]["seed"] == 7
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(client: httpx.Client) -> None:
    *chunks, last, _ = stream(client, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == openai_usage(4, 14)
    assert last["timings"]["prefill_ms"] == 2.0


def test_settings_reach_the_engine(client: httpx.Client, llm: FakeLLM) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
        "frequency_penalty": 0.1, "presence_penalty": -0.1, "penalty_window": 64, "seed": 5,
        "ignore_eos": True, "max_tokens": 3,
    }  # fmt: skip
    ask(client, **given, logit_bias={"65": -100}, stop="x", user="me")
    params = llm.engine.requests[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert (params.logit_bias, params.stop) == ({65: -100.0}, ("x",))


def test_left_out_settings_are_as_openai_has_them(client: httpx.Client, llm: FakeLLM) -> None:
    seeds = {ask(client)["seed"] for _ in range(3)}
    params = llm.engine.requests[0].params
    assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 1.0, None)
    assert len(seeds) == 3
    assert {request.params.seed for request in llm.engine.requests} == seeds


def test_max_completion_tokens_goes_before_max_tokens(client: httpx.Client) -> None:
    answer = ask(client, max_completion_tokens=5, max_tokens=2)
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_minus_one_token_means_until_the_end(
    client: httpx.Client, llm: FakeLLM, field: str
) -> None:
    answer = ask(client, **{field: -1})
    assert answer["choices"][0]["message"]["content"] == "Hello, world."
    assert llm.engine.requests[0].params.max_tokens is None


@pytest.mark.parametrize("stop", ["wor", [", w", "zzz"], ["d", "wor"]])
def test_a_stop_text_ends_the_answer_and_is_not_shown(
    client: httpx.Client, llm: FakeLLM, stop: Any
) -> None:
    llm.engine.pause_s = 0.03  # the engine must not be done before it is told to stop
    first = stop if isinstance(stop, str) else min(stop, key=lambda text: _place(llm, text))
    expected = llm.engine.words.partition(first)[0]
    answer = ask(client, stop=stop)
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(expected) + len(first)
    wait_until(lambda: llm.engine.finished["cancelled"] == 1)
    chunks = stream(client, stop=stop)[:-1]
    assert "".join(_content(chunk) for chunk in chunks) == expected


def _place(llm: FakeLLM, text: str) -> int:
    return llm.engine.words.find(text) % 1000


def _content(chunk: Any) -> str:
    return str(chunk["choices"][0]["delta"].get("content", ""))


def test_n_answers_share_seed_and_prompt_and_differ_by_draw(
    client: httpx.Client, llm: FakeLLM
) -> None:
    answer = ask(client, n=3, seed=9)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [request.params.draw for request in llm.engine.requests] == [0, 1, 2]
    assert {request.params.seed for request in llm.engine.requests} == {9}
    assert answer["usage"] == openai_usage(4, 42)


def test_n_streamed_answers_come_interleaved_by_index(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.pause_s = 0.005
    chunks = stream(client, n=2)[:-1]
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += _content(chunk)
    assert texts == {0: "Hello, world.", 1: "Hello, world."}
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)
    assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks) == 2
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_logprobs_go_with_every_token_shown(client: httpx.Client) -> None:
    content = ask(client, logprobs=True, top_logprobs=2, max_tokens=2)["choices"][0]["logprobs"]
    tops = [
        {"token": "\x00", "logprob": -0.5, "bytes": [0]},
        {"token": "\x01", "logprob": -1.5, "bytes": [1]},
    ]
    # Minus infinity has no JSON, so the least number stands for it.
    assert content["content"] == [
        {"token": "H", "logprob": -9999.0, "bytes": [72], "top_logprobs": tops},
        {"token": "e", "logprob": -0.25, "bytes": [101], "top_logprobs": tops},
    ]


def test_streamed_logprobs_are_those_of_the_whole_answer(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.words = "Grüße, Welt 🙂 world."
    settings = {"logprobs": True, "top_logprobs": 1, "stop": ["world"]}
    whole = ask(client, **settings)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in stream(client, **settings)[:-1]]
    pieces = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
    assert [entry for piece in pieces for entry in piece] == whole["logprobs"]["content"]
    shown = bytes(byte for entry in whole["logprobs"]["content"] for byte in entry["bytes"])
    assert shown.decode() == whole["message"]["content"] == "Grüße, Welt 🙂 "
    assert whole["logprobs"]["content"][2]["token"] == "bytes:\\xc3"


def test_roles_and_parts_become_what_templates_know(client: httpx.Client, llm: FakeLLM) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "user", "content": "", "name": "me"},
    ]
    assert client.post(PATH, json={"messages": turns}).status_code == 200
    assert llm.conversations[0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "user", "content": "", "name": "me"},
    ]


def test_messages_of_assistants_and_tools_may_have_no_content(
    client: httpx.Client, llm: FakeLLM
) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": None, "tool_call_id": "1"},
    ]
    assert client.post(PATH, json={"messages": turns}).status_code == 200
    assert [turn["content"] for turn in llm.conversations[0]] == [USER["content"], "", "", "", ""]
    refused = client.post(PATH, json={"messages": [{"role": "user", "content": None}]})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "`messages[0]`: a message needs content."


def test_pictures_in_results_of_tools_are_named_and_left_out(
    client: httpx.Client, llm: FakeLLM
) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]
    turns = [
        USER,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": parts, "tool_call_id": "1"},
    ]
    assert client.post(PATH, json={"messages": turns}).status_code == 200
    shown = llm.conversations[0][2]["content"]
    assert shown == "see\n[image left out: this model reads text only]"


@pytest.mark.parametrize(
    ("fields", "more"), [({"continue_final_message": True}, {}), ({}, {"prefix": True})]
)
def test_a_last_message_of_the_assistant_is_continued_if_asked_for(
    client: httpx.Client, llm: FakeLLM, fields: dict[str, Any], more: dict[str, Any]
) -> None:
    begun = {"role": "assistant", "content": "It is", **more}
    body = {"messages": [USER, begun], "add_generation_prompt": False, **fields}
    assert client.post(PATH, json=body).status_code == 200
    assert client.post(PATH, json={"messages": [USER, begun]}).status_code == 200
    assert [chat.continues for chat in llm.chats] == [True, "prefix" in more]
    assert llm.conversations[0][1] == {"role": "assistant", "content": "It is"}


def test_an_engine_that_is_full_answers_503_and_drops_the_rest(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.takes, llm.engine.pause_s = 2, 0.2
    response = client.post(PATH, json={"messages": [USER], "n": 3})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "capacity_exceeded"
    assert all(llm.engine.was_cancelled(request.id) for request in llm.engine.requests)


def test_an_engine_that_fails_answers_500_with_its_words(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.fails_after = 3
    response = client.post(PATH, json={"messages": [USER]})
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["message"], error["type"]) == ("The step failed.", "server_error")


def test_an_engine_that_fails_in_a_stream_ends_it_with_an_error(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.fails_after = 3
    *chunks, last = stream(client)
    assert "".join(_content(chunk) for chunk in chunks) == "Hel"
    assert last["error"] == {
        "message": "The step failed.",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }


def test_more_answers_than_the_queue_can_ever_hold_are_a_400(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.capacity = 2
    response = client.post(PATH, json={"messages": [USER], "n": 3})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(
        "3 answers were asked for; the server gives at most 2 at once."
    )
    assert error["param"] == "n"
    assert llm.engine.requests == []


def called(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}, **more}


def result(content: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_earlier_calls_may_have_no_id_no_type_and_arguments_of_any_form(
    client: httpx.Client, llm: FakeLLM
) -> None:
    calls = [
        called("a", None, id="", type=None),
        called("b", {"x": "é"}, id=None),
        called("c", '{"x": 2}', id="mine", type="function"),
        called("d", ""),
    ]
    results = [result("C", "mine"), result("A", ""), result("B", ""), result("D", "")]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    ask(client, messages=[USER, turn, *results])
    stream(client, messages=[USER, turn, *results])
    for _, assistant, *answers in llm.conversations:
        made = assistant["tool_calls"]
        assert [call["function"]["arguments"] for call in made] == [
            "{}",
            '{"x": "é"}',
            '{"x": 2}',
            "",
        ]
        assert {call["type"] for call in made} == {"function"}
        ids = [call["id"] for call in made]
        assert (len(set(ids)), ids[2]) == (4, "mine")
        assert [answer["tool_call_id"] for answer in answers] == ["mine", ids[0], ids[1], ids[3]]


def test_an_earlier_function_call_may_have_an_object_as_arguments(
    client: httpx.Client, llm: FakeLLM
) -> None:
    turn = {"role": "assistant", "function_call": {"name": "a", "arguments": {"x": 1}}}
    ask(client, messages=[USER, turn, {"role": "function", "name": "a", "content": "1"}])
    (call,) = llm.conversations[0][1]["tool_calls"]
    assert call["function"]["arguments"] == '{"x": 1}'


@pytest.mark.parametrize("given", ["", [""], ["", "wor"]])
def test_empty_stop_texts_are_left_out(client: httpx.Client, llm: FakeLLM, given: Any) -> None:
    ask(client, stop=given, top_k=-1)
    assert llm.params[0].stop == (("wor",) if "wor" in given else ())
    assert llm.params[0].top_k == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": True, "thinking_budget": 0},
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
    ],
)
def test_a_budget_of_0_turns_thoughts_off(
    client: httpx.Client, llm: FakeLLM, fields: dict[str, Any]
) -> None:
    ask(client, **fields)
    assert llm.chats[0].thinking.enabled is False
