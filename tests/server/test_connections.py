"""Limits on connections: their number, and how long clients may take."""

import asyncio
import json
import logging
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest

from headroom.options import Options
from headroom.server import connections
from headroom.server.connections import (
    HANDSHAKES,
    HEALTH_CONNECTIONS,
    KEEP_ALIVE_S,
    AcceptErrors,
    HttpParser,
    connection_limit,
)
from headroom.server.http_server import HttpServer
from tests.server.fakes import FakeLLM, make_certificate, needs_openssl, serving, wait_until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def connect(server: HttpServer, count: int = 1, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections, and send something over each."""
    url = httpx.URL(server.address)
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            client = socket.create_connection((url.host, url.port or 80), timeout=10)
            stack.enter_context(client)
            client.sendall(sent)
            opened.append(client)
        yield opened


def is_closed(client: socket.socket) -> bool:
    """Return whether the server has closed a connection, without an answer."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_idle_connections_are_kept_longer_than_clients_keep_them() -> None:
    assert KEEP_ALIVE_S > 60
    with serving(FakeLLM(), Options(port=0)) as server:
        assert server.config.timeout_keep_alive == KEEP_ALIVE_S


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ", b"GET /health HTTP/1.1\r\n\r\nGET"],
)
def test_a_client_that_sends_no_whole_request_is_disconnected(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    with serving(FakeLLM(), Options(port=0)) as server, connect(server, 3, sent) as clients:
        wait_until(lambda: not server.server_state.connections)
        for client in clients:
            while client.recv(4096):  # the answers to whole requests that came before
                pass


def test_a_connection_between_two_requests_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    with (
        serving(FakeLLM(), Options(port=0)) as server,
        httpx.Client(base_url=server.address) as client,
    ):
        assert client.get("/health").status_code == 200
        (connection,) = server.server_state.connections
        time.sleep(1.5)  # more than one round in which late clients are disconnected
        assert client.get("/health").status_code == 200
        assert set(server.server_state.connections) == {connection}


def test_a_client_that_does_not_read_is_disconnected_and_its_answer_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headroom.server")
    monkeypatch.setattr(connections, "READ_S", 0.2)
    llm = FakeLLM()
    llm.engine.words = "word " * 10_000
    llm.engine.pause_s = 0.002  # the answer lasts long after the buffers are full
    asked = {**BODY, "stream": True, "logprobs": True, "top_logprobs": 20}
    body = json.dumps(asked).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with serving(llm, Options(port=0)) as server, connect(server, 1, request):
        wait_until(lambda: bool(llm.engine.finished), 30)
        wait_until(lambda: not server.server_state.connections)
        assert llm.engine.finished == {"cancelled": 1}
    assert "connections: disconnected a client that has read nothing for 0 s" in caplog.messages


def test_a_new_client_takes_the_place_of_the_one_that_was_idle_longest() -> None:
    options = Options(port=0, max_connections=4)
    with serving(FakeLLM(), options) as server, connect(server, 4) as clients:
        wait_until(lambda: len(server.server_state.connections) == 4)
        assert httpx.get(server.address + "/v1/models").status_code == 200
        wait_until(lambda: is_closed(clients[0]))
        assert not is_closed(clients[3])


def test_when_all_clients_are_busy_others_get_503_but_for_health() -> None:
    llm = FakeLLM()
    llm.engine.prefill_s = 60.0
    options = Options(port=0, max_connections=2, drain=0)
    with serving(llm, options) as server, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(
                httpx.stream("POST", server.address + CHAT, json={**BODY, "stream": True})
            )
        refused = httpx.get(server.address + "/v1/models")
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert "2 open connections" in refused.json()["error"]["message"]
        assert httpx.get(server.address + "/health").status_code == 200
        # Those that only wait are replaced, so that nobody can take the last places.
        with connect(server, HEALTH_CONNECTIONS + 5):
            assert httpx.get(server.address + "/health").status_code == 200


def test_what_is_not_http_gets_an_error_object(caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving(FakeLLM(), Options(port=0)) as server,
        connect(server, 1, b"\x16\x03\x01\r\n\r\n") as (client,),
    ):
        answer = client.makefile().read()
    assert answer.startswith("HTTP/1.1 400 ")
    assert '"code": "invalid_http"' in answer
    refused = [record for record in caplog.records if "Invalid HTTP" in record.message]
    assert [record.name for record in refused] == ["headroom.server"]


def test_a_request_with_long_headers_is_refused() -> None:
    sent = b"GET /health HTTP/1.1\r\n" + b"".join(
        b"X-%d: " % number + bytes([97]) * 1000 + b"\r\n" for number in range(80)
    )
    with serving(FakeLLM(), Options(port=0)) as server, connect(server, 1, sent) as (client,):
        assert client.makefile().read().startswith("HTTP/1.1 400 ")


def test_long_headers_are_refused_even_if_they_arrive_in_one_piece() -> None:
    parser = HttpParser(64 << 10)
    parser.receive_data(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 64_000 + b"\r\n\r\n")
    assert isinstance(parser.next_event(), h11.Request)
    parser = HttpParser(64 << 10)
    parser.receive_data(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 66_000 + b"\r\n\r\n")
    with pytest.raises(h11.RemoteProtocolError):
        parser.next_event()
    for head in (b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n"):
        with (
            serving(FakeLLM(), Options(port=0)) as server,
            connect(server, 1, head % (b"a" * 100_000)) as (client,),
        ):
            assert client.makefile().read().startswith("HTTP/1.1 400 ")


def test_the_number_of_connections_leaves_descriptors_for_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "descriptor_limit", lambda: 300)
    limit = connection_limit(1024)
    assert 0 < limit < 300 - HEALTH_CONNECTIONS
    assert f"at most {limit} of 1024, because this process may open 300 files" in caplog.text
    assert connection_limit(5) == 5
    monkeypatch.setattr(connections, "descriptor_limit", lambda: None)
    assert connection_limit(1024) == 1024


def test_an_accept_error_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    handler = AcceptErrors(lambda: now[0])
    loop = asyncio.new_event_loop()
    error = OSError(24, "Too many open files")
    context = {"message": "socket.accept() out of system resource", "exception": error}
    for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
        handler(loop, context)
    assert len(caplog.records) == 2
    handler(loop, {"message": "something else"})
    assert caplog.records[-1].getMessage().startswith("something else")
    loop.close()


PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from headroom.log import start_logging
from headroom.options import Options
from headroom.server.http_server import bind, run_server
from tests.server.fakes import FakeLLM

start_logging()
run_server(FakeLLM(), Options(port=0, **OPTIONS), bind("127.0.0.1", 0))
"""


@contextmanager
def few_descriptors(**options: str) -> Iterator[str]:
    """Run a server that may open 200 files; yield its address. It logs next to nothing."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("OPTIONS", repr(options))],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            lines = [process.stderr.readline() for _ in range(2)]
            assert "because this process may open 200 files" in lines[0]
            yield lines[1].split()[-1]
        finally:
            process.terminate()
            errors = process.communicate(timeout=20)[1]
    assert len(errors.splitlines()) <= 3


def assert_health_answers_with_250_clients(
    address: str, trusted: ssl.SSLContext, wrap: Callable[[socket.socket], socket.socket]
) -> None:
    """Open connections that `wrap` completes and that ask nothing; then ask for /health."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 500, "250 connections are opened"
    url = httpx.URL(address)
    with ExitStack() as stack:
        for _ in range(250):
            client = socket.create_connection((url.host, url.port or 80), timeout=20)
            stack.enter_context(wrap(client))
        for _ in range(3):
            answer = httpx.get(address + "/health", timeout=20, verify=trusted)
            assert answer.status_code == 200


def test_with_200_descriptors_and_250_idle_clients_health_still_answers() -> None:
    trusted = ssl.create_default_context()
    with few_descriptors() as address:
        assert_health_answers_with_250_clients(address, trusted, lambda client: client)


@needs_openssl
def test_with_tls_too_idle_clients_leave_health_its_descriptors(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "own")
    trusted = ssl.create_default_context(cafile=cert)

    def shake_hands(client: socket.socket) -> socket.socket:
        return trusted.wrap_socket(client, server_hostname="127.0.0.1")

    with few_descriptors(tls_cert=cert, tls_key=key) as address:
        assert_health_answers_with_250_clients(address, trusted, lambda client: client)
        assert_health_answers_with_250_clients(address, trusted, shake_hands)


@needs_openssl
def test_a_tls_client_that_begins_no_handshake_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.2)
    cert, key = make_certificate(tmp_path, "own")
    options = Options(port=0, tls_cert=cert, tls_key=key)
    with serving(FakeLLM(), options) as server, connect(server, 3) as clients:
        for client in clients:
            assert client.recv(1) == b""


@needs_openssl
def test_a_new_tls_client_takes_the_place_of_the_oldest_handshake(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "own")
    options = Options(port=0, tls_cert=cert, tls_key=key, max_connections=4)
    trusted = ssl.create_default_context(cafile=cert)
    with serving(FakeLLM(), options) as server, connect(server, HANDSHAKES) as clients:
        assert httpx.get(server.address + "/health", verify=trusted).status_code == 200
        wait_until(lambda: is_closed(clients[0]))
        assert not is_closed(clients[-1])
