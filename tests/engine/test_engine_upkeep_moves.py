"""The engine's upkeep moves experts to and from the stand-in GPU; answers stay the same."""

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from headroom.engine.engine import Engine
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent, TokenLogprobs
from headroom.experts.exchange import StoreExchanges
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.layers.batch import Batch
from headroom.split.expert_records import read_records
from headroom.split.model import HandedRows
from headroom.split.pipeline import Pipeline
from headroom.split.placing import expert_layers
from headroom.split.stage import CpuResult, CpuStage
from headroom.split.upkeep import open_upkeep
from tests.families.oracles import PROMPT, variant
from tests.stand_in.gpu import stand_in_gpu
from tests.stand_in.model import ModelOnGpu
from tests.stand_in.streams import Queues

# The first one again: what it chose has become hot by then, and is read.
PROMPTS = (PROMPT[:4], PROMPT[:4], PROMPT[6:9])
# Wrong experts may leave the likeliest tokens as they are, but no probability.
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
SETTINGS: dict[str, Any] = {"context": 64, "chunk": 4, "kernels": "reference"}
HALF_COLD: dict[str, Any] = {
    "expert_budget": "50%",
    "swap_min_gain": 0.5,
    "swap_false_chance": 1.0,
    "swap_per_layer": 2,
}
MOVED_S = 60.0  # that exchanges are waited for

Answer = list[tuple[int | None, TokenLogprobs | None]]


class StandInStage(CpuStage):
    """Steps on the stand-in GPU, whose tokens the host draws."""

    def __init__(self, stage: ModelOnGpu) -> None:
        super().__init__("cuda:0", stage.model)
        self._on_gpu = stage

    def step(
        self, batch: Batch, draws: Sequence[object] = (), received: HandedRows | None = None
    ) -> CpuResult:
        model = self._on_gpu.model
        hidden = self._on_gpu.hidden(batch)
        return CpuResult(hidden, lambda rows: model.logits(rows).cpu(), model.normed)

    def held_bytes(self) -> int:
        return 0


class Watched(StoreExchanges):
    """Notes how many requests run when two experts change sides, and the steps before that."""

    engine: Engine
    running: list[int]
    steps: list[int]  # between the begin of an exchange and its turn
    begun_at: int
    second_fails: str = ""  # the queues' setting that lets a copy fail

    def begin(self, layer: int, promoted: int, demoted: int) -> None:
        if self.second_fails and len(self.running) == 1:
            queues = Queues.current()
            setattr(queues, self.second_fails, queues.asked + 1)
        super().begin(layer, promoted, demoted)
        self.begun_at = self.engine.stats().steps

    def turn(self) -> None:
        super().turn()
        self.running.append(self.engine.stats().requests_running)
        self.steps.append(self.engine.stats().steps - self.begun_at)


@contextmanager
def opened(checkpoint: Checkpoint, **settings: Any) -> Iterator[tuple[Engine, Watched | None]]:
    """An engine as `open_engine` makes it, and its experts where some are cold."""
    stage = ModelOnGpu(checkpoint, routing_stats="off", **(SETTINGS | settings))
    model, plan, exchanges = stage.described, stage.plan, None
    if (cold_experts := stage.model.cold_experts) is not None:
        layers = expert_layers(model.shape, plan)
        exchanges = Watched(cold_experts.store, layers, same_bits=cold_experts.same_bits)
        exchanges.running, exchanges.steps = [], []
    meter = None if cold_experts is None else cold_experts.meter
    pipeline = Pipeline([StandInStage(stage)], model.config.vocab, {}, exchanges, meter)
    upkeep = open_upkeep(pipeline, read_records(model.checkpoint, model.shape, stage.options))
    engine = Engine(pipeline, plan.settings, 4, upkeep)
    if exchanges is not None:
        exchanges.engine = engine
    try:
        yield engine, exchanges
    finally:
        engine.close()


def answer(engine: Engine, prompt: Sequence[int]) -> Answer:
    """Tokens and their probabilities."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    request = GenerationRequest(
        id=str(prompt), prompt=tuple(prompt), params=PARAMS, stop_ids=frozenset()
    )
    engine.submit(request, events.put)
    found = [events.get(timeout=60)]
    while found[-1].finish_reason is None:
        found.append(events.get(timeout=60))
    assert found[-1].finish_reason == "length", found[-1].error
    return [(event.token, event.logprobs) for event in found]


def wait_for_exchange(exchanges: Watched, count: int) -> None:
    """Wait until so many experts have changed sides."""
    until = time.monotonic() + MOVED_S
    while len(exchanges.running) < count and time.monotonic() < until:
        time.sleep(0.01)
    assert len(exchanges.running) >= count


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model with experts."""
    return open_checkpoint(variant("qwen3moe").save_gguf(tmp_path_factory.mktemp("m") / "m.gguf"))


@pytest.fixture(scope="module")
def wanted(checkpoint: Checkpoint) -> list[Answer]:
    """What it says where all of them are hot."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        stand_in_gpu(monkeypatch),
        opened(checkpoint) as (engine, exchanges),
    ):
        assert exchanges is None
        return [answer(engine, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("cold", ["auto", "gpu"])
def test_exchanges_between_requests_move_experts_and_change_no_answer(
    checkpoint: Checkpoint,
    wanted: list[Answer],
    cold: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        stand_in_gpu(monkeypatch),
        opened(checkpoint, cold=cold, **HALF_COLD) as (engine, exchanges),
    ):
        assert exchanges is not None
        before = exchanges.placement().hot
        found = [answer(engine, PROMPTS[0])]
        wait_for_exchange(exchanges, 2)
        moved = exchanges.placement().hot
        found += [answer(engine, prompt) for prompt in PROMPTS[1:]]
    assert moved != before
    assert [len(ids) for ids in moved] == [len(ids) for ids in before]
    assert set(exchanges.running) == {0}
    assert found == wanted


def test_exchanges_within_a_request_move_experts_and_change_no_answer(
    checkpoint: Checkpoint, wanted: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = HALF_COLD | {"cold": "gpu", "swap_every": "2"}
    with stand_in_gpu(monkeypatch), opened(checkpoint, **settings) as (engine, exchanges):
        assert exchanges is not None
        before = exchanges.placement().hot
        found = [answer(engine, prompt) for prompt in PROMPTS]
        moved = exchanges.placement().hot
    assert moved != before
    assert 1 in exchanges.running
    assert max(exchanges.steps) >= 2  # steps ran while experts were copied
    assert found == wanted


@pytest.mark.parametrize("kind", ["refused_at", "failed_at"])
def test_an_exchange_that_fails_changes_no_answer(
    checkpoint: Checkpoint,
    wanted: list[Answer],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = HALF_COLD | {"cold": "gpu"}
    with stand_in_gpu(monkeypatch), opened(checkpoint, **settings) as (engine, exchanges):
        assert exchanges is not None
        exchanges.second_fails = kind
        before = exchanges.placement().hot
        found = [answer(engine, PROMPTS[0])]
        wait_for_exchange(exchanges, 1)
        found += [answer(engine, prompt) for prompt in PROMPTS[1:]]
    assert "exchanges: one failed and there are no more" in caplog.text
    assert exchanges.placement().hot != before
    assert len(exchanges.running) == 1
    assert found == wanted
