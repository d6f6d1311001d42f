"""The engine runs the upkeep of experts between steps, at the right moments."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom import llm as llm_module
from headroom.engine.request import SamplingParams
from headroom.errors import HeadroomError
from headroom.experts.placement import LayerExperts
from headroom.experts.telemetry import ColdMeter, DecodeCounts
from headroom.llm import LLM
from headroom.plan.describe import ModelDescription
from headroom.split.pipeline import Pipeline
from tests.engine.test_prefixes import LlmAsker, words
from tests.experts.stores import NotedExchanges, blob_layout, check_layer, small_store
from tests.synth_models import MODELS, write_model

SETTINGS: dict[str, Any] = {"context": 128, "parallel": 2, "chunk": 16, "threads": 1}
USED = MODELS["qwen3moe"].dims.experts_used
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of experts, all of them hot."""
    return write_model("qwen3moe", "q8_0", tmp_path_factory.mktemp("m"))


class Watched(NotedExchanges):
    """Notes how many requests ran when experts changed sides."""

    engine: Any
    running: list[int]

    def turn(self) -> None:
        super().turn()
        self.running.append(self.engine.stats().requests_running)


@pytest.fixture
def half_cold(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watched]]:
    """Let every model that is opened have the upper half of its experts in a store, cold.

    The model computes with weights of its own; the store's experts are few bytes, which move.
    """
    made: list[Watched] = []
    start = llm_module.start_pipeline

    def start_cold(plan: Any, model: ModelDescription, *more: Any) -> Pipeline:
        pipeline = start(plan, model, *more)
        counts = [layer.experts for layer in model.shape.layers]
        layouts = [blob_layout(count) if count else None for count in counts]
        store = small_store(layouts, [tuple(range(count // 2)) for count in counts])
        watched = Watched(store, [LayerExperts(count, 1) for count in counts])
        watched.running = []
        costs = DecodeCounts(cpu_bytes=0, gpu_bytes=0, hot_s=0.0, cold_s=0.0, wait_s=0.0)
        pipeline.experts, pipeline.meter = watched, ColdMeter(lambda: costs)
        made.append(watched)
        return pipeline

    monkeypatch.setattr(llm_module, "start_pipeline", start_cold)
    yield made
    for watched in made:
        for index, layer in enumerate(watched.store.layers):
            if layer is not None:
                check_layer(watched.store, index)


def answers(path: Path, half_cold: list[Watched], **settings: Any) -> list[Any]:
    given = SETTINGS | {"routing_stats": "off"} | settings
    with LLM(str(path), **given) as llm:
        half_cold[-1].engine = llm.engine
        return [llm.generate(prompt, PARAMS)[0] for prompt in ("one", "two", "three")]


def test_routing_counts_are_saved_when_the_engine_ends_and_added_to_in_the_next_run(
    path: Path,
) -> None:
    beside = path.with_name(path.name + ".routing.json")
    for times in (1, 2):
        with LLM(str(path), **SETTINGS) as llm:
            done = llm.generate("hello", PARAMS)[0]
        rows = done.prompt_tokens + done.generated_tokens - 1  # the last token is not read again
        counts = json.loads(beside.read_text())["counts"]
        assert [sum(row) for row in counts] == pytest.approx([times * rows * USED] * len(counts))
    beside.unlink()


@pytest.mark.parametrize("full", [False, True], ids=["", "nothing can be saved"])
def test_an_engine_that_breaks_saves_its_statistics_and_reports_its_own_error(
    path: Path,
    tmp_path: Path,
    half_cold: list[Watched],
    monkeypatch: pytest.MonkeyPatch,
    full: bool,
) -> None:
    kept, placed = tmp_path / "kept.json", tmp_path / "placed.json"
    given = SETTINGS | {"swap_every": "off", "routing_stats": str(kept)}

    def fail(reason: str) -> None:
        raise AssertionError(reason)

    with LLM(str(path), save_placement=str(placed), **given) as llm:
        done = llm.generate("hello", PARAMS)[0]
        if full:
            monkeypatch.setattr("headroom.split.upkeep.HistoryKeeper.take", lambda *x: fail("no"))
        monkeypatch.setattr(llm.engine._scheduler, "next_turns", lambda parts: fail("lent twice"))
        with pytest.raises(HeadroomError, match="AssertionError: lent twice"):
            llm.generate("hello", PARAMS)
    assert llm.engine._failure.endswith("after an error: AssertionError: lent twice.")
    assert (kept.exists(), placed.exists()) == (not full, not full)
    if not full:
        rows = done.prompt_tokens + done.generated_tokens - 1
        assert {sum(row) for row in json.loads(kept.read_text())["counts"]} == {rows * USED}
        hot = json.loads(placed.read_text())["hot"]
        assert [tuple(ids) for ids in hot] == list(half_cold[0].placement().hot)


def test_an_idle_engine_saves_too(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = llm_module.read_records

    def hasty(*given: Any, **named: Any) -> Any:
        records = rules(*given, **named)
        return replace(records, rules=replace(records.rules, save_every_s=0.05))

    monkeypatch.setattr(llm_module, "read_records", hasty)
    kept = tmp_path / "kept.json"
    with LLM(str(path), routing_stats=str(kept), **SETTINGS) as llm:
        llm.generate("hello", PARAMS)
        deadline = time.monotonic() + 30
        while not kept.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert kept.exists()


def test_exchanges_come_between_requests_unless_they_are_off(
    path: Path, half_cold: list[Watched]
) -> None:
    moved = answers(path, half_cold, swap_min_gain=1.0, swap_false_chance=1.0, swap_bytes="1GiB")
    assert half_cold[0].exchanged
    assert set(half_cold[0].running) == {0}
    rested = answers(path, half_cold, swap_every="off")
    assert half_cold[1].begun == []
    assert [done.text for done in moved] == [done.text for done in rested]


def test_an_answer_reports_the_cost_of_cold_experts(path: Path, half_cold: list[Watched]) -> None:
    for done in answers(path, half_cold, swap_every="off"):
        told = done.timings.experts
        assert told is not None
        assert 0 < told["hit_rate"] < 1
        rates = [rate for rate in told["layer_hit_rates"] if rate is not None]
        assert min(rates) <= told["hit_rate"] <= max(rates)
        assert set(told["cold_bytes_per_token"]) == {"gpu", "cpu"}
        assert set(told["ms"]) == {"hot", "cold", "wait"}


def test_an_answer_that_a_stop_text_ends_reports_the_cost_of_cold_experts(
    path: Path, half_cold: list[Watched]
) -> None:
    with LLM(str(path), routing_stats="off", swap_every="off", **SETTINGS) as llm:
        whole = llm.generate("one", PARAMS)[0].text
        stop = next(c for c in whole[2:-2] if c.isprintable() and c != "\ufffd")
        cut = llm.generate("one", replace(PARAMS, stop=(stop,)))[0]
    assert (cut.finish_reason, cut.text) == ("stop", whole[: whole.index(stop)])
    assert cut.timings.experts is not None
    assert 0 < cut.timings.experts["hit_rate"] < 1


def test_with_all_experts_hot_only_the_engine_reports_hit_rates(path: Path) -> None:
    with LLM(str(path), routing_stats="off", **SETTINGS) as llm:
        done = llm.generate("hello", PARAMS)[0]
        told = llm.engine.stats().experts
    assert done.timings.experts is None
    assert told is not None
    assert set(told.layer_hit_rates) == {1.0}
    assert told.tokens == done.prompt_tokens + done.generated_tokens - 1


def test_a_dense_model_has_no_upkeep(tiny_path: Path) -> None:
    with LLM(str(tiny_path), **SETTINGS) as llm:
        llm.generate("hello", PARAMS)
        assert llm.engine.upkeep is None
        assert llm.engine.stats().experts is None
    assert not tiny_path.with_name(tiny_path.name + ".routing.json").exists()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_conversation_that_comes_back_brings_its_experts(
    path: Path, half_cold: list[Watched], tmp_path: Path, restarted: bool
) -> None:
    prepared: list[list[list[float]]] = []

    def open_model() -> LLM:
        settings = SETTINGS | {"context": 512, "swap_min_gain": 1.0, "swap_false_chance": 1.0}
        llm = LLM(str(path), routing_stats="off", cache_dir=str(tmp_path / "files"), **settings)
        half_cold[-1].engine = llm.engine
        assert llm.engine.upkeep is not None
        prepare = llm.engine.upkeep.prepare

        def noted(picks: torch.Tensor) -> None:
            stats = llm.engine.stats()
            assert stats.prompt_tokens + stats.generated_tokens == asked[-1]  # no step yet
            prepared.append(picks.tolist())
            prepare(picks)

        llm.engine.upkeep.prepare = noted  # type: ignore[method-assign]
        return llm

    prompt, asked = words("conversation", 330), [0]
    llm = open_model()
    first = LlmAsker(llm).ask(prompt)
    view = llm.engine.view_experts()
    assert view is not None
    picks = [layer.picks for layer in view.result(20).layers]
    LlmAsker(llm).ask(words("others", 400))
    assert prepared == []
    if restarted:
        llm.close()
        llm = open_model()
    stats = llm.engine.stats()
    asked.append(stats.prompt_tokens + stats.generated_tokens)
    turn = LlmAsker(llm).ask(prompt + first.tokens + words("turn", 50))
    assert turn.cached == 320
    assert prepared == [[pytest.approx(row) for row in picks]]
    assert half_cold[-1].exchanged
    llm.close()
