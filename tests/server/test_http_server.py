"""Listening, loading and stopping."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from headroom.errors import DeviceError, OptionError, PlanError
from headroom.llm import LLM
from headroom.options import Options
from headroom.server.http_server import HttpServer, bind, check_tls, run_server
from headroom.server.model_card import loaded_card
from headroom.server.shelf import Shelf
from tests.server.fakes import (
    FakeLLM,
    events_of,
    make_certificate,
    needs_openssl,
    serving,
    wait_until,
)
from tests.synth_models import write_model

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_stop_ends_running_streams_with_an_error_and_refuses_new_ones() -> None:
    llm = FakeLLM()
    llm.engine.prefill_s = 60.0
    with serving(llm, Options(port=0, drain=0.1)) as server:
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


def test_a_server_whose_workers_are_lost_for_good_ends_with_an_error() -> None:
    llm = FakeLLM()
    server = HttpServer(llm, Options(port=0), bind("127.0.0.1", 0))
    llm.engine.trouble = "Worker 1 is lost: gone."  # the engine still starts it again
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.run)
        wait_until(lambda: server.started)
        assert httpx.get(server.address + "/health").json()["status"] == "restarting workers"
        llm.engine.alive = False
        with pytest.raises(DeviceError, match="Worker 1 is lost: gone"):
            running.result(timeout=20)


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


def test_a_second_server_cannot_take_the_port_before_the_first_has_started() -> None:
    with bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(OptionError, match=f"127.0.0.1:{port}: Address already in use"):
            bind("127.0.0.1", port)


def test_running_answers_may_end_when_the_server_is_told_to_stop() -> None:
    llm = FakeLLM()
    llm.engine.pause_s = 0.05
    answers: list[httpx.Response] = []
    with serving(llm, Options(port=0)) as server:
        ask = threading.Thread(
            target=lambda: answers.append(httpx.post(server.address + CHAT, json=BODY))
        )
        ask.start()
        wait_until(lambda: len(llm.engine.requests) == 1)
        server.should_exit = True
        ask.join(timeout=10)
    assert answers[0].status_code == 200, answers[0].text
    assert answers[0].json()["choices"][0]["message"]["content"] == llm.engine.words


class SlowLoad:
    """A load that waits for `go_on`, and then fails or goes on as any other."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.error: Exception | None = None

    def open(self, *, progress: Any, **how: Any) -> LLM:
        progress(3, 12)
        while not self.go_on.wait(0.01):
            progress(3, 12)
        if self.error is not None:
            raise self.error
        return LLM(progress=progress, **how)


@contextmanager
def loading(model: SlowLoad, tmp_path: Path) -> Iterator[HttpServer]:
    """Run a server whose first model is being loaded."""
    path = write_model("llama", "q8_0", tmp_path, few_layers=True)
    options = Options(port=0, context=256, device="cpu", threads=1, drain=0.1)
    shelf = Shelf.of_files({"slow": path}, options, cast(Any, model.open))
    shelf.announce_first_load()
    with serving(shelf, options) as server:
        wait_until(lambda: shelf.first_load is None or shelf.first_load.total > 0)
        yield server
    shelf.close()


def test_while_the_first_model_is_loaded_health_says_how_far_it_is(tmp_path: Path) -> None:
    model = SlowLoad()
    with loading(model, tmp_path) as server:
        health = httpx.get(server.address + "/health")
        assert health.status_code == 503
        assert health.json() == {"status": "loading", "progress": 0.25}
        answer = httpx.post(server.address + CHAT, json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "loading"
        assert answer.json()["error"]["message"].startswith("slow is being loaded: 25% are done.")
        (listed,) = httpx.get(server.address + "/v1/models").json()["data"]
        assert (listed["loaded"], listed["loading"]) == (False, 0.25)
        model.go_on.set()
        wait_until(lambda: httpx.get(server.address + "/health").status_code == 200)
        (listed,) = httpx.get(server.address + "/v1/models").json()["data"]
        assert (listed["loaded"], "loading" in listed) == (True, False)
        assert httpx.post(server.address + CHAT, json=BODY).status_code == 200


def test_a_stop_ends_a_load_that_goes_on(tmp_path: Path) -> None:
    with loading(SlowLoad(), tmp_path) as server:
        server.should_exit = True  # and the thread ends without an error


def test_a_first_model_that_cannot_be_loaded_ends_the_server_with_its_error() -> None:
    model = SlowLoad()
    model.error = PlanError("It does not fit.")
    model.go_on.set()
    card = replace(loaded_card(cast(LLM, FakeLLM())), name="slow", path=Path("slow.gguf"))
    shelf = Shelf([card], Options(), cast(Any, model.open))
    shelf.announce_first_load()
    with bind("127.0.0.1", 0) as bound, pytest.raises(PlanError, match="It does not fit"):
        run_server(shelf, Options(port=0), bound)


def upload(address: str) -> socket.socket:
    """Begin a request whose body does not come."""
    url = httpx.URL(address)
    client = socket.create_connection((url.host, url.port or 80), timeout=20)
    client.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        "Content-Length: 100\r\n\r\n{".encode()
    )
    return client


