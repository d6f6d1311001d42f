"""Ollama's endpoints about models: lists, descriptions and pulls."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from headroom.options import Options
from headroom.server.shelf import Shelf
from tests.server.fakes import FakeLLM, serving
from tests.synth_models import write_model


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(name, "q8_0", folder, few_layers=True) for name in ("qwen3", "llama")}


@pytest.fixture(scope="module")
def both(paths: dict[str, Path]) -> Iterator[httpx.Client]:
    """A server of two models, of which the first is loaded."""
    options = Options(port=0, device="cpu", context=256, threads=1, idle_unload=600)
    with Shelf.of_files(paths, options) as shelf:
        shelf.load_first()
        with serving(shelf, options) as server, httpx.Client(base_url=server.address) as http:
            yield http


def test_all_models_are_listed_with_their_sizes(both: httpx.Client, paths: dict[str, Path]) -> None:
    models = both.get("/api/tags").json()["models"]
    assert [model["name"] for model in models] == ["qwen3:latest", "llama:latest"]
    assert len({model["digest"] for model in models}) == 2
    for model, path in zip(models, paths.values(), strict=True):
        assert model["model"] == model["name"]
        assert 0.9 * path.stat().st_size < model["size"] <= path.stat().st_size
        changed = datetime.fromisoformat(model["modified_at"]).timestamp()
        assert changed == pytest.approx(path.stat().st_mtime, abs=1)
        assert len(model["digest"]) == 64
        details = model["details"]
        assert (details["format"], details["quantization_level"]) == ("gguf", "Q8_0")
        assert details["families"] == [details["family"]]
    assert models[0]["details"]["parameter_size"] == "1.837M"


def test_only_loaded_models_run_and_expire_after_their_idle_time(both: httpx.Client) -> None:
    (model,) = both.get("/api/ps").json()["models"]
    assert (model["name"], model["context_length"], model["size_vram"]) == ("qwen3:latest", 256, 0)
    assert model["size"] > 1_000_000
    assert model["memory"] == {"cpu": model["size"]}
    assert 0 <= model["idle_s"] < 600
    left = datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)
    assert timedelta(0) < left <= timedelta(seconds=600)


@pytest.mark.parametrize("field", ["model", "name"])
def test_a_model_is_described_without_being_loaded(both: httpx.Client, field: str) -> None:
    shown = both.post("/api/show", json={field: "llama"}).json()
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 4096
    assert shown["model_info"]["general.parameter_count"] == 1443072
    assert shown["details"]["family"] == "llama"
    assert "messages" in shown["template"]
    assert shown["capabilities"][0] == "completion"
    assert shown["parameters"] == "num_ctx 256"
    assert len(both.get("/api/ps").json()["models"]) == 1


def test_a_model_that_is_there_need_not_be_pulled(both: httpx.Client) -> None:
    streamed = both.post("/api/pull", json={"model": "llama:latest"})
    assert [json.loads(line) for line in streamed.text.splitlines()][-1] == {"status": "success"}
    whole = both.post("/api/pull", json={"model": "llama", "stream": False})
    assert whole.json() == {"status": "success"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"model": "other", "messages": [{"role": "user", "content": "hi"}]}),
        ("/api/generate", {"model": "other", "prompt": "hi"}),
        ("/api/show", {"model": "other"}),
        ("/api/pull", {"model": "other"}),
        ("/api/embed", {"model": "other", "input": "hi"}),
    ],
)
def test_an_unknown_model_is_a_404_that_lists_the_known_ones(
    both: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    response = both.post(path, json=body)
    assert response.status_code == 404
    assert "'qwen3', 'llama'" in response.json()["error"]


def test_a_loaded_model_without_a_file_is_described_by_what_is_known(
    shared: httpx.Client, client: httpx.Client, llm: FakeLLM
) -> None:
    (listed,) = shared.get("/api/tags").json()["models"]
    assert listed["name"] == "fake:latest"
    (running,) = shared.get("/api/ps").json()["models"]
    assert running["context_length"] == 4096
    llm.thinks = True
    assert client.post("/api/show", json={"model": "any name"}).json()["capabilities"] == [
        "completion", "embedding", "tools", "thinking",
    ]  # fmt: skip


def test_the_version_is_a_number_that_clients_can_compare(shared: httpx.Client) -> None:
    version = shared.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)


@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/version"])
def test_clients_may_ask_by_head_whether_the_server_is_there(
    shared: httpx.Client, path: str
) -> None:
    response = shared.head(path)
    assert (response.status_code, response.content) == (200, b"")


def test_a_path_that_is_not_there_has_ollamas_error(shared: httpx.Client) -> None:
    response = shared.request("DELETE", "/api/delete", json={"model": "fake"})
    assert response.status_code == 404
    assert response.json() == {"error": "DELETE /api/delete does not exist."}


def test_a_key_is_needed_here_too(llm: FakeLLM) -> None:
    options = Options(port=0, api_key="secret")
    with serving(llm, options) as server, httpx.Client(base_url=server.address) as http:
        refused = http.get("/api/tags")
        assert refused.status_code == 401
        assert "API key" in refused.json()["error"]
        key = {"Authorization": "Bearer secret"}
        assert http.get("/api/tags", headers=key).status_code == 200
