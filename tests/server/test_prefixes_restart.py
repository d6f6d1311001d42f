"""A server that is started again with the same folder answers a known prompt warm."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.mixed_load import words
from tests.server.soak import CHAT, serve
from tests.synth_models import write_model

FLAGS = ("--device", "cpu", "--context", "4096", "--kv-type", "f32", "--dtype", "f32")


def asked(model: Path, folder: Path, *flags: str) -> dict[str, Any]:
    """Start a server, ask it a long prompt, and end it; return the answer."""
    body = {
        "messages": [{"role": "user", "content": words("known", 460)}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
    }
    with serve(str(model), *FLAGS, "--cache-dir", str(folder), *flags) as (address, _):
        response = httpx.post(address + CHAT, json=body, timeout=300)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
@pytest.mark.parametrize("flags", [(), ("--workers", "2")], ids=["one", "processes"])
def test_a_server_that_starts_again_answers_a_known_prompt_warm(
    name: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_model(name, "q8_0", tmp_path, few_layers=True)
    cold, warm = (asked(model, tmp_path / "prefixes", *flags) for _ in range(2))
    length = cold["usage"]["prompt_tokens"]
    assert length >= 2000
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= length - 64
    before, after = (one["choices"][0] for one in (cold, warm))
    assert after["message"] == before["message"]
    for one, other in zip(after["logprobs"]["content"], before["logprobs"]["content"], strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
