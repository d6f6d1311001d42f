"""Routes and keys."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from headroom.options import Options
from tests.server.fakes import FakeLLM, FakeTokenizer, serving

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def test_health_is_200_while_requests_are_accepted(shared: httpx.Client) -> None:
    response = shared.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert shared.head("/health").status_code == 200


def test_health_names_the_worker_whose_loss_has_stopped_the_engine(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.alive, llm.engine.trouble = False, "Worker 1 is lost: gone."
    response = client.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "engine stopped", "reason": "Worker 1 is lost: gone."}


def test_health_is_503_when_the_engine_has_stopped(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.alive = False
    response = client.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "engine stopped"})


def test_the_one_model_is_listed_and_shown(shared: httpx.Client) -> None:
    listed = shared.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["context_length"]) == ("fake", "model", 4096)
    assert shared.get("/v1/models/fake").json() == model
    missing = shared.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/nowhere", 404, "GET /nowhere does not exist."),
        ("GET", CHAT + "/", 404, f"GET {CHAT}/ does not exist."),
        ("GET", CHAT, 405, f"GET {CHAT} is not allowed."),
        ("DELETE", "/v1/models", 405, "DELETE /v1/models is not allowed."),
        ("OPTIONS", CHAT, 405, f"OPTIONS {CHAT} is not allowed."),
        ("GET", "/docs", 404, "GET /docs does not exist."),
        (
            "POST",
            "/chat/completions",
            404,
            f"POST /chat/completions does not exist. Did you mean {CHAT}?",
        ),
        ("POST", f"/v1{CHAT}", 404, f"POST /v1{CHAT} does not exist. Did you mean {CHAT}?"),
        ("POST", CHAT + "/", 404, f"POST {CHAT}/ does not exist. Did you mean {CHAT}?"),
        ("GET", "/models", 404, "GET /models does not exist. Did you mean /v1/models?"),
    ],
)
def test_unknown_routes_and_methods_get_an_openai_error_object(
    shared: httpx.Client, method: str, path: str, status: int, message: str
) -> None:
    response = shared.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["message"], error["type"]) == (message, "invalid_request_error")
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic sécret".encode("latin-1")},
        {b"Authorization": "Basic sécret".encode()},
        {"Authorization": "Bearer"},
        {"Authorization": "sécret".encode("latin-1")},
    ],
)
def test_without_the_key_only_health_and_the_page_answer(headers: Any) -> None:
    options = Options(port=0, api_key="sécret")
    with (
        serving(FakeLLM(), options) as server,
        httpx.Client(base_url=server.address, headers=headers) as client,
    ):
        assert client.get("/health").status_code == 200
        guarded = ["/v1/models", "/metrics", "/props", "/plan", "/experts"]
        for method, path in (("POST", CHAT), *(("GET", path) for path in guarded)):
            response = client.request(method, path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        right = {b"Authorization": "Bearer sécret".encode()}
        assert client.post(CHAT, json=BODY, headers=right).status_code == 200


def test_an_unexpected_error_is_a_500_with_an_openai_error_object(
    client: httpx.Client, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "prepare_chat", lambda chat: 1 / 0)
    response = client.post(CHAT, json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "The server failed; its log has the details."


LONG = "a" * 3000  # characters, which are tokens of the fake model
TURNS = [{"role": "user", "content": LONG}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": LONG}),
        ("/detokenize", {"tokens": [97] * len(LONG)}),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 1, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": [97] * len(LONG), "max_tokens": 1, "echo": True}),
        ("/v1/embeddings", {"input": LONG}),
        ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 1}),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 16}),
        ("/v1/responses/input_tokens", {"input": LONG}),
        ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": TURNS}),
        ("/v1/messages/count_tokens", {"model": "m", "messages": TURNS}),
        ("/api/chat", {"model": "fake", "messages": TURNS, "stream": False}),
        ("/api/generate", {"model": "fake", "prompt": LONG, "stream": False}),
        ("/api/generate", {"model": "fake", "prompt": LONG, "raw": True, "stream": False}),
        ("/api/embed", {"model": "fake", "input": LONG}),
        ("/api/embeddings", {"model": "fake", "prompt": LONG}),
    ],
)
def test_long_texts_are_never_encoded_or_decoded_on_the_event_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    on_the_loop: list[bool] = []

    def record(given: Sequence[object]) -> None:
        if len(given) >= len(LONG):
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                on_the_loop.append(False)
            else:
                on_the_loop.append(True)

    encode, decode = FakeTokenizer.encode, FakeTokenizer.decode

    def recorded_encode(self: FakeTokenizer, text: str, **options: Any) -> list[int]:
        record(text)
        return encode(self, text, **options)

    def recorded_decode(self: FakeTokenizer, ids: Sequence[int], **options: Any) -> str:
        record(ids)
        return decode(self, ids, **options)

    monkeypatch.setattr(FakeTokenizer, "encode", recorded_encode)
    monkeypatch.setattr(FakeTokenizer, "decode", recorded_decode)
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert on_the_loop
    assert not any(on_the_loop)
