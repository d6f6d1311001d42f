"""Routes, keys, origins, start and stop."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from headroom.errors import OptionError
from headroom.options import Options
from headroom.server.app import bind
from tests.server.fakes import FakeLLM, events_of, serving, wait_until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", ["/", "/health"])
def test_health_is_200_while_requests_are_taken(shared: httpx.Client, path: str) -> None:
    response = shared.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert shared.head(path).status_code == 200


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
def test_without_the_key_only_health_answers(headers: Any) -> None:
    options = Options(port=0, api_key="sécret")
    with (
        serving(FakeLLM(), options) as server,
        httpx.Client(base_url=server.address, headers=headers) as client,
    ):
        assert client.get("/health").status_code == 200
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics")):
            response = client.request(method, path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        right = {b"Authorization": "Bearer sécret".encode()}
        assert client.post(CHAT, json=BODY, headers=right).status_code == 200


def test_other_origins_may_call_only_when_allowed() -> None:
    headers = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    with serving(FakeLLM(), Options(port=0, cors="http://a.example")) as server:
        asked = httpx.options(server.address + CHAT, headers=headers)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "http://a.example"
        answer = httpx.post(server.address + CHAT, json=BODY, headers=headers)
        assert answer.headers["access-control-allow-origin"] == "http://a.example"
        strange = {**headers, "Origin": "http://b.example"}
        assert httpx.options(server.address + CHAT, headers=strange).status_code == 400


def test_an_unexpected_error_is_a_500_with_an_openai_error_object(
    client: httpx.Client, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "prepare_chat", lambda chat: 1 / 0)
    response = client.post(CHAT, json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "The server failed on its own."


def test_a_stop_ends_running_streams_with_an_error_and_refuses_new_ones() -> None:
    llm = FakeLLM()
    llm.engine.prefill_s = 60.0
    with serving(llm, Options(port=0)) as server:
        texts: list[str] = []
        statuses: list[int] = []

        def ask(*, stream: bool) -> None:
            answer = httpx.post(server.address + CHAT, json={**BODY, "stream": stream}, timeout=30)
            statuses.append(answer.status_code)
            texts.append(answer.text)

        threads = [threading.Thread(target=ask, kwargs={"stream": way}) for way in (True, False)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(llm.engine.requests) == 2)
        server.should_exit = True
        for thread in threads:
            thread.join(timeout=5)
        assert sorted(statuses) == [200, 503]
    errors = [events_of(text)[-1] for text in texts if text.startswith("data:")]
    assert [error["error"]["code"] for error in errors] == ["shutting_down"]
    assert all(llm.engine.was_cancelled(request.id) for request in llm.engine.requests)


def test_a_port_in_use_is_a_one_line_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError) as caught, serving(FakeLLM(), Options(port=port)):
            pass
    assert str(caught.value) == (
        f"Cannot listen on 127.0.0.1:{port}: Address already in use. "
        "Choose another --port or --host."
    )


def test_a_host_that_does_not_exist_is_a_one_line_error() -> None:
    with pytest.raises(
        OptionError, match=r"^Cannot listen on no\.such\.host\.invalid:80: .+\. Choose"
    ):
        bind("no.such.host.invalid", 80)


def test_connections_are_refused_before_the_server_listens() -> None:
    with (
        bind("127.0.0.1", 0) as bound,
        pytest.raises(ConnectionRefusedError),
        socket.create_connection(bound.getsockname(), timeout=5),
    ):
        pass


PROGRAM = """
from headroom.log import start_logging
from headroom.options import Options
from headroom.server.app import bind, run_server
from tests.server.fakes import FakeLLM

start_logging()
llm = FakeLLM()
llm.engine.prefill_s = 60.0
run_server(llm, Options(port=0), bind("127.0.0.1", 0))
print("ended in order")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_in_order(number: int) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=root,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        ready = process.stderr.readline()
        assert "serve: ready on http://127.0.0.1:" in ready
        address = ready.split()[-1]
        with httpx.stream("POST", address + CHAT, json={**BODY, "stream": True}) as response:
            process.send_signal(number)
            assert events_of(response.read().decode())[-1]["error"]["code"] == "shutting_down"
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert output == "ended in order\n"
    assert [line.split(" ", 2)[2] for line in errors.splitlines()] == ["serve: stopping"]
