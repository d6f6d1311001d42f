"""`headroom serve`: what it hands to the server, and what it says without one."""

import socket
import sys
from typing import Any

import pytest

from headroom.cli.main import run_command
from headroom.options import Options


def test_the_server_gets_the_model_and_the_options(
    opened: list[Options], fake_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, Options]] = []
    monkeypatch.setattr(
        "headroom.server.app.run_server", lambda llm, options, _: started.append((llm, options))
    )
    assert run_command(["serve", "model.gguf", "--port", "0", "--api-key", "k"]) == 0
    assert started == [(fake_llm, Options(model="model.gguf", port=0, api_key="k"))]
    assert opened == [started[0][1]]


def test_an_address_in_use_is_an_error_before_the_model_is_loaded(
    opened: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_command(["serve", "--port", str(port)]) == 2
    assert capsys.readouterr().err.startswith(f"error: Cannot listen on 127.0.0.1:{port}: ")
    assert opened == []


def test_without_the_extra_one_line_says_what_to_install(
    opened: list[Options], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "headroom.server.app", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run_command(["serve"]) == 1
    assert capsys.readouterr().err == (
        "error: The server needs uvicorn, which is not installed. "
        "Install it with: pip install 'headroom[server]'.\n"
    )
    assert opened == []
