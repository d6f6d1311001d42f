"""/v1/completions over a model that says what it is told to."""

from typing import Any

import httpx
import pytest

from tests.server.fakes import BOS, FakeLLM, events_of

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
