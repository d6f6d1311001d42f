"""Open WebUI, unmodified, with a running server as its OpenAI server and as its Ollama server."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.conftest import MODEL, Running
from tests.clients.found import find_program
from tests.clients.programs import cases
from tests.server.fakes import events_of

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
START_S = 300  # it imports torch and makes a database


@pytest.fixture(scope="module", params=["OPENAI_API_BASE_URL", "OLLAMA_BASE_URL"])
def webui(
    request: pytest.FixtureRequest, running: Running, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Start Open WebUI over one of its two APIs, and sign in."""
    program = find_program("open-webui")
    folder = tmp_path_factory.mktemp("open-webui")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    openai = request.param == "OPENAI_API_BASE_URL"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "DATA_DIR": str(folder),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "secret",
        "OFFLINE_MODE": "1",
        "RAG_EMBEDDING_ENGINE": "openai",  # or it looks for a model to embed documents with
        "ENABLE_OPENAI_API": str(openai),
        "ENABLE_OLLAMA_API": str(not openai),
        "OPENAI_API_KEY": running.key,
        "OLLAMA_API_CONFIGS": json.dumps({"0": {"key": running.key}}),
        request.param: f"{running.address}/v1" if openai else running.address,
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_for(client, process, folder / "log")
            signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
            client.headers["authorization"] = f"Bearer {signed_in.json()['token']}"
            yield client
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_for(client: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until Open WebUI accepts requests."""
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            client.get("/health").raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.5)
        else:
            return


def ask(webui: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    model = webui.get("/api/models").json()["data"][0]["id"]
    body = {"model": model, "messages": messages, **more}
    answer = webui.post("/api/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def test_open_webui_lists_the_model(webui: httpx.Client) -> None:
    (model,) = webui.get("/api/models").json()["data"]
    assert model["id"].split(":")[0] == MODEL


def test_open_webui_chats(webui: httpx.Client) -> None:
    hi = [{"role": "user", "content": "Hi."}]
    (choice,) = ask(webui, hi, stream=False).json()["choices"]
    assert choice["message"]["content"] == cases.HELLO
    *events, end = events_of(ask(webui, hi, stream=True).text)
    assert end == "[DONE]"
    deltas = [choice["delta"] for event in events for choice in event.get("choices", [])]
    assert "".join(delta.get("content") or "" for delta in deltas) == cases.HELLO


def test_open_webui_passes_tools_and_their_results_on(webui: httpx.Client) -> None:
    function = {"name": "get_weather", "description": "The forecast.", "parameters": cases.WEATHER}
    tools = [{"type": "function", "function": function}]
    history: list[dict[str, Any]] = [{"role": "user", "content": cases.ASK_WEATHER}]
    message = ask(webui, history, tools=tools, stream=False).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    result = {"role": "tool", "tool_call_id": call["id"], "content": cases.RESULT}
    final = ask(webui, [*history, message, result], tools=tools, stream=False).json()
    assert final["choices"][0]["message"]["content"] == cases.SAID
