"""GET /experts: the picks of every routed expert, and which experts are hot."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest

from headroom import LLM
from headroom.engine.engine import ExpertView
from headroom.engine.request import SamplingParams
from headroom.options import Options
from headroom.server import experts
from tests.server.fakes import serving
from tests.synth_models import MODELS, write_model

DIMS = MODELS["qwen3moe"].dims


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_model("qwen3moe", "q8_0", tmp_path_factory.mktemp("m"), few_layers=True)
    with LLM(str(path), context=64, parallel=2, threads=1, routing_stats="off") as made:
        yield made


def test_every_pick_of_every_token_is_counted_while_the_engine_rests(llm: LLM) -> None:
    with serving(llm, Options(port=0)) as server:
        before = httpx.get(server.address + "/experts").json()
        params = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
        (answer,) = llm.generate("one two", params)
        after = httpx.get(server.address + "/experts").json()
    # The last token of an answer is never computed with.
    rows = answer.prompt_tokens + answer.generated_tokens - 1
    assert after["tokens"] - before["tokens"] == rows
    assert after["layers"]
    for old, new in zip(before["layers"], after["layers"], strict=True):
        assert len(new["picks"]) == DIMS.experts
        assert sum(new["picks"]) - sum(old["picks"]) == rows * DIMS.experts_used
        assert new["used"] == DIMS.experts_used
        assert new["hot"] == "h" * DIMS.experts  # on a CPU no expert is cold
        assert new["hits"] == sum(new["picks"])
    assert after["picks"] == after["hits"] == sum(sum(x["picks"]) for x in after["layers"])
    assert (after["hit_rate"], after["loaded"]) == (1.0, True)


def test_a_model_without_experts_has_no_layers(tiny_path: Path) -> None:
    with (
        LLM(str(tiny_path), context=64, threads=1) as dense,
        serving(dense, Options(port=0)) as server,
    ):
        shown = httpx.get(server.address + "/experts").json()
    assert shown == {"model": dense.name, "loaded": True, "layers": []}


def test_an_engine_in_a_long_step_is_a_503(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: Future[ExpertView] = Future()
    monkeypatch.setattr(llm.engine, "view_experts", lambda: waiting)
    monkeypatch.setattr(experts, "WAIT_S", 0.05)
    with serving(llm, Options(port=0)) as server:
        refused = httpx.get(server.address + "/experts")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "capacity_exceeded"
    assert not waiting.cancelled()
