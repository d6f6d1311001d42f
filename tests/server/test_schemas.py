"""Bad input is refused with a 4xx and OpenAI's error object; never a 500, never a hang."""

import gzip
import http.client
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given as fuzz
from hypothesis import settings
from hypothesis import strategies as st

from headroom.options import Options
from headroom.server import openai_completions
from headroom.server.openai_chat import ChatBody
from headroom.server.openai_completions import CompletionBody
from headroom.server.openai_embeddings import EmbeddingBody
from headroom.server.schemas import Body
from tests.server.fakes import FakeLLM, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return error


WRONG_SETTINGS = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": []}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2.5}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 1000}, "frequency_penalty"),
    ({"presence_penalty": -1000}, "presence_penalty"),
    ({"penalty_window": -1}, "penalty_window"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**12}, "n"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": [""] * 17}, "stop"),
    ({"n_predict": "many"}, "max_tokens"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x"] * 100_000}, "stop"),
    ({"stop": "x" * 100_000}, "stop"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"258": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 5}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"user": 5}, "user"),
    ({"model": 5}, "model"),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("given", "param"), WRONG_SETTINGS, ids=lambda value: str(value)[:40].replace("/", "")
)
def test_a_wrong_setting_is_refused_by_name(
    shared: httpx.Client, path: str, given: dict[str, Any], param: str
) -> None:
    subject = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    response = shared.post(path, json={**subject, **given})
    assert problem(response, 400)["param"] == param


WRONG_CHATS = [
    ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ({}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {"role": "user", "content": "hi"}}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "wizard", "content": "hi"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [USER], "logprobs": 3}, "logprobs"),
    ({"messages": [USER], "top_logprobs": 3}, "top_logprobs"),
    ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": [{"role": "tool", "content": "42"}]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "42", "tool_call_id": ""}]},
     "messages[0].tool_call_id"),
    ({"messages": [{"role": "function", "content": "42"}]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "content": "", "audio": {"id": "1"}}]},
     "messages[0].audio"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 7}]}]},
     "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]},
                   {"role": "tool", "content": "42", "tool_call_id": ""}]},
     "messages[1].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "mcp"}]}]},
     "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {}}]}]},
     "messages[0].tool_calls[0].function.name"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {**CALL, "function": {"name": "f", "arguments": [1]}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), WRONG_CHATS, ids=lambda value: str(value)[:60])
def test_a_wrong_conversation_is_refused(
    shared: httpx.Client, body: dict[str, Any], param: str
) -> None:
    assert problem(shared.post(CHAT, json=body), 400)["param"] == param


WRONG_COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"prompt": None},
    {"prompt": []},
    {"prompt": 5},
    {"prompt": [[]]},
    {"prompt": ["a", 5]},
    {"prompt": [5, "a"]},
    {"prompt": [[5], "a"]},
    {"prompt": [1.5]},
    {"prompt": [True]},
    {"prompt": [-1]},
    {"prompt": [258]},
    {"prompt": [[65], [258]]},
    {"prompt": [10**30]},
    {"prompt": [None]},
    {"prompt": "x" * 5000},
    {"prompt": [65] * 4096},
    {"prompt": ["a"] * 100, "n": 100},
]


