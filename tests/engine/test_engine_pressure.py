"""A step that lacks memory is tried again with fewer rows; only what can never run is refused."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.formats.checkpoint import Checkpoint
from headroom.layers.batch import Batch
from headroom.llm import LLM
from headroom.split.pipeline import Pipeline
from tests.engine.test_prefixes import Asker, Heard, LlmAsker, checkpoint, words
from tests.scripted import ScriptedDrafter
from tests.synth_models import write_model

__all__ = ["checkpoint"]

SETTINGS: dict[str, Any] = {"chunk": 128, "parallel": 4, "cache_tokens": 2048}
PROMPTS = [words(f"pressure {number}", 20 + 90 * number) for number in range(5)]


class Shortage:
    """Lets steps fail as on a GPU without memory, after they have changed caches and states."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most_rows = self.most_sequences = 10**9
        self.most_guessed = 10**9  # rows of a step with guesses
        self.failed = 0
        step = Pipeline.step

        def short(pipeline: Pipeline, batch: Batch, draws: Any = ()) -> Any:
            result = step(pipeline, batch, draws)
            if batch.guessed and len(batch.tokens) > self.most_guessed:
                self.failed += 1
                raise MemoryError("no room for 9 rows")
            if len(batch.tokens) > self.most_rows or len(batch.spans) > self.most_sequences:
                self.failed += 1
                raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB of 2.00 GiB that are free")
            return result

        monkeypatch.setattr(Pipeline, "step", short)


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    return Shortage(monkeypatch)


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35", "gemma4-31b"], indirect=True)
@pytest.mark.parametrize(("rows", "sequences"), [(100, 9), (40, 9), (140, 2), (33, 1)])
def test_no_request_fails_while_smaller_steps_can_run(
    checkpoint: Checkpoint,
    shortage: Shortage,
    rows: int,
    sequences: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asker = Asker(checkpoint, **SETTINGS)
    cold = [asker.ask(prompt, key=None, max_tokens=30).tokens for prompt in PROMPTS]
    shortage.most_rows, shortage.most_sequences = rows, sequences
    with caplog.at_level(logging.WARNING):
        for way in (None, ""):
            asked = [asker.submit(prompt, key=way, max_tokens=30) for prompt in PROMPTS]
            assert [Heard(events).tokens for events in asked] == cold
    assert 0 < shortage.failed < 20
    assert re.search(
        r"pressure: a step of \d+ rows of \d sequences lacked memory .* take \d+ rows of a step, "
        r"not \d+, at most \d sequences run, .* at most \d+ rows: Tried to allocate 3.00 GiB",
        caplog.text,
    )
    asker.engine.close()
    assert asker.engine.stats().cache_pages_used == 0


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_steps_grow_again_when_memory_suffices(checkpoint: Checkpoint, shortage: Shortage) -> None:
    asker = Asker(checkpoint, **SETTINGS)
    shortage.most_rows, shortage.most_sequences = 40, 1
    for events in [asker.submit(prompt, max_tokens=5) for prompt in PROMPTS]:
        Heard(events)
    scheduler = asker.engine._scheduler
    assert (scheduler.chunk, scheduler.most_running) == (32, 1)
    shortage.most_rows = shortage.most_sequences = 10**9
    for number in range(4):
        asker.ask(words(number, 20), max_tokens=120)
    assert (scheduler.chunk, scheduler.most_running) == (128, 4)
    asker.engine.close()


@pytest.mark.parametrize("name", ["llama", "qwen35"])
@pytest.mark.parametrize("most", [5, 0])
def test_steps_check_fewer_guesses_while_memory_is_short(
    name: str,
    most: int,
    shortage: Shortage,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_model(name, "q8_0", tmp_path, few_layers=True)
    settings: dict[str, Any] = {"context": 512, "parallel": 2, "threads": 1, "dtype": "f32"}
    with LLM(str(path), **settings, kv_type="f32") as llm:
        cold = [LlmAsker(llm).ask(words(number, 90), max_tokens=200) for number in range(2)]
    texts = [[*words(number, 90), *one.tokens] for number, one in enumerate(cold)]
    drafter = ScriptedDrafter(texts, 0.8)
    drafts = {"draft": "ngram", "draft_tokens": 8, "draft_always": True}
    with LLM(str(path), drafter=drafter, **drafts, **settings, kv_type="f32") as llm:
        asker, drafting = LlmAsker(llm), llm.engine._drafting
        rows = drafting.rows
        shortage.most_guessed = most
        with caplog.at_level(logging.INFO):
            assert asker.ask(words(0, 90), max_tokens=40).tokens == cold[0].tokens[:40]
            assert 0 < shortage.failed <= 5
            assert drafting.rows <= max(most, 1)
            shortage.most_guessed = 10**9
            while drafting.rows < rows:
                assert asker.ask(words(1, 90), max_tokens=200).tokens == cold[1].tokens
        assert re.search(r"guesses are checked in at most \d rows: no room for 9", caplog.text)
        assert "steps check guesses in 2 rows again" in caplog.text or most


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_the_one_request_that_cannot_run_is_refused_with_the_numbers(
    checkpoint: Checkpoint, shortage: Shortage
) -> None:
    asker = Asker(checkpoint, **SETTINGS)
    cold = asker.ask(PROMPTS[1], key=None)
    shortage.most_rows = 0
    event = asker.submit(PROMPTS[2]).get(timeout=60)
    assert event.finish_reason == "error"
    assert "Tried to allocate 3.00 GiB of 2.00 GiB that are free" in event.error
    shortage.most_rows = 10**9
    assert asker.ask(PROMPTS[1]).tokens == cold.tokens
    asker.engine.close()
