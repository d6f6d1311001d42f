"""/v1/completions with a fake model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from headroom.llm import LLM
from headroom.options import Options
from headroom.server.openai_completions import MAX_ECHOED_LOGPROBS
from headroom.text.fill_in import FillIn
from tests.server.fakes import BOS, EOS, FakeLLM, events_of, serving

PATH = "/v1/completions"


def ask(client: httpx.Client, **body: Any) -> Any:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_a_prompt_is_text_texts_tokens_or_lists_of_them(
    client: httpx.Client, llm: FakeLLM, prompt: Any, tokens: list[list[int]]
) -> None:
    answer = ask(client, prompt=prompt, n=2)
    asked = [list(request.prompt) for request in llm.engine.requests]
    assert asked == [prompt for prompt in tokens for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(tokens)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_an_answer_has_16_tokens_unless_more_are_asked_for(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.words = "x" * 40
    answer = ask(client, prompt="a")
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert ask(client, prompt="a", max_tokens=20)["choices"][0]["text"] == "x" * 20


def test_a_stream_adds_up_to_the_whole(client: httpx.Client) -> None:
    response = client.post(PATH, json={"prompt": "a", "stream": True, "echo": True})
    *chunks, end = events_of(response.text)
    assert end == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "aHello, world."
    assert choices[-1]["finish_reason"] == "stop"
    assert "timings" in chunks[-1]


def test_logprobs_list_tokens_with_their_places(client: httpx.Client) -> None:
    logprobs = ask(client, prompt="a", logprobs=1, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["H", "e"],
        "token_logprobs": [-9999.0, -0.25],
        "top_logprobs": [{"\x00": -0.5, "H": -9999.0}, {"\x00": -0.5, "e": -0.25}],
        "text_offset": [0, 1],
    }


def test_an_echo_with_logprobs_covers_the_prompt(client: httpx.Client) -> None:
    choice = ask(client, prompt="añ", logprobs=0, echo=True, max_tokens=2)["choices"][0]
    assert choice["text"] == "añHe"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<s>", "a", "bytes:\\xc3", "bytes:\\xb1", "H", "e"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25, -9999.0, -0.25]
    assert logprobs["top_logprobs"][0] is None
    # The first token was added by the server and is not part of the text.
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3]


def test_a_streamed_echo_with_logprobs_covers_the_prompt_once(client: httpx.Client) -> None:
    body = {"prompt": "ab", "logprobs": 0, "echo": True, "max_tokens": 2, "stream": True}
    chunks = events_of(client.post(PATH, json=body).text)[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "abHe"
    pieces = [choice["logprobs"]["tokens"] for choice in choices if choice["logprobs"]]
    assert [token for piece in pieces for token in piece] == ["<s>", "a", "b", "H", "e"]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_and_an_echo_give_the_prompt_with_its_logprobs(
    client: httpx.Client, *, stream: bool
) -> None:
    body = {"prompt": ["ab", "c"], "logprobs": 0, "echo": True, "max_tokens": 0}
    if stream:
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        chunks = events_of(client.post(PATH, json=asked).text)[:-1]
        choices, usage = [chunk["choices"][0] for chunk in chunks[:-1]], chunks[-1]["usage"]
    else:
        answer = ask(client, **body)
        choices, usage = answer["choices"], answer["usage"]
    of_prompt = [[one for one in choices if one["index"] == index] for index in (0, 1)]
    assert ["".join(one["text"] for one in parts) for parts in of_prompt] == ["ab", "c"]
    assert [parts[-1]["finish_reason"] for parts in of_prompt] == ["length", "length"]
    scored = [
        [token for one in parts if one["logprobs"] for token in one["logprobs"]["tokens"]]
        for parts in of_prompt
    ]
    assert scored == [["<s>", "a", "b"], ["<s>", "c"]]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 0)


def test_no_tokens_without_an_echo_give_an_empty_text(client: httpx.Client) -> None:
    answer = ask(client, prompt="ab", max_tokens=0)
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["timings"]["decode_tokens_per_second"] is None


def test_answers_to_one_prompt_share_its_logprobs(client: httpx.Client, llm: FakeLLM) -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "logprobs": 1, "echo": True, "max_tokens": 1}
    choices = ask(client, **body)["choices"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [
        *[["<s>", "a", "b", "H"]] * 2,
        *[["<s>", "c", "H"]] * 2,
    ]
    assert choices[0]["logprobs"] == choices[1]["logprobs"]
    held = [request.prompt_logprobs for request in llm.engine.requests]
    assert held[0] is held[1]
    assert held[2] is held[3]
    assert held[0] is not held[2]


def test_an_echo_with_too_many_logprobs_is_refused_with_the_numbers(shared: httpx.Client) -> None:
    prompt = [97] * 400  # tokens
    body = {"prompt": [prompt, prompt], "logprobs": 20, "echo": True, "max_tokens": 1}
    assert 2 * 400 * 31 * 21 <= MAX_ECHOED_LOGPROBS < 2 * 400 * 32 * 21
    response = shared.post(PATH, json={**body, "n": 32})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "logprobs"
    assert "537600 logprobs: 800 prompt tokens x 32 answers each x 21" in error["message"]
    assert "at most 524288" in error["message"]
    assert "Lower n or logprobs" in error["message"]
    # Without an echo, nothing is held for the prompt.
    assert shared.post(PATH, json={**body, "n": 32, "echo": False}).status_code == 200


def test_an_echo_of_tokens_is_their_text(client: httpx.Client) -> None:
    answer = ask(client, prompt=[BOS, 97], echo=True, max_tokens=1, logprobs=0)["choices"][0]
    assert answer["text"] == "<s>aH"
    assert answer["logprobs"]["text_offset"] == [0, 3, 4]


def test_best_of_may_equal_n_and_an_empty_suffix_is_none(client: httpx.Client) -> None:
    answer = ask(client, prompt="a", n=2, best_of=2, suffix="")
    assert len(answer["choices"]) == 2


def test_each_of_several_answers_echoes_its_own_prompt(shared: httpx.Client) -> None:
    body = {"prompt": ["one ", "two "], "n": 2, "echo": True, "max_tokens": 5}
    choices = ask(shared, **body)["choices"]
    assert [choice["text"] for choice in choices] == ["one Hello"] * 2 + ["two Hello"] * 2
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


def test_a_suffix_becomes_a_prompt_with_a_gap(client: httpx.Client, llm: FakeLLM) -> None:
    llm.fill_in = FillIn(prefix=1, suffix=2, middle=3, stop_ids=frozenset([ord(",")]))
    body = {"prompt": "ab", "suffix": "yz", "max_tokens": 50}
    answer = ask(client, **body)
    ask(client, **{**body, "prompt": [BOS, 99]})
    first, second = llm.engine.requests
    assert first.prompt == (BOS, 1, *b"ab", 2, *b"yz", 3)
    assert second.prompt == (BOS, 1, 99, 2, *b"yz", 3)
    assert first.stop_ids == {EOS, ord(",")}
    assert [choice["text"] for choice in answer["choices"]] == ["Hello, world."]
    response = client.post(PATH, json={**body, "echo": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "echo")


def test_a_suffix_is_refused_where_the_vocabulary_has_no_tokens_for_it(
    client: httpx.Client,
) -> None:
    response = client.post(PATH, json={"prompt": "ab", "suffix": "yz"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert error["message"].startswith("fake has no tokens for filling in the middle")


def test_equal_prompts_of_one_call_have_draws_of_their_own(
    client: httpx.Client, llm: FakeLLM
) -> None:
    client.post(PATH, json={"prompt": ["a", "a"], "n": 2, "seed": 5})
    assert [request.params.draw for request in llm.engine.requests] == [0, 1, 2, 3]


def test_an_answer_has_16_tokens_unless_it_may_go_on_until_its_end(
    client: httpx.Client, llm: FakeLLM
) -> None:
    ask(client, prompt="a")
    ask(client, prompt="a", max_tokens=None)
    ask(client, prompt="a", max_tokens=-1)
    assert [request.params.max_tokens for request in llm.engine.requests] == [16, 16, None]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def real(tiny_path: Path) -> Iterator[httpx.Client]:
    """A server with random weights."""
    with (
        LLM(str(tiny_path), context=256, parallel=4, threads=1) as llm,
        serving(llm, Options(port=0)) as server,
        httpx.Client(base_url=server.address, timeout=60) as http,
    ):
        yield http


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_answers_match_the_format_that_is_asked_for(real: httpx.Client, path: str) -> None:
    subject: dict[str, Any] = {"prompt": "x"}
    if path != PATH:
        subject = {"messages": [{"role": "user", "content": "x"}]}

    def ask(**fields: Any) -> list[str]:
        body = {**subject, "temperature": 1, "max_tokens": 200, "n": 3, **fields}
        response = real.post(path, json=body)
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        finished = [choice for choice in choices if choice["finish_reason"] == "stop"]
        return [choice.get("text") or choice["message"]["content"] for choice in finished]

    named = {"name": "person", "schema": SCHEMA, "strict": True}
    for text in ask(response_format={"type": "json_schema", "json_schema": named}):
        jsonschema.validate(json.loads(text), SCHEMA)
    for text in ask(guided_json=SCHEMA, seed=2):
        jsonschema.validate(json.loads(text), SCHEMA)
    assert set(ask(guided_choice=["red", "green"])) <= {"red", "green"}
    assert all(
        re.fullmatch("[ab]{3}", text) for text in ask(structured_outputs={"regex": "[ab]{3}"})
    )
    lark = ask(grammar='start: "x" | "yy"')
    assert len(lark) == 3
    assert set(lark) <= {"x", "yy"}


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"type": "string", "pattern": "("}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: undefined_rule"}},
         "structured_outputs.grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "schema": {"type": "object", "properties": {"a": {"type": "no such type"}}}}}},
         "response_format.json_schema.schema"),
    ],
)  # fmt: skip
def test_a_format_that_cannot_be_compiled_is_a_400_of_its_field(
    real: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    subject: dict[str, Any] = {"prompt": "x"}
    if path != PATH:
        subject = {"messages": [{"role": "user", "content": "x"}]}
    response = real.post(path, json={**subject, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    if "response_format" in param:
        assert "/properties/a" in error["message"]