def test_a_stop_refuses_a_body_that_is_still_received() -> None:
    with serving(FakeLLM(), Options(port=0)) as server, upload(server.address) as client:
        wait_until(lambda: len(server.service.uploads) == 1)
        server.should_exit = True
        answer = client.makefile().read()
    assert answer.startswith("HTTP/1.1 503 ")
    assert json.loads(answer.partition("\n\n")[2])["error"]["code"] == "shutting_down"


PROGRAM = """
from headroom.log import start_logging
from headroom.options import Options
from headroom.server.http_server import bind, run_server
from tests.server.fakes import FakeLLM

start_logging()
llm = FakeLLM()
llm.engine.prefill_s = 60.0
run_server(llm, Options(port=0, drain=DRAIN), bind("127.0.0.1", 0))
print("ended in order")
"""


@contextmanager
def program(drain_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server in a process of its own; yield the process and the server's address."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("DRAIN", str(drain_s))],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        ready = process.stderr.readline()
        assert "serve: ready on http://127.0.0.1:" in ready
        try:
            yield process, ready.split()[-1]
        finally:
            process.kill()


def logged(errors: str) -> list[str]:
    """Return the log lines, but for those about requests, without their time and level."""
    lines = [line.split(" ", 2)[2] for line in errors.splitlines()]
    return [line for line in lines if not line.startswith("request: ")]


WAITS = "serve: stopping; 1 requests have {} s to end; a second signal ends them now"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_in_order(number: int) -> None:
    with program(0) as (process, address):
        with httpx.stream("POST", address + CHAT, json={**BODY, "stream": True}) as response:
            process.send_signal(number)
            assert events_of(response.read().decode())[-1]["error"]["code"] == "shutting_down"
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert output == "ended in order\n"
    assert logged(errors) == [WAITS.format(0)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_running_answers_at_once_and_quietly(number: int) -> None:
    with program(600) as (process, address), upload(address):
        with httpx.stream("POST", address + CHAT, json={**BODY, "stream": True}) as response:
            process.send_signal(number)
            assert process.stderr is not None
            first = process.stderr.readline()
            process.send_signal(number)
            with contextlib.suppress(httpx.RemoteProtocolError):
                response.read()
        output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "ended in order\n")
    assert "a second signal ends them now" in first
    assert logged(errors) == []


@needs_openssl
def test_a_certificate_makes_the_server_speak_https(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "own")
    options = Options(port=0, tls_cert=cert, tls_key=key)
    with serving(FakeLLM(), options) as server:
        assert server.address.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=cert)
        answer = httpx.post(server.address + CHAT, json=BODY, verify=trusted)
        assert answer.status_code == 200


@needs_openssl
def test_a_certificate_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "own")
    other = make_certificate(tmp_path, "other")[1]
    locked = make_certificate(tmp_path, "locked", password="open sesame")
    for options, words in (
        (Options(tls_cert=cert), "Give both --tls-cert and --tls-key"),
        (Options(tls_key=key), "Give both --tls-cert and --tls-key"),
        (Options(tls_cert=cert, tls_key=other), "cannot be used"),
        (Options(tls_cert=locked[0], tls_key=locked[1]), "cannot be used"),
        (Options(tls_cert=str(tmp_path / "none"), tls_key=key), "No such file"),
    ):
        with pytest.raises(OptionError, match=words):
            check_tls(options)
