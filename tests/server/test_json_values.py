"""No answer has NaN or an infinite number in its JSON, whatever was computed or written."""

import json
import sys
from typing import Any

import httpx
import pytest

from headroom.server.json_values import write_json
from tests.server.fakes import FakeLLM

INFINITE = float("inf")
SAY = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"size": {"type": "number"}}}
FUNCTION = {"type": "function", "function": {"name": "cut", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "cut", "arguments": {"size": 1e999}}\n</tool_call>'


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def finite(text: str) -> list[Any]:
    """The JSON values of a whole answer, of events or of lines, all of whose numbers are finite."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    values = [line for line in lines if line.startswith("{")]
    return [json.loads(value, parse_constant=refuse) for value in values]


def test_numbers_that_json_cannot_express_become_the_largest_number_or_null() -> None:
    value = {"a": [1, INFINITE, (-INFINITE, float("nan"))], "b": "ä", "c": None}
    largest = sys.float_info.max
    assert json.loads(write_json(value), parse_constant=refuse) == {
        "a": [1, largest, [-largest, None]],
        "b": "ä",
        "c": None,
    }
    assert write_json({"a": [1.5, "ä"]}) == '{"a":[1.5,"ä"]}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "logprobs": 2, "echo": True}),
        ("/v1/chat/completions", {"messages": SAY, "logprobs": True, "top_logprobs": 2}),
        (
            "/v1/responses",
            {"input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        ),
        ("/api/chat", {"messages": SAY, "logprobs": True, "top_logprobs": 2}),
        ("/api/generate", {"prompt": "hi", "logprobs": True}),
    ],
)
def test_a_token_without_probability_has_a_finite_logprob(
    client: httpx.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    # The engine's stand-in finds "H", the first letter of its answer, impossible.
    response = client.post(path, json={"model": "fake", **body, "stream": stream})
    assert response.status_code == 200
    assert finite(response.text)
    assert "-9999.0" in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"tools": [{"name": "cut", "input_schema": SCHEMA}], "max_tokens": 99}),
        ("/api/chat", {"tools": [FUNCTION]}),
        ("/v1/chat/completions", {"tools": [FUNCTION]}),
    ],
)
def test_a_call_with_a_number_that_no_float_holds_is_given_out(
    client: httpx.Client, llm: FakeLLM, path: str, body: dict[str, Any], stream: bool
) -> None:
    llm.engine.words = CALL
    asked = {"model": "fake", "messages": SAY, **body, "stream": stream}
    response = client.post(path, json=asked)
    assert response.status_code == 200
    assert finite(response.text)
    assert "cut" in response.text


def test_a_schema_with_such_a_number_is_repeated_with_the_largest_one(client: httpx.Client) -> None:
    tool = '{"type": "function", "name": "cut", "parameters": {"maximum": 1e999}}'
    body = f'{{"model": "fake", "input": "hi", "tools": [{tool}]}}'
    response = client.post("/v1/responses", content=body)
    assert response.status_code == 200
    [answer] = finite(response.text)
    assert answer["tools"][0]["parameters"]["maximum"] == sys.float_info.max
