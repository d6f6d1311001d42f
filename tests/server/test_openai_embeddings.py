"""/v1/embeddings: vectors of texts, read by the official client."""

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from headroom.llm import LLM
from headroom.options import Options
from headroom.server import ollama, openai_embeddings
from headroom.server.json_values import write_with_list
from headroom.server.service import MAX_EMBEDDED_TEXTS
from tests.server.fakes import HIDDEN, FakeLLM, serving

PATH = "/v1/embeddings"


def ask(client: httpx.Client, **body: Any) -> Any:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_has_vectors_of_length_1_in_order_and_counts(client: httpx.Client) -> None:
    answer = ask(client, input=["aaabbbb", "c"], model="any")
    assert answer["object"] == "list"
    assert answer["model"] == "fake"
    assert answer["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    first, second = answer["data"]
    assert (first["object"], first["index"], second["index"]) == ("embedding", 0, 1)
    assert first["embedding"] == pytest.approx([0.6, 0.8, *[0.0] * 6])
    assert second["embedding"] == pytest.approx([0.0, 0.0, 1.0, *[0.0] * 5])


@pytest.mark.parametrize("text", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_texts_and_tokens_are_taken_alone_and_in_lists(client: httpx.Client, text: Any) -> None:
    (vector,) = ask(client, input=text)["data"]
    assert vector["embedding"][:2] == pytest.approx([0.5**0.5, 0.5**0.5])


def test_fewer_dimensions_are_cut_and_scaled_again(client: httpx.Client) -> None:
    (vector,) = ask(client, input="aaabbbbcccc", dimensions=2)["data"]
    assert vector["embedding"] == pytest.approx([0.6, 0.8])


def test_base64_holds_the_same_values(client: httpx.Client) -> None:
    (plain,) = ask(client, input="abbb", encoding_format="float")["data"]
    (coded,) = ask(client, input="abbb", encoding_format="base64")["data"]
    values = np.frombuffer(base64.b64decode(coded["embedding"]), dtype="<f4")
    assert values.tolist() == pytest.approx(plain["embedding"])
    assert len(values) == HIDDEN


def test_texts_that_the_queue_cannot_hold_wait_for_the_others(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.at_once = 3
    answer = ask(client, input=["a" * size + "b" for size in range(1, 20)])
    for size, entry in enumerate(answer["data"], start=1):
        assert entry["embedding"][0] == pytest.approx(size / (size**2 + 1) ** 0.5)


def test_one_call_leaves_half_of_the_queue_to_others(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.capacity, llm.engine.prefill_s = 6, 0.01
    assert len(ask(client, input=["a"] * 10)["data"]) == 10
    assert llm.engine.most_running == 3


def test_an_engine_that_is_full_answers_503(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.takes = 0
    response = client.post(PATH, json={"input": "a"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "capacity_exceeded"


def test_an_engine_that_fails_answers_500(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.fails_after = 0
    response = client.post(PATH, json={"input": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "The step failed."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [300]}, "input"),
        ({"input": ["a", "x" * 5000]}, "input[1]"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "dimensions": "2"}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "model": 5}, "model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_input_is_refused_by_its_field(
    shared: httpx.Client, body: dict[str, Any], param: str
) -> None:
    response = shared.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_a_text_beyond_the_context_is_told_both_numbers(shared: httpx.Client) -> None:
    error = shared.post(PATH, json={"input": "x" * 5000}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "5001 tokens and the context holds 4096" in error["message"]


@pytest.fixture(scope="module")
def model(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), context=256, parallel=4, threads=1) as llm:
        yield llm


def test_the_official_client_reads_the_vectors_of_a_real_model(model: LLM) -> None:
    texts = ["one", "two and two", "z" * 100]
    with (
        serving(model, Options(port=0)) as server,
        OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.embeddings.create(model="any", input=texts)
        for entry, wanted in zip(answer.data, model.embed(texts), strict=True):
            np.testing.assert_allclose(entry.embedding, wanted, atol=1e-7)
        assert answer.usage.prompt_tokens == sum(len(text) for text in texts)
        short = client.embeddings.create(model="any", input="one", dimensions=7).data[0]
        np.testing.assert_allclose(short.embedding, model.embed("one", 7)[0], atol=1e-7)
        with pytest.raises(openai.BadRequestError, match="this model's vectors have 48"):
            client.embeddings.create(model="any", input="one", dimensions=49)


@pytest.mark.parametrize("path", [PATH, "/api/embed"])
def test_vectors_are_written_in_a_thread(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads: list[str] = []

    def watch(*given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return write_with_list(*given)

    for module in (ollama, openai_embeddings):
        monkeypatch.setattr(module, "write_with_list", watch)
    answer = client.post(path, json={"model": "any", "input": ["aaabbbb", "c"]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert [name.partition("_")[0] for name in threads] == ["prepare"]


def test_ollamas_call_takes_no_more_texts_than_openais(shared: httpx.Client) -> None:
    for path in (PATH, "/api/embed"):
        body = {"model": "any", "input": ["a"] * (MAX_EMBEDDED_TEXTS + 1)}
        answer = shared.post(path, json=body)
        assert answer.status_code == 400
        assert "2049 texts were given; at most 2048 are allowed" in answer.text