@pytest.mark.parametrize("body", WRONG_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_wrong_prompt_is_refused(shared: httpx.Client, body: dict[str, Any]) -> None:
    assert problem(shared.post(COMPLETIONS, json=body), 400)["param"] == "prompt"


@pytest.mark.parametrize(
    ("given", "param"),
    [({"suffix": "end"}, "suffix"), ({"best_of": 3}, "best_of"), ({"logprobs": 21}, "logprobs")],
)
def test_what_completions_cannot_do_is_refused(
    shared: httpx.Client, given: dict[str, Any], param: str
) -> None:
    response = shared.post(COMPLETIONS, json={"prompt": "hi", **given})
    assert problem(response, 400)["param"] == param


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"mirostat": 2}, "mirostat"),
        ({"grammar": "root ::= 'x'"}, "grammar"),
        ({"min_tokens": 5}, "min_tokens"),
    ],
)
def test_known_fields_that_cannot_be_honoured_are_refused(
    shared: httpx.Client, path: str, given: dict[str, Any], param: str
) -> None:
    subject = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    error = problem(shared.post(path, json={**subject, **given}), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_completions_refuse_what_only_chats_have(
    shared: httpx.Client, given: dict[str, Any], param: str
) -> None:
    error = problem(shared.post(COMPLETIONS, json={"prompt": "hi", **given}), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_chats_refuse_what_they_cannot_honour(
    shared: httpx.Client, given: dict[str, Any], param: str
) -> None:
    error = problem(shared.post(CHAT, json={"messages": [USER], **given}), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_that_do_not_change_the_answer_are_accepted(shared: httpx.Client, path: str) -> None:
    subject = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    harmless = {
        "store": True, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto",
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s",
        "verbosity": "low", "prediction": {"type": "content", "content": "x"}, "session_id": "1",
        "cache_prompt": True, "parallel_tool_calls": True, "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "modalities": ["text"], "min_tokens": 0,
        "top_k": -1, "stop": [""], "input": "", "system": None, "options": {}, "typical": 1.0,
        "text": {"format": {"type": "text"}}, "typical_p": 1.0,
        "skip_special_tokens": True, "n_predict": 3, "repeat_penalty": 1.1,
        "stream_options": None, "no_such_field": 5,
    }  # fmt: skip
    response = shared.post(path, json={**subject, **harmless})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 3


def test_an_image_is_refused_in_words(shared: httpx.Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    turn = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}
    error = problem(shared.post(CHAT, json={"messages": [turn]}), 400)
    assert error["message"] == (
        "`messages[0].content`: parts of type 'image_url' are not supported, only text."
    )


def test_the_error_of_a_prompt_beyond_the_context_has_both_numbers(shared: httpx.Client) -> None:
    error = problem(shared.post(COMPLETIONS, json={"prompt": "x" * 4095}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        "The prompt has 4096 tokens and the context holds 4096, the answer included. "
        "Shorten the prompt or raise --context."
    )


BROKEN = [
    b"",
    b"\xef\xbb\xbf",
    b"{",
    b"nothing",
    b"[]",
    b"5",
    b'"text"',
    b"null",
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800", "max_tokens": NaN}',
    b'{"prompt": "\\ud800"',
    b'{"prompt": "\\ud800", "user": ' + b"[" * 19_000 + b"]" * 19_000 + b"}",
    b"\xff\xfe{\x00}\x00",
    b'{"prompt": "hi", "temperature": NaN}',
    b'{"prompt": "hi", "temperature": Infinity}',
    b'{"prompt": "hi", "top_p": -Infinity}',
    b'{"prompt": "hi", "temperature": 1e999}',
    b'{"prompt": "hi", "logit_bias": {"5": NaN}}',
    b'{"prompt": "hi", "logit_bias": {"5": 1e999}}',
    b'{"prompt": "hi", "seed": 1' + b"0" * 5000 + b"}",
    b'{"prompt": [1' + b"0" * 5000 + b"]}",
    b'{"prompt": "hi", "temperature": 1' + b"0" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 19_000,
    b'{"prompt": ' + b"[" * 19_000 + b"]" * 19_000 + b"}",
    b'{"user": ' + b'{"a":' * 19_000 + b"1" + b"}" * 19_000 + b', "prompt": "hi"}',
]


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"a\ud83d", "a\ufffd"),
        (r"\ude42b", "\ufffdb"),
        (r"\ud83d\ud83d\ude42 \n", "\ufffd\U0001f642 \n"),
        (r"\\ud83d \ud83d\u0041", r"\ud83d " + "\ufffdA"),
    ],
)
def test_half_of_a_surrogate_pair_is_read_as_the_replacement_character(
    client: httpx.Client, llm: FakeLLM, escaped: str, text: str
) -> None:
    body = b'{"prompt": "%s", "max_tokens": 1}' % escaped.encode()
    assert client.post(COMPLETIONS, content=body).status_code == 200
    assert bytes(llm.engine.requests[0].prompt[1:]).decode() == text


def test_a_packed_body_is_refused_with_what_to_leave_out(shared: httpx.Client) -> None:
    packed = gzip.compress(b'{"prompt": "hi"}')
    answer = shared.post(COMPLETIONS, content=packed, headers={"Content-Encoding": "gzip"})
    error = problem(answer, 415)
    assert error["code"] == "unsupported_media_type"
    assert error["message"] == (
        "The body has the content encoding 'gzip'; the server unpacks no bodies. "
        "Send it without Content-Encoding."
    )


def test_a_body_may_begin_with_a_byte_order_mark(shared: httpx.Client) -> None:
    answer = shared.post(COMPLETIONS, content=b'\xef\xbb\xbf{"prompt": "hi", "max_tokens": 1}')
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("body", BROKEN, ids=lambda body: str(body[:40]))
def test_a_broken_body_is_refused(shared: httpx.Client, body: bytes) -> None:
    problem(shared.post(COMPLETIONS, content=body), 400)


HOSTILE = [
    b'{"messages": [' + b"0," * 900_000 + b"0]}",
    b'{"messages": [{"role": "user", "content": [' + b"0," * 900_000 + b"0]}]}",
    b'{"messages": [{"role": "assistant", "tool_calls": [' + b"0," * 900_000 + b"0]}]}",
    b'{"messages": [{"role":"user","content":"a"}], "stop": [' + b"0," * 900_000 + b"0]}",
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: str(body[:50]))
def test_millions_of_wrong_items_are_refused_by_naming_a_few(
    shared: httpx.Client, body: bytes
) -> None:
    answer = shared.post(CHAT, content=body)
    problem(answer, 400)
    assert len(answer.content) < 2000  # not a sentence for each of the 900,000 items


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_a_body_of_10_mb_is_refused(shared: httpx.Client, path: str) -> None:
    error = problem(shared.post(path, content=b"x" * 10_000_000), 413)
    assert error["code"] == "request_too_large"
    assert error["message"] == (
        "The body has more than 8388608 bytes. "
        "Send less, or start the server with a larger --max-body."
    )


def test_a_body_of_10_mb_in_chunks_is_refused(shared: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(160):
            yield b"x" * 65_536

    assert problem(shared.post(CHAT, content=chunks()), 413)["code"] == "request_too_large"


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize(("size", "status"), [(2047, 200), (2048, 200), (2049, 413)])
def test_a_body_may_have_exactly_as_many_bytes_as_the_limit(
    llm: FakeLLM, size: int, status: int, in_chunks: bool
) -> None:
    body = json.dumps({"prompt": "x"}).encode().ljust(size)
    sent = iter([body[:1000], body[1000:]]) if in_chunks else body
    with serving(llm, Options(port=0, max_body=2048)) as server:
        answer = httpx.post(
            server.address + COMPLETIONS, content=sent, headers={"content-type": "application/json"}
        )
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("most", "beyond"),
    [
        ({"stop": ["x" * 1024]}, {"stop": ["x" * 1025]}),
        ({"stop": ["x"] * 16}, {"stop": ["x"] * 17}),
        ({"n": 128}, {"n": 129}),
        ({"n": 1}, {"n": 0}),
        ({"logit_bias": {"1": 100, "2": -100}}, {"logit_bias": {"1": 100.001}}),
        ({"logit_bias": {"1": -100}}, {"logit_bias": {"1": -100.001}}),
        ({"logit_bias": {"257": 1}}, {"logit_bias": {"258": 1}}),
        ({"prompt": [257, 0]}, {"prompt": [258]}),
        ({"prompt": [1] * 4095}, {"prompt": [1] * 4096}),
        ({"logprobs": 20}, {"logprobs": 21}),
        ({"max_tokens": -1}, {"max_tokens": -2}),
        ({"max_tokens": 2**31 - 1}, {"max_tokens": 2**31}),
        ({"top_k": -1}, {"top_k": -2}),
        ({"temperature": 100}, {"temperature": 100.1}),
        ({"temperature": 0}, {"temperature": -0.1}),
        ({"top_p": 1}, {"top_p": 1.001}),
        ({"min_p": 0}, {"min_p": -0.001}),
        ({"repetition_penalty": 100}, {"repetition_penalty": 0}),
        ({"seed": 2**63 - 1}, {"seed": 2**63}),
        ({"seed": -(2**63)}, {"seed": -(2**63) - 1}),
    ],
    ids=lambda body: str(body)[:40],
)
def test_a_field_may_be_as_large_as_its_limit_and_no_larger(
    shared: httpx.Client, most: dict[str, Any], beyond: dict[str, Any]
) -> None:
    small = {"prompt": "x", "max_tokens": 1}
    assert shared.post(COMPLETIONS, json=small | most).status_code == 200
    error = problem(shared.post(COMPLETIONS, json=small | beyond), 400)
    assert error["param"].split("[")[0] in beyond


def test_prompts_times_n_may_be_as_many_as_the_limit_and_no_more(
    shared: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_completions, "MAX_ANSWERS", 6)
    for prompts, n, status in ((3, 2, 200), (6, 1, 200), (7, 1, 400), (3, 3, 400)):
        body = {"prompt": ["x"] * prompts, "n": n, "max_tokens": 1}
        assert shared.post(COMPLETIONS, json=body).status_code == status


def test_no_more_answers_are_begun_than_the_engine_takes(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.capacity = 3
    assert client.post(COMPLETIONS, json={"prompt": "x", "n": 3}).status_code == 200
    error = problem(client.post(COMPLETIONS, json={"prompt": "x", "n": 4}), 400)
    assert error["param"] == "n"


def test_a_token_id_beyond_the_vocabulary_or_beyond_31_bits_is_refused(
    shared: httpx.Client,
) -> None:
    for token, message in (
        (2**31 - 1, "Token id 2147483647 is outside the vocabulary of 258."),
        (2**31, "`prompt`: 2147483648 is not a token id."),
        (-1, "`prompt`: -1 is not a token id."),
    ):
        assert (
            problem(shared.post(COMPLETIONS, json={"prompt": [token]}), 400)["message"] == message
        )


def test_every_prompt_is_checked_before_any_is_begun(client: httpx.Client, llm: FakeLLM) -> None:
    error = problem(client.post(COMPLETIONS, json={"prompt": [[1], [2], [258]], "n": 2}), 400)
    assert error["message"] == "Token id 258 is outside the vocabulary of 258."
    assert llm.engine.requests == []


def test_a_body_that_is_announced_as_enormous_is_refused_unread(shared: httpx.Client) -> None:
    connection = http.client.HTTPConnection(shared.base_url.host, shared.base_url.port or 0)
    connection.putrequest("POST", CHAT)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(10**15))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_never_comes_is_not_waited_for(
    shared: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.server.schemas.BODY_S", 0.1)
    connection = http.client.HTTPConnection(shared.base_url.host, shared.base_url.port or 0)
    connection.putrequest("POST", CHAT)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b'{"messages":')
    assert connection.getresponse().status == 408
    connection.close()


def test_a_wrong_model_is_answered_by_the_only_one_unless_the_server_is_strict(
    shared: httpx.Client,
) -> None:
    bodies = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "hi"}}
    for path, body in bodies.items():
        answer = shared.post(path, json={"model": "gpt-9", **body})
        assert (answer.status_code, answer.json()["model"]) == (200, "fake")
    with serving(FakeLLM(), Options(port=0, strict_model=True)) as server:
        for path, body in bodies.items():
            asked = {"model": "gpt-9", **body}
            error = problem(httpx.post(server.address + path, json=asked), 404)
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert error["message"] == "The model 'gpt-9' does not exist. This server has 'fake'."


