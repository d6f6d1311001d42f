"""Tokens drawn on a device are those that the engine draws, whatever a request asks for."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from headroom.engine.engine import Engine
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.split.gpu_stage import GpuResult
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.stage import NotedStage, TableModel, device_engine, host_engine, settings

LONG = {"max_tokens": 30, "ignore_eos": True}
CASES = {
    "greedy": SamplingParams(temperature=0, **LONG),
    "plain": SamplingParams(seed=1, **LONG),
    "filters": SamplingParams(seed=2, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, **LONG),
    "penalties": SamplingParams(
        seed=3, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3,
        penalty_window=12, **LONG,
    ),
    "penalties over all tokens": SamplingParams(
        temperature=0, repetition_penalty=1.3, penalty_window=0, **LONG
    ),
    "bias": SamplingParams(seed=4, logit_bias={5: 4.0, 9: -50.0, 7: 3.5}, **LONG),
    "draws": SamplingParams(seed=1, draw=2, **LONG),
    "logprobs": SamplingParams(seed=5, logprobs=3, **LONG),
    "prompt logprobs": SamplingParams(seed=6, prompt_logprobs=True, logprobs=1, **LONG),
}  # fmt: skip


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """Let this machine have the stand-in GPU."""
    with stand_in_gpu(monkeypatch) as made:
        yield made


@contextmanager
def engines(**changed: int) -> Iterator[tuple[Engine, Engine, NotedStage]]:
    plan = settings(**changed)
    drawing, stage = device_engine(TableModel(), plan)
    host = host_engine(TableModel(), plan)
    try:
        yield drawing, host, stage
    finally:
        drawing.close()
        host.close()


def start(engine: Engine, name: str, prompt: range, params: SamplingParams) -> queue.SimpleQueue:
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    request = GenerationRequest(
        id=name, prompt=tuple(prompt), params=params, stop_ids=frozenset({299})
    )
    engine.submit(request, events.put)
    return events


def ended(events: queue.SimpleQueue) -> list[TokenEvent]:
    found = [events.get(timeout=30)]
    while found[-1].finish_reason is None:
        found.append(events.get(timeout=30))
    assert not found[-1].error
    return found


def told(events: list[TokenEvent]) -> list[object]:
    return [(e.token, e.logprobs, e.prompt_logprobs, e.finish_reason) for e in events]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [3, 40, 150])
def test_a_device_draws_what_the_engine_draws(name: str, length: int) -> None:
    with engines() as (drawing, host, _):
        found, wanted = (
            ended(start(engine, "a", range(7, 7 + length), CASES[name]))
            for engine in (drawing, host)
        )
    assert told(found) == told(wanted)
    assert len(found) == 30


def test_rows_with_different_sampling_settings_share_steps_on_a_device() -> None:
    with engines(parallel=8) as (drawing, host, _):
        both = []
        for engine in (drawing, host):
            running = [
                start(engine, name, range(3, 10 + 9 * number), params)
                for number, (name, params) in enumerate(CASES.items())
            ]
            both.append([told(ended(events)) for events in running])
    assert both[0] == both[1]


def test_only_rows_that_need_them_bring_logits_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    logits = GpuResult.logits
    with engines() as (drawing, _, stage):
        model = stage._model

        def count(self: GpuResult, rows: list[int]) -> torch.Tensor:
            fetched.append(len(rows))
            return logits(self, rows)

        monkeypatch.setattr(GpuResult, "logits", count)
        ended(start(drawing, "plain", range(9), CASES["plain"]))
        assert fetched == []
        ended(start(drawing, "logprobs", range(9), CASES["logprobs"]))
        assert fetched == [1] * 30
        assert model.capturable


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1, repetition_penalty=1.3, penalty_window=0, **LONG),
        SamplingParams(seed=1, presence_penalty=0.5, penalty_window=1500, **LONG),
        SamplingParams(seed=1, logit_bias={token: 0.01 * token for token in range(290)}, **LONG),
    ],
    ids=["whole history", "wide window", "many biases"],
)
def test_what_a_device_cannot_hold_is_drawn_by_the_engine(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.layers.draws.BIASES", 200)
    sizes = {"context": 2048, "cache_tokens": 8192, "chunk": 512}
    with engines(**sizes) as (drawing, host, _):
        prompt = [number % 290 for number in range(1010)]  # passes 1024 while it is continued
        found, wanted = (
            told(ended(start(engine, "a", prompt, params)))  # type: ignore[arg-type]
            for engine in (drawing, host)
        )
    assert found == wanted


def test_a_model_that_waits_for_the_host_is_run_and_not_captured() -> None:
    plan = settings()
    drawing, stage = device_engine(TableModel(capturable=False), plan)
    host = host_engine(TableModel(), plan)
    found, wanted = (
        told(ended(start(engine, "a", range(20), CASES["filters"]))) for engine in (drawing, host)
    )
    drawing.close()
    host.close()
    assert found == wanted
    assert stage.kinds == []


def test_decoding_steps_are_captured_before_the_first_request() -> None:
    with engines(parallel=3) as (drawing, _, stage):
        before = [(kind.rows, kind.span_rows) for kind in stage.kinds]
        assert before == [(1, 1), (2, 1), (4, 1), (32, 32)]
        running = [start(drawing, str(n), range(100), CASES["plain"]) for n in range(3)]
        for events in running:
            ended(events)
        assert all(kind.span_rows == kind.rows for kind in stage.kinds[len(before) :])


def test_no_step_is_captured_twice_over_many_requests() -> None:
    with engines(parallel=3) as (drawing, _, stage):
        for turn in range(10):
            running = [
                start(drawing, f"{turn}-{n}", range(3, 9 + 11 * n + turn), CASES["plain"])
                for n in range(3)
            ]
            assert [len(ended(events)) for events in running] == [30] * 3
        assert len(stage.kinds) == len(set(stage.kinds))
        assert len(stage.kinds) <= 8  # of 1, 2 and 4 rows that decode; of 2 to 32 with others
