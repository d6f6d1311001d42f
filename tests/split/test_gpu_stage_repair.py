"""A step that fails half-way: its requests end, slots are repaired, and later answers are right."""

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.engine.engine import Engine
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.families.files import open_checkpoint
from headroom.kernels.cuda import experts
from headroom.kernels.cuda.expert_cache import COUNTERS
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.layers.draws import DeviceSampler
from headroom.split.gpu_stage import GpuStage
from headroom.split.model import Model
from headroom.split.pipeline import Pipeline
from tests.split.cached_models import DecodingModel, allow_small_caches, cached_layers, write_narrow
from tests.stand_in.cuda_on_cpu import COMPILER
from tests.stand_in.gpu import TURING, StandInGpu, stand_in_gpu

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
TOKEN = 400  # the only one of the prompt


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    allow_small_caches(monkeypatch)
    # Every step runs anew, so that one of them can fail in the middle.
    monkeypatch.setattr(Model, "capturable", False)
    with stand_in_gpu(monkeypatch, TURING) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model of two layers with experts."""
    return write_narrow("qwen3moe", tmp_path, 2)


@pytest.fixture
def wanted(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What an engine says that has all experts in GPU memory."""
    with monkeypatch.context() as patch:
        hot = start(path, patch)
        found = told(hot.answer(TOKEN))
        hot.engine.close()
    assert hot.repairs.empty()
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """An engine on the stand-in GPU, and its model."""

    made: DecodingModel
    engine: Engine
    repairs: "queue.SimpleQueue[str]"  # a word for each that has ended

    def answer(self, token: int) -> list[TokenEvent]:
        """Return the events of an answer to a prompt of one token."""
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        params = SamplingParams(ignore_eos=True, max_tokens=3, temperature=0.0, logprobs=2)
        self.engine.submit(
            GenerationRequest(id="a", prompt=(token,), params=params, stop_ids=frozenset()),
            events.put,
        )
        found = [events.get(timeout=60)]
        while found[-1].finish_reason is None:
            found.append(events.get(timeout=60))
        return found


def start(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Running:
    """Start an engine whose model may have cold experts."""
    made = DecodingModel(open_checkpoint(path), 1, **settings)
    plan = made.plan.settings
    sampler = DeviceSampler.allocate(DECODE_ROWS, made.described.config.vocab, "cuda:0")
    stage = GpuStage("cuda:0", made.model, plan, frozenset(made.rings), sampler)
    repairs: queue.SimpleQueue[str] = queue.SimpleQueue()
    repair = Pipeline.repair

    def note(pipeline: Pipeline) -> None:
        repair(pipeline)
        repairs.put("repaired")

    monkeypatch.setattr(Pipeline, "repair", note)
    pipeline = Pipeline([stage], made.described.config.vocab)
    return Running(made, Engine(pipeline, plan, queue=4), repairs)


def told(events: list[TokenEvent]) -> list[object]:
    """Return the tokens of an answer and their probabilities, to the last bit."""
    return [(event.token, event.logprobs) for event in events]


class FailingOnce:
    """Stands in for a function that fails once, after some calls; it runs first if it `ends`."""

    def __init__(self, run: Callable[..., Any], calls: int, *, ends: bool) -> None:
        self._run, self._left, self._ends = run, calls, ends

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._left -= 1
        if self._left or self._ends:
            found = self._run(*given, **named)
        if not self._left:
            raise RuntimeError("no memory")
        return found


@pytest.mark.parametrize(
    ("layer", "within"),
    [(0, False), (1, False), (0, True), (1, True)],
    ids=["after the first", "after the last", "within the first", "within the last"],
)
def test_after_a_step_that_failed_in_a_layer_the_next_answer_has_the_same_bits(
    layer: int, within: bool, path: Path, wanted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = start(path, monkeypatch, cold="gpu", expert_budget="30%", expert_policy="lru")
    model = found.made.model
    if within:  # after `resolve` has given slots away, and before the experts have come
        failing = FailingOnce(experts.few_rows, layer + 1, ends=False)
        monkeypatch.setattr(experts, "few_rows", failing)
    else:
        blocks = list(model._layers)
        blocks[layer] = FailingOnce(blocks[layer], 1, ends=True)  # type: ignore[call-overload]
        monkeypatch.setattr(model, "_layers", blocks)
    (failed,) = found.answer(TOKEN)
    assert (failed.finish_reason, failed.token) == ("error", None)
    assert "no memory" in failed.error
    assert found.repairs.get(timeout=60) == "repaired"
    assert found.engine.alive
    store = model.store
    assert store is not None
    before = store.cache_counts.cpu()
    assert before[: layer + 1, COUNTERS.index("filled")].all()  # slots were given away
    store.take_places()
    for cached in cached_layers(store):
        for expert in cached.hot:
            slot, row = cached.slot_of(expert), cached.cold_of(expert)
            assert slot is not None
            assert row is not None
            assert torch.equal(slot.cpu(), row)
    assert told(found.answer(TOKEN)) == wanted
    assert found.repairs.empty()
    found.engine.close()