def test_the_right_model_and_unknown_fields_and_nulls_are_accepted(shared: httpx.Client) -> None:
    body = {
        "model": "fake", "messages": [USER], "store": True, "metadata": {"a": [1]}, "stop": None,
        "temperature": None, "n": None, "logit_bias": None, "tools": [], "service_tier": "auto",
        "functions": [], "function_call": "none", "modalities": ["text"], "min_tokens": 0,
        "response_format": {"type": "text"}, "parallel_tool_calls": False,
    }  # fmt: skip
    assert shared.post(CHAT, json=body).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a1", max_size=3), inner),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@fuzz(
    path=st.sampled_from(
        [(CHAT, ChatBody), (COMPLETIONS, CompletionBody), (EMBEDDINGS, EmbeddingBody)]
    ),
    changes=st.dictionaries(st.integers(0, 100), JSON, min_size=1, max_size=3),
)
def test_no_value_of_any_field_is_the_servers_fault(
    shared: httpx.Client, path: tuple[str, type[Body]], changes: dict[int, Any]
) -> None:
    fields = list(path[1].model_fields)
    changed = {fields[number % len(fields)]: value for number, value in changes.items()}
    subject = {
        CHAT: {"messages": [USER]},
        COMPLETIONS: {"prompt": "hi"},
        EMBEDDINGS: {"input": "hi"},
    }
    body = {**subject[path[0]], **changed}
    assert shared.post(path[0], json=body).status_code in (200, 400, 404)


def test_a_body_that_is_no_object_is_refused_in_plain_words(shared: httpx.Client) -> None:
    error = shared.post("/v1/chat/completions", json=[1]).json()["error"]
    assert error["message"] == "The body must be an object, not a list."
    error = shared.post("/v1/chat/completions", json={"messages": ["hi"]}).json()["error"]
    assert error["message"] == "`messages[0]` must be an object, not a text."
    assert (error["param"], error["code"]) == ("messages[0]", "invalid_type")
