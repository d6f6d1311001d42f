"""The scripted engine answers with the script's text, within the limits of a request."""

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import pytest

from headroom.answers import Completion
from headroom.engine.request import SamplingParams, TokenEvent
from headroom.errors import ContextLengthError
from headroom.llm import LLM
from tests.clients.model import write_model
from tests.clients.scripted import ScriptedEngine, scripted_model


class OnlyThese:
    """A constraint that allows some tokens anywhere."""

    def __init__(self, tokens: list[int], vocab: int) -> None:
        self._mask = np.zeros(-(-vocab // 32), np.uint32)
        for token in tokens:
            self._mask[token // 32] |= np.uint32(1 << token % 32)
        self.taken: list[int] = []

    def mask(self) -> npt.NDArray[np.uint32]:
        return self._mask

    def advance(self, token: int) -> None:
        self.taken.append(token)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = write_model("qwen3", tmp_path_factory.mktemp("model") / "m.gguf")
    with scripted_model(path, lambda prompt: f"I saw: {prompt}", context=64, name="m") as llm:
        yield llm


def events_of(llm: LLM, constraint: OnlyThese | None = None) -> list[TokenEvent]:
    events: SimpleQueue[TokenEvent] = SimpleQueue()
    request = llm.request(llm.tokenizer.encode("Hi"), SamplingParams(), constraint)
    llm.engine.submit(request, events.put)
    read = [events.get(timeout=10)]
    while read[-1].finish_reason is None:
        read.append(events.get(timeout=10))
    return read


def test_an_answer_is_the_scripts_and_ends_by_itself(llm: LLM) -> None:
    (answer,) = llm.generate("Hi")
    assert isinstance(answer, Completion)
    assert (answer.text, answer.finish_reason) == ("I saw: Hi", "stop")


def test_an_answer_ends_where_the_request_or_the_context_does(llm: LLM) -> None:
    (short,) = llm.generate("Hi", SamplingParams(max_tokens=2))
    assert (short.generated_tokens, short.finish_reason) == (2, "length")
    (full,) = llm.generate("x" * 60, SamplingParams(max_tokens=1000))
    assert (full.prompt_tokens + full.generated_tokens, full.finish_reason) == (64, "length")
    with pytest.raises(ContextLengthError):
        llm.generate("x" * 64)


def test_a_token_that_a_constraint_forbids_fails_the_request(llm: LLM) -> None:
    said = [*llm.tokenizer.encode("I saw: Hi"), llm.tokenizer.eos_id]
    right = OnlyThese(said, llm.vocab_size)
    assert [event.token for event in events_of(llm, right)] == said
    assert right.taken == said
    endless = OnlyThese(said[:-1], llm.vocab_size)
    last = events_of(llm, endless)[-1]
    assert (last.finish_reason, last.generated_tokens) == ("error", len(said) - 1)
    assert "constraint" in last.error


def test_a_script_that_fails_fails_the_request(llm: LLM) -> None:
    engine = llm.engine
    assert isinstance(engine, ScriptedEngine)
    script = engine.script
    engine.script = lambda prompt: {}[prompt]
    (event,) = events_of(llm)
    engine.script = script
    assert event.finish_reason == "error"
    assert "KeyError('Hi')" in event.error
