"""Vectors of prompts: which rows they are made of, on a CPU and on the stand-in for a GPU."""

import queue
from pathlib import Path

import numpy as np
import pytest

from headroom.engine.engine import Engine
from headroom.engine.pooling import PooledRows, Vector, check_dimensions, shaped
from headroom.engine.request import GenerationRequest, Pooling, SamplingParams, TokenEvent
from headroom.errors import ModelError, RequestError
from headroom.llm import LLM
from tests.stand_in.gpu import stand_in_gpu
from tests.stand_in.stage import TableModel, device_engine, host_engine, settings

LENGTHS = (1, 7, 33, 70, 200)  # a step of the stand-in has at most 64 rows
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def ask(
    engine: Engine, name: str, prompt: tuple[int, ...], pooling: Pooling | None
) -> "queue.SimpleQueue[TokenEvent]":
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=4)
    request = GenerationRequest(
        id=name, prompt=prompt, params=params, stop_ids=frozenset(), pooling=pooling
    )
    engine.submit(request, events.put)
    return events


def run(engine: Engine, pooling: Pooling) -> list[Vector]:
    """Return the vectors of several prompts, which run beside an answer."""
    prompts = [tuple((3 * i + size) % 290 for i in range(size)) for size in LENGTHS]
    answer = ask(engine, "answer", (1, 2, 3), None)
    asked = [ask(engine, str(n), prompt, pooling) for n, prompt in enumerate(prompts)]
    vectors = []
    for events, prompt in zip(asked, prompts, strict=True):
        event = events.get(timeout=30)
        assert (event.finish_reason, event.token, event.generated_tokens) == ("stop", None, 0)
        assert event.prompt_tokens == len(prompt)
        assert event.timings is not None
        assert event.vector is not None
        vectors.append(event.vector)
        assert events.empty()
    tokens = [answer.get(timeout=30).token for _ in range(20)]
    assert None not in tokens
    assert engine.stats().cache_pages_used == 0
    engine.close()
    return vectors


def expected(pooling: Pooling) -> list[Vector]:
    model = TableModel()
    found = []
    for size in LENGTHS:
        tokens = [(3 * i + size) % 290 for i in range(size)]
        states = (model._tokens[tokens] + model._positions[:size]).flip(1).double().numpy()
        found.append((states.mean(0) if pooling == "mean" else states[-1]).astype(np.float32))
    return found


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("capturable", [True, False])
def test_a_gpu_and_a_cpu_pool_the_normed_rows_of_each_prompt(
    pooling: Pooling, capturable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host = run(host_engine(TableModel(), settings()), pooling)
    with stand_in_gpu(monkeypatch):
        on_device = run(device_engine(TableModel(capturable), settings())[0], pooling)
    for mine, its, wanted in zip(on_device, on_host, expected(pooling), strict=True):
        np.testing.assert_allclose(its, wanted, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(mine, its)


def test_a_preempted_prompt_counts_each_row_once() -> None:
    # 480 cached tokens hold neither the answers nor all prompts together.
    small = settings(cache_tokens=480, context=256)
    for mine, wanted in zip(
        run(host_engine(TableModel(), small), "mean"), expected("mean"), strict=True
    ):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-6)
    pooled = PooledRows("mean")
    for position in (0, 1, 0, 1, 2, 3):
        pooled.add(position, ROWS[position])
    np.testing.assert_array_equal(pooled.vector(), ROWS.mean(0))


def test_the_last_row_is_the_vector_or_the_mean_of_all() -> None:
    for pooling, wanted in (("last", ROWS[-1]), ("mean", ROWS.mean(0))):
        pooled = PooledRows(pooling)  # type: ignore[arg-type]
        for position, state in enumerate(ROWS):
            pooled.add(position, state)
        np.testing.assert_array_equal(pooled.vector(), wanted)


def test_a_vector_is_cut_first_and_scaled_to_length_1_then() -> None:
    vector = np.array([3.0, 4.0, 12.0], dtype=np.float32)
    np.testing.assert_allclose(shaped(vector), vector / 13, rtol=1e-6)
    np.testing.assert_allclose(shaped(vector, 2), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(shaped(np.zeros(3, dtype=np.float32)), np.zeros(3))


@pytest.mark.parametrize("dimensions", [0, -1, 17])
def test_dimensions_that_a_model_has_not_are_refused_with_those_it_has(dimensions: int) -> None:
    with pytest.raises(RequestError, match="this model's vectors have 16") as caught:
        check_dimensions(dimensions, 16)
    assert caught.value.param == "dimensions"
    check_dimensions(16, 16)
    check_dimensions(None, 16)


def test_a_cancelled_prompt_gives_no_vector(tiny_path: Path) -> None:
    with LLM(str(tiny_path), context=256, parallel=1, chunk=8, threads=1) as llm:
        first = ask(llm.engine, "a", tuple(range(200)), "mean")
        llm.engine.cancel("a")
        event = first.get(timeout=30)
        assert event.finish_reason in ("cancelled", "stop")
        assert (event.vector is None) == (event.finish_reason == "cancelled")


def test_a_vector_that_is_not_finite_is_an_error() -> None:
    for broken in (np.nan, np.inf):
        rows = PooledRows("mean")
        rows.add(0, np.array([1, broken], dtype=np.float32))
        with pytest.raises(ModelError, match="not finite"):
            rows.vector()
