"""GET and DELETE /v1/cache: each key sees and forgets its own prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headroom.llm import LLM
from headroom.options import Options
from headroom.plan.settings import PAGE_SIZE
from tests.server.fakes import serving
from tests.synth_models import write_model

PATH = "/v1/completions"
PROMPT = "Many words that all prompts of this test begin with, again and again. " * 6


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text('[ann]\nkey = "ann-key-1234"\n[bob]\nkey = "bob-key-1234"\n')
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def client(folder: Path, keys: Path) -> Iterator[httpx.Client]:
    path = write_model("qwen35", "q8_0", folder, few_layers=True)
    options = Options(
        port=0,
        context=1024,
        parallel=2,
        device="cpu",
        threads=1,
        api_keys=str(keys),
        cache_dir=str(folder / "prefixes"),
    )
    with (
        LLM(options=options, path=path) as llm,
        serving(llm, options) as running,
        httpx.Client(base_url=running.address, timeout=60) as one,
    ):
        yield one


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-key-1234"}


def ask(client: httpx.Client, name: str, prompt: str, **more: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **more}
    response = client.post(PATH, json=body, headers=headers(name))
    assert response.status_code == 200, response.text
    cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def listed(client: httpx.Client, name: str, tier: str) -> list[dict[str, Any]]:
    response = client.get("/v1/cache", headers=headers(name))
    assert response.status_code == 200, response.text
    return [entry for entry in response.json()["data"] if entry["tier"] == tier]


def test_each_key_lists_and_forgets_its_own_prompts(client: httpx.Client) -> None:
    assert ask(client, "ann", PROMPT) == 0
    assert ask(client, "ann", PROMPT + "More.") > 0
    assert ask(client, "bob", PROMPT) == 0
    for name in ("ann", "bob"):
        entries = listed(client, name, "device")
        assert entries
        for entry in entries:
            assert entry["bytes"] > 0
            assert entry["snapshots"] >= 1
            assert entry["tokens"] >= PAGE_SIZE
            assert 0 <= entry["idle_seconds"] < 600
    for _ in range(200):
        if listed(client, "ann", "disk"):
            break
    assert listed(client, "ann", "disk")
    told = client.delete("/v1/cache", headers=headers("ann")).json()
    assert told["tokens"] >= PAGE_SIZE
    assert listed(client, "ann", "device") == []
    for _ in range(200):
        if not listed(client, "ann", "disk"):
            break
    assert listed(client, "ann", "disk") == []
    assert listed(client, "bob", "device")
    assert ask(client, "ann", PROMPT) == 0
    assert ask(client, "bob", PROMPT + "More.") > 0


def test_metrics_tell_the_bytes_of_each_tier(client: httpx.Client, folder: Path) -> None:
    ask(client, "ann", PROMPT)
    disk: list[float] = []
    for _ in range(200):  # until nothing is being written
        lines = client.get("/metrics", headers=headers("ann")).text.splitlines()
        values = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        told = {name: float(value) for name, _, value in values}
        tiers = {
            x: told[f'headroom_prefix_bytes{{tier="{x}"}}'] for x in ("device", "host", "disk")
        }
        disk = [path.stat().st_size for path in (folder / "prefixes").glob("*.prefix")]
        if disk and tiers["disk"] == sum(disk):
            break
    assert tiers["disk"] == sum(disk) > 0
    (entry, *_) = listed(client, "ann", "device")
    assert tiers["device"] >= entry["bytes"]
    assert tiers["host"] > 0
    assert tiers["host"] % told["headroom_prefix_snapshots"] == 0


def test_the_list_needs_a_key(client: httpx.Client) -> None:
    assert client.get("/v1/cache").status_code == 401
    assert client.delete("/v1/cache").status_code == 401
