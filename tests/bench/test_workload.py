"""Requests that decode together: whose tokens count, and what an early end of one says."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from headroom.bench import workload
from headroom.bench.workload import ConcurrentRequests, TimedRequest, random_prompt
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.errors import HeadroomError

FREE = SamplingParams(ignore_eos=True)


class Stepping:
    """An engine that answers each request at once with so many tokens, a second apart."""

    vocab = 100

    def __init__(self, tokens: int, error: str = "") -> None:
        self._tokens, self._error = tokens, error
        self.cancelled: list[str] = []
        self._events: dict[str, Callable[[TokenEvent], None]] = {}

    def submit(self, request: GenerationRequest, tell: Callable[[TokenEvent], None]) -> None:
        self._events[request.id] = tell
        for token in range(self._tokens):
            tell(TokenEvent(request_id=request.id, token=token))
        if self._error:
            tell(TokenEvent(request_id=request.id, finish_reason="error", error=self._error))

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)
        self._events[name](TokenEvent(request_id=name, finish_reason="cancelled"))


@pytest.fixture(autouse=True)
def _seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every event takes a second."""
    clock = count()
    monkeypatch.setattr(workload, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))


def test_prompts_of_one_seed_are_the_same_and_others_are_not() -> None:
    assert random_prompt(64, 100, 3) == random_prompt(64, 100, 3)
    assert random_prompt(64, 100, 3) != random_prompt(64, 100, 4)
    assert set(random_prompt(500, 100, 3)) <= set(range(100))


def test_an_answer_that_ends_before_its_tokens_came_says_why() -> None:
    answer = TimedRequest(Stepping(2, "the GPU is gone"), (1, 2), FREE)  # type: ignore[arg-type]
    answer.submit()
    answer.wait(2)
    with pytest.raises(HeadroomError, match=r"An answer ended after 2 tokens: the GPU is gone\."):
        answer.wait(3)


def test_shrinking_ends_the_last_requests_alone() -> None:
    engine: Any = Stepping(1)
    requests = ConcurrentRequests(engine, 8, 3, FREE)
    requests.start()
    names = [answer.request.id for answer in requests.answers]
    requests.shrink(1)
    assert engine.cancelled == names[1:]
    requests.close()
    assert engine.cancelled == [*names[1:], names[0]]


def test_a_measurement_begins_after_the_warm_tokens_of_the_request_that_started_last() -> None:
    requests = ConcurrentRequests(Stepping(1), 8, 2, FREE)  # type: ignore[arg-type]
    requests.start()
    first, last = requests.answers
    assert first.times[0] < last.times[0]
    assert all(len(answer.times) == 1 for answer in requests.answers)

    read: list[int] = []
    wait = TimedRequest.wait

    def step(answer: TimedRequest, tokens: int) -> None:
        """Decode both until the one that is waited for has its tokens."""
        assert answer is last
        while len(last.times) < tokens:
            for one in (first, last):
                one._on_event(TokenEvent(request_id=one.request.id, token=0))
        wait(answer, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimedRequest, "wait", step)
        found = requests.decode(4, 2, lambda: read.append(len(last.times)))  # type: ignore[arg-type,func-returns-value]
    # Two sequences share the clock: each has a token every two seconds.
    assert found.step_s == 2.0
    # One token was there, one let experts be read, two were warm, four were measured.
    assert read == [2, 9]
    assert found.mean_context == 8 + 8 - 2
