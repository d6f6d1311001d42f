"""Where several stages can work at once, the engine shares decoding sequences among steps."""

import queue
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from headroom.answers import Completion
from headroom.engine.request import SamplingParams, TokenEvent
from headroom.layers.batch import Batch
from headroom.layers.draws import Draw, TokenMask
from headroom.llm import LLM
from headroom.split.stage import StepResult
from tests.tiny import llama_config, random_model, save_gguf

PROMPTS = ("hello", "a", "three words here", "some other prompt", "and the last one of all")
WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2, "logprobs": 2},
    "scored": {"temperature": 0.0, "prompt_logprobs": True, "logprobs": 1},
}


class LastingResult:
    """The results of a step that stay valid when later steps begin."""

    lasts = True
    names_tokens = False

    def __init__(self, result: StepResult, number: int, log: list[tuple[str, int]]) -> None:
        self.token_rows: Mapping[int, int] = {}
        self.hidden = result.hidden.clone()
        rows = len(self.hidden)
        ones = [result.logits([row]).clone() for row in range(rows)]
        self._logits = torch.cat(ones) if ones else torch.zeros(0, 1)
        self._rows, self._number, self._log = rows, number, log

    def draw_limited(self, masks: Mapping[int, TokenMask | None]) -> None:
        """Do nothing: the engine draws all tokens."""

    def tokens(self) -> list[int | None]:
        self._log.append(("read", self._number))
        return [None] * self._rows

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        return self._logits[list(rows)]

    def normed(self, rows: Sequence[int]) -> torch.Tensor:
        raise AssertionError("no vectors are asked for")


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(llama_config(num_hidden_layers=2))
    return save_gguf(model, tmp_path_factory.mktemp("deep") / "m.gguf")


def opened(path: Path) -> LLM:
    return LLM(str(path), context=128, parallel=4, chunk=4, threads=1)


def deepened(llm: LLM, depth: int) -> tuple[list[Batch], list[tuple[str, int]]]:
    """Let the pipeline take `depth` steps at once; return its batches, and a log of its calls."""
    pipeline = llm.engine._pipeline
    batches: list[Batch] = []
    log: list[tuple[str, int]] = []
    step = pipeline.step

    def lasting_step(batch: Batch, draws: Sequence[Draw | None]) -> StepResult:
        batches.append(batch)
        log.append(("launch", len(batches)))
        return LastingResult(step(batch, draws), len(batches), log)

    pipeline.depth, pipeline.step = depth, lasting_step  # type: ignore[method-assign]
    pipeline._pays_to_share = lambda sequences, steps: True  # type: ignore[assignment]
    return batches, log


def told(answer: Completion) -> tuple[object, ...]:
    return answer.token_ids, answer.logprobs, answer.prompt_logprobs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [2, 3])
def test_answers_do_not_depend_on_how_many_steps_are_under_way(
    tiny_path: Path, way: str, depth: int
) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True, **WAYS[way])  # type: ignore[arg-type]
    with opened(tiny_path) as llm:
        plain = llm.generate(PROMPTS, params)
    with opened(tiny_path) as llm:
        deepened(llm, depth)
        found = llm.generate(PROMPTS, params)
    assert [told(answer) for answer in found] == [told(answer) for answer in plain]


def test_decoding_sequences_are_shared_among_steps_and_each_is_launched_before_the_last_is_read(
    tiny_path: Path,
) -> None:
    with opened(tiny_path) as llm:
        batches, log = deepened(llm, 2)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        requests = [llm.request(llm.tokenizer.encode(text), params) for text in PROMPTS[:4]]
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        with llm.engine._changed:  # the engine sees all of them at once
            for request in requests:
                llm.engine.submit(request, events.put)
        ended = 0
        while ended < len(requests):
            ended += events.get(timeout=60).finish_reason is not None
    # Once all prompts are computed, each step has two of the four sequences, until one has ended.
    slots = [tuple(span.state_slot for span in batch.spans) for batch in batches]
    pairs = [number for number, pair in enumerate(slots) if len(pair) == 2]
    assert len(pairs) > 20
    middle = range(pairs[len(pairs) // 4], pairs[-len(pairs) // 4])
    assert len(middle) > 8
    assert all(len(slots[number]) == 2 for number in middle)
    assert all(not set(a) & set(b) for a, b in pairwise(slots[number] for number in middle))
    # Two steps are under way at a time: step n is read after step n + 1 was launched.
    launched = [log.index(("launch", number + 1)) for number in middle]
    read = [log.index(("read", number)) for number in middle]
    assert all(first < then for first, then in zip(launched, read, strict=True))


def test_no_sequence_has_rows_in_two_steps_before_its_token_is_known(tiny_path: Path) -> None:
    with opened(tiny_path) as llm:
        batches, _ = deepened(llm, 3)
        answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6, seed=1))
    assert all(bool((batch.tokens >= 0).all()) for batch in batches)  # no placeholders
    assert len(answers) == len(PROMPTS)
