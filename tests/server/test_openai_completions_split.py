"""A model whose layers are shared by stages answers over HTTP as an unsplit one does."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from headroom import LLM, Options
from tests.families.oracles import variant
from tests.server.fakes import serving

# Tokens as a prompt, sampling with all that the engine has to add up, and a stop that may cut.
BODY: dict[str, Any] = {
    "prompt": [[3, 5, 7, 11, 2], [9, 4]],
    "n": 2,
    "max_tokens": 12,
    "temperature": 0.7,
    "seed": 11,
    "logprobs": 2,
    "frequency_penalty": 0.3,
    "logit_bias": {"3": 2, "9": -100},
}


PARTS = {"embedding", "layers", "logits", "sampling"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Layers of this model read the caches of earlier ones, and take inputs of their own.
    return variant("gemma4-e4b").save_gguf(tmp_path_factory.mktemp("split") / "m.gguf")


def ask(path: Path, **devices: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"context": 128, "parallel": 3, "threads": 1, "dtype": "f32"}
    with (
        LLM(str(path), kv_type="f32", **settings, **devices) as llm,
        serving(llm, Options(port=0)) as server,
        httpx.Client(base_url=server.address, timeout=60) as client,
    ):
        answer = client.post("/v1/completions", json=BODY)
        metrics = client.get("/metrics").text
    assert answer.status_code == 200, answer.text
    assert ("headroom_stage_busy_seconds_total" in metrics) == bool(devices)
    for part in PARTS:
        (line,) = re.findall(rf"headroom_step_part_seconds_total.*part=\"{part}\".* (\S+)", metrics)
        assert float(line) > 0
    found: dict[str, Any] = answer.json()
    assert set(found["timings"]["parts_ms"]) == PARTS
    assert all(found["timings"]["parts_ms"].values())
    return found


@pytest.mark.parametrize("devices", [{"device": "cpu,cpu"}, {"workers": "2"}], ids=str)
def test_sampled_answers_over_http_are_those_of_one_stage(
    path: Path, devices: dict[str, str]
) -> None:
    whole, split = ask(path), ask(path, **devices)
    assert split["choices"] == whole["choices"]
    assert len(split["choices"]) == 4
    assert "stages" not in whole["timings"]
    times = whole["timings"]
    assert sum(times["parts_ms"].values()) < 1 + times["prefill_ms"] + times["decode_ms"]
    assert max(times["parts_ms"], key=times["parts_ms"].get) == "layers"
    stages = split["timings"]["stages"]
    assert len({stage["device"] for stage in stages}) == 2
    assert stages[0]["handover_bytes"] > 0
