"""`headroom ps`: what a running server holds, and clear words where none runs."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headroom.cli.main import run_command
from headroom.cli.ps import idle_text

MODEL = {
    "name": "tiny:latest", "memory": {"cuda:0": 3 << 30, "cpu": 1 << 20}, "context_length": 8192,
    "idle_s": 130.04,
}  # fmt: skip


@contextmanager
def answering(
    status: int, body: bytes, key: str = "", health: bytes = b'{"status": "ok"}'
) -> Iterator[str]:
    """Run a server that gives one answer to /api/ps, if the key is right; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = not key or self.headers["Authorization"] == f"Bearer {key}"
            asked = self.path == "/api/ps"
            self.send_response((status if known else 401) if asked else 503)
            self.end_headers()
            self.wfile.write(body if asked else health)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_models_are_shown_with_memory_context_and_idle_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with answering(200, json.dumps({"models": [MODEL]}).encode()) as url:
        assert run_command(["ps", "--url", url]) == 0
        head, row = capsys.readouterr().out.splitlines()
        assert head.split() == ["model", "memory", "context", "idle"]
        assert row.split("  ")[0] == "tiny"
        for word in ("cuda:0 3.00 GiB, cpu 1.0 MiB", "8,192", "2 min"):
            assert word in row
        assert run_command(["ps", "--url", f"{url}/", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"]
    assert found == {
        "model": "tiny", "memory": MODEL["memory"], "context": 8192, "idle_s": 130.0,
    }  # fmt: skip


def test_the_server_is_found_by_the_settings_and_gets_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(200, b'{"models": []}', key="secret") as url:
        monkeypatch.setenv("HEADROOM_PORT", url.rpartition(":")[2])
        monkeypatch.setenv("HEADROOM_HOST", "0.0.0.0")
        assert run_command(["ps"]) == 1
        assert f"The server at {url} wants a key. Set HEADROOM_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("HEADROOM_API_KEY", "secret")
        assert run_command(["ps"]) == 0
    assert capsys.readouterr().out == f"The server at {url} has no model in memory.\n"


def test_a_server_that_loads_or_is_full_is_said_to_be_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with answering(
        200, b'{"models": []}', health=b'{"status": "loading", "progress": 0.42}'
    ) as url:
        assert run_command(["ps", "--url", url]) == 0
    assert capsys.readouterr().out == f"The server at {url} is loading its first model: 42 %.\n"
    with answering(503, b"{}") as url:
        assert run_command(["ps", "--url", url]) == 1
    assert "takes no requests now. Try again later." in capsys.readouterr().err


def test_without_a_server_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert run_command(["ps", "--url", f"http://127.0.0.1:{port}"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: No server answers at http://127.0.0.1:{port} (")
    assert "Start one with: headroom serve MODEL" in told


@pytest.mark.parametrize(
    ("status", "body"), [(404, b""), (200, b"hello"), (200, b"[]"), (200, b'{"models": [3]}')]
)
def test_another_server_is_not_taken_for_ours(
    status: int, body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, body) as url:
        assert run_command(["ps", "--url", url]) == 1
    assert "is not a headroom server" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["nonsense", "ftp:/x", "http://"])
def test_a_wrong_address_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["ps", "--url", url]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "working"), (5.4, "5 s"), (90, "2 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_idle_times_have_one_unit(seconds: float | None, text: str) -> None:
    assert idle_text(seconds) == text
