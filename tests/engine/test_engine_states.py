"""Recurrent states in the engine: none is lost, and no sequence sees another's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headroom.engine.request import SamplingParams
from headroom.llm import LLM
from tests.families.oracles import variant

PROMPTS = ["a", "hello there", "x" * 70, "0123456789" * 9, "mixed\n\ttext", "zz", "q" * 33, "end"]
SETTINGS = {"context": 256, "parallel": 4, "chunk": 32, "threads": 1, "kv_type": "f32"}
PARAMS = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, seed=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variant("qwen35").save_gguf(tmp_path_factory.mktemp("states") / "tiny.gguf")


@pytest.fixture(scope="module")
def alone(path: Path) -> list[tuple[int, ...]]:
    """The answer of each prompt that runs by itself, numbered as in a batch of all."""
    with LLM(str(path), **SETTINGS) as llm:  # type: ignore[arg-type]
        return [
            llm.generate(prompt, replace(PARAMS, draw=draw))[0].token_ids
            for draw, prompt in enumerate(PROMPTS)
        ]


@pytest.fixture
def tight(path: Path) -> Iterator[LLM]:
    """An engine without the pages for all that may run together."""
    with LLM(str(path), cache_tokens=320, **SETTINGS) as llm:  # type: ignore[arg-type]
        yield llm


def test_an_answer_does_not_depend_on_who_shares_the_batch(
    path: Path, alone: list[tuple[int, ...]]
) -> None:
    with LLM(str(path), **SETTINGS) as llm:  # type: ignore[arg-type]
        assert [done.token_ids for done in llm.generate(PROMPTS, PARAMS)] == alone


def test_a_preempted_sequence_goes_on_with_the_same_tokens(
    tight: LLM, alone: list[tuple[int, ...]]
) -> None:
    assert [done.token_ids for done in tight.generate(PROMPTS, PARAMS)] == alone
    assert tight.engine.stats().preemptions > 0


def test_all_pages_and_states_come_back_after_cancellations_and_preemption(
    tight: LLM, alone: list[tuple[int, ...]]
) -> None:
    for _ in range(3):
        streams = [tight.stream(prompt, PARAMS) for prompt in PROMPTS]
        for pieces, stream in enumerate(streams):
            for _ in range(pieces):
                next(stream)
            stream.close()
    assert tight.generate(PROMPTS[3], replace(PARAMS, draw=3))[0].token_ids == alone[3]
    scheduler = tight.engine._scheduler
    assert tight.engine.stats().requests_finished["cancelled"] > 0
    assert tight.engine.stats().cache_pages_used == 0
    assert scheduler._state_slots.free == scheduler._state_slots.total == 4
