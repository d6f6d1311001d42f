"""--exact-batch: steps whose rounding would differ give answers that do not.

A GPU rounds a row of the prefill path by the rows of its step. A CPU does not, so here the rows of
each step get noise that depends on how many rows and sequences the step has; steps of the decode
path get none.
"""

from random import Random
from typing import Any

import pytest
import torch

from headroom.engine.scheduler import Scheduler, Turn
from headroom.formats.checkpoint import Checkpoint
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.layers.batch import Batch
from headroom.split.model import Model
from tests.engine.test_prefixes import Asker, Heard, checkpoint, push_out, words

__all__ = ["checkpoint"]

SETTINGS: dict[str, Any] = {"chunk": 128, "parallel": 4, "cache_tokens": 2048}


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows of the prefill path depend on the number of rows and sequences of their step."""
    first_rows = Model._first_rows

    def disturbed(model: Model, batch: Batch) -> torch.Tensor:
        x = first_rows(model, batch)
        rows = len(batch.tokens)
        if rows > DECODE_ROWS:
            x = x * (1 + 0.001 * Random(f"{rows} {len(batch.spans)}").random())
        return x

    monkeypatch.setattr(Model, "_first_rows", disturbed)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[Turn]]:
    """The turns of every step."""
    found: list[list[Turn]] = []
    next_turns = Scheduler.next_turns

    def recorded(scheduler: Scheduler, parts: int = 1) -> list[Turn]:
        turns = next_turns(scheduler, parts)
        found.append(turns)
        return turns

    monkeypatch.setattr(Scheduler, "next_turns", recorded)
    return found


def prompts() -> list[list[int]]:
    """Prompts of mixed length, of which some begin alike."""
    random = Random("exact")
    roots = [words(f"exact {number}", 400) for number in range(2)]
    found = []
    for number in range(12):
        kept = random.choice(roots)[: random.choice([0, 130, 300, 400])]
        found.append(kept + words(f"exact end {number}", random.randrange(1, 100)))
    return found


def alone(checkpoint: Checkpoint, **settings: Any) -> list[Heard]:
    """Ask each prompt by itself, without the cache."""
    asker = Asker(checkpoint, **SETTINGS | settings)
    found = [asker.ask(prompt, "sampled", key=None, max_tokens=8) for prompt in prompts()]
    asker.engine.close()
    return found


def together(asker: Asker, key: str | None = "") -> list[Heard]:
    """Ask all prompts at once."""
    asked = [asker.submit(x, "sampled", key=key, max_tokens=8) for x in prompts()]
    return [Heard(events) for events in asked]


def logprobs(heard: list[Heard]) -> list[list[float]]:
    return [one.logprobs for one in heard]


@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize("checkpoint", ["llama", "qwen35", "gemma4-31b"], indirect=True)
def test_an_answer_depends_neither_on_other_requests_nor_on_the_cache(
    checkpoint: Checkpoint,
) -> None:
    cold = alone(checkpoint, exact_batch=True)
    asker = Asker(checkpoint, **SETTINGS, exact_batch=True)
    for _ in range(3):  # then with more and more in the cache
        warm = together(asker)
        assert [one.tokens for one in warm] == [one.tokens for one in cold]
        assert logprobs(warm) == logprobs(cold)
    assert sum(one.cached for one in warm) > 1500
    asker.engine.close()


@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_without_it_the_noise_of_this_test_changes_logprobs(checkpoint: Checkpoint) -> None:
    cold = alone(checkpoint)
    asker = Asker(checkpoint, **SETTINGS)
    assert logprobs(together(asker, key=None)) != logprobs(cold)
    assert logprobs(together(asker)) != logprobs(cold)
    asker.engine.close()


@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_an_answer_that_was_preempted_goes_on_with_the_same_bits(checkpoint: Checkpoint) -> None:
    settings = {"chunk": 64, "parallel": 2, "context": 256, "cache_tokens": 256}
    ways = [words(number, 100) for number in range(2)]
    asker = Asker(checkpoint, **settings, exact_batch=True)
    cold = [asker.ask(one, key=None, max_tokens=60) for one in ways]
    for key in (None, ""):
        found = [Heard(x) for x in [asker.submit(one, key=key, max_tokens=60) for one in ways]]
        assert asker.engine.stats().preemptions > 0
        assert [one.tokens for one in found] == [one.tokens for one in cold]
        assert logprobs(found) == logprobs(cold)
    asker.engine.close()


@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_host_memory_and_files_keep_the_bits(checkpoint: Checkpoint, tmp_path: Any) -> None:
    settings = {"cache_tokens": 512, "parallel": 1, "exact_batch": True, "chunk": 64}
    prompt = words("tiers", 280)
    asker = Asker(checkpoint, **settings, cache_ram="64MiB", cache_dir=str(tmp_path))
    cold = asker.ask(prompt, key=None)
    asker.ask(prompt)
    push_out(asker)
    warm = asker.ask(prompt)
    asker.engine.close()
    again = Asker(checkpoint, **settings, cache_dir=str(tmp_path))
    read = again.ask(prompt)
    again.engine.close()
    other = Asker(checkpoint, **settings | {"exact_batch": False}, cache_dir=str(tmp_path))
    assert other.ask(prompt).cached == 0
    other.engine.close()
    assert warm.tokens == read.tokens == cold.tokens
    assert warm.logprobs == read.logprobs == cold.logprobs
    assert warm.cached >= 256
    assert read.cached >= 256


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_step_has_rows_of_one_prompt_or_rows_that_decode(
    checkpoint: Checkpoint, steps: list[list[Turn]]
) -> None:
    settings = {"chunk": 128, "parallel": 40, "cache_tokens": 8192, "exact_batch": True}
    asker = Asker(checkpoint, **settings)
    asked = [asker.submit(words(n, 20 + 5 * n), max_tokens=50) for n in range(40)]
    answers = [Heard(events) for events in asked]
    asker.engine.close()
    assert all(len(one.tokens) == 50 for one in answers)
    taken = [turns for turns in steps if turns]
    assert max(len(turns) for turns in taken) == DECODE_ROWS
    for turns in taken:
        assert len(turns) == 1 or all(turn.rows == 1 for turn in turns)
