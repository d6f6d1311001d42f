"""`headroom serve`: what it hands to the server, and what it says without one."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from headroom.cli.main import run_command
from headroom.options import Options
from tests.synth_models import write_model

SMALL = ["--port", "0", "--device", "cpu", "--context", "256", "--threads", "1"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[str]]]:
    """What the command starts a server with: the models' names, and the names of loaded ones."""
    seen: list[tuple[list[str], list[str]]] = []

    def run(shelf: Any, options: Options, bound: socket.socket, show_loading: Any) -> None:
        assert shelf.first_load is not None
        with show_loading() as show:
            shelf.load_first(show)
        seen.append((shelf.names, list(shelf.engines())))

    monkeypatch.setattr("headroom.server.http_server.run_server", run)
    return seen


def test_the_server_gets_the_model_and_the_options(
    opened: list[Options], fake_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, Options]] = []
    monkeypatch.setattr(
        "headroom.server.http_server.run_server",
        lambda shelf, options, *more: started.append((shelf.models[0].llm, options)),
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
    monkeypatch.delitem(sys.modules, "headroom.server.http_server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run_command(["serve"]) == 1
    assert capsys.readouterr().err == (
        "error: The server needs uvicorn, which is not installed. "
        "Install it with: pip install 'headroom[server]'.\n"
    )
    assert opened == []


def test_models_are_listed_by_their_aliases_and_found_by_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shelves: list[Any] = []

    def run(shelf: Any, options: Options, bound: socket.socket, show_loading: Any) -> None:
        with show_loading() as show:
            shelf.load_first(show)
        found = {name: shelf.find(name).name for name in ("coder", "other", "OTHER:latest")}
        shelves.append((shelf.names, list(shelf.engines()), found, shelf.find("third")))
        assert [shelved.llm.name for shelved in shelf.models if shelved.llm] == shelf.names[:1]

    monkeypatch.setattr("headroom.server.http_server.run_server", run)
    llama = write_model("llama", "q8_0", tmp_path, few_layers=True)
    qwen3 = write_model("qwen3", "q8_0", tmp_path, few_layers=True)
    flags = ["--aliases", str(tmp_path / "aliases.json")]
    for name, path in (("Coder", llama), ("other", llama), ("third", tmp_path)):
        assert run_command(["alias", name, str(path), *flags]) == 0
    assert run_command(["serve", "coder", *SMALL, *flags]) == 0
    assert run_command(["serve", str(qwen3), "coder", *SMALL, *flags]) == 0
    assert run_command(["serve", str(llama), *SMALL, *flags]) == 0
    (alone, beside, unnamed) = shelves
    every = dict.fromkeys(("coder", "other", "OTHER:latest"), "coder")
    assert alone == (["coder"], ["coder"], every, None)
    assert beside == (["qwen3-q8_0", "coder"], ["qwen3-q8_0"], every, None)
    by_file = dict.fromkeys(every, "llama-q8_0")
    assert unnamed == (["llama-q8_0"], ["llama-q8_0"], by_file, None)


def test_several_models_are_named_after_their_files_and_the_first_is_loaded(
    tmp_path: Path, started: list[tuple[list[str], list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    llama = write_model("llama", "q8_0", tmp_path, few_layers=True)
    qwen3 = write_model("qwen3", "q8_0", tmp_path, few_layers=True)
    assert run_command(["serve", str(qwen3), str(llama), *SMALL]) == 0
    assert run_command(["serve", str(tmp_path), *SMALL]) == 0
    assert run_command(["serve", str(llama), "--served-name", "mine", *SMALL]) == 0
    assert started == [
        (["qwen3-q8_0", "llama-q8_0"], ["qwen3-q8_0"]),
        (["llama-q8_0", "qwen3-q8_0"], ["llama-q8_0"]),
        (["mine"], ["mine"]),
    ]
    assert run_command(["serve", str(tmp_path), "--served-name", "mine", *SMALL]) == 2
    assert "--served-name is one name, and there are 2 models." in capsys.readouterr().err


def test_a_first_model_that_cannot_be_loaded_ends_the_command(
    tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    llama = write_model("llama", "q8_0", tmp_path, few_layers=True)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    assert run_command(["serve", str(broken), str(llama), *SMALL]) == 1
    assert str(broken) in capsys.readouterr().err
    assert started == []
    assert run_command(["serve", str(llama), str(tmp_path / "missing.gguf"), *SMALL]) == 1
    assert "missing.gguf" in capsys.readouterr().err
