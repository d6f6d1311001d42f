"""Crowd: requests that decode together through the engine, and when their tokens came."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headroom.bench.expert_use import Reading
from headroom.engine.engine import Engine
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.errors import HeadroomError

_NUMBERS = itertools.count()


def random_prompt(tokens: int, vocab: int, seed: int) -> tuple[int, ...]:
    """Return token ids that are the same for the same seed, so that experts are chosen widely."""
    return tuple(random.Random(seed).choices(range(vocab), k=tokens))


class Answer:
    """One request: the times of its tokens, written by the engine's thread."""

    def __init__(self, engine: Engine, prompt: Sequence[int], params: SamplingParams) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self.times: list[float] = []
        self.last: TokenEvent | None = None  # once it has ended
        self.request = GenerationRequest(
            id=f"bench-{next(_NUMBERS)}",
            prompt=tuple(prompt),
            params=params,
            stop_ids=frozenset(),
        )
        self._wanted = 0
        self._call: Callable[[], None] | None = None

    def submit(self) -> None:
        """Hand the request to the engine."""
        self._engine.submit(self.request, self._on_event)

    def wait(self, tokens: int) -> None:
        """Return when so many tokens have come; an answer that ends before is an error."""
        with self._changed:
            self._wanted = tokens
            self._changed.wait_for(lambda: len(self.times) >= tokens or self.last is not None)
        if len(self.times) < tokens:
            assert self.last is not None
            reason = self.last.error or self.last.finish_reason
            raise HeadroomError(f"An answer ended after {len(self.times)} tokens: {reason}.")

    def at_next(self, call: Callable[[], None]) -> int:
        """Let the engine's thread do something at the next token; return the tokens before it."""
        with self._changed:
            self._call = call
            return len(self.times)

    def end(self) -> None:
        """Cancel the request if it still runs, and return when it has ended."""
        self._engine.cancel(self.request.id)
        with self._changed:
            self._changed.wait_for(lambda: self.last is not None)

    def _on_event(self, event: TokenEvent) -> None:
        now = time.perf_counter()
        with self._changed:
            if event.token is not None:
                self.times.append(now)
                call, self._call = self._call, None
                if call is not None:
                    call()
            if event.finish_reason is not None:
                self.last = event
            # Waking the other thread at every token would take time from the engine's.
            if self.last is not None or len(self.times) == self._wanted:
                self._changed.notify()


@dataclass(frozen=True, slots=True)
class Decoded:
    """Some steps in which all of a crowd decoded."""

    step_s: float
    mean_context: float  # tokens in each one's cache
    # Of experts, where there are any: before these steps and a few others, and after them.
    readings: tuple[Reading, Reading] | None = None


class Crowd:
    """Several requests with prompts of one length, all running at once."""

    def __init__(self, engine: Engine, prompt_tokens: int, batch: int, params: SamplingParams):
        self._engine = engine
        self._prompt_tokens = prompt_tokens
        self.answers = [
            Answer(engine, random_prompt(prompt_tokens, engine.vocab, seed), params)
            for seed in range(batch)
        ]

    def start(self) -> None:
        """Hand all requests to the engine and wait until each has its first token."""
        for answer in self.answers:
            answer.submit()
        for answer in self.answers:
            answer.wait(1)

    def decode(self, tokens: int, warm: int, read: Callable[[], Reading] | None = None) -> Decoded:
        """Let each write `warm` tokens, then measure `tokens` more.

        Experts are read by the engine's thread, before and after what is measured.
        """
        # The last to begin had its first token when all others were running already.
        slow = max(self.answers, key=lambda answer: answer.times[0])
        readings: list[Reading] = []

        def take() -> None:
            if read is not None:
                readings.append(read())

        first = slow.at_next(take) + 1 + warm
        slow.wait(first + tokens)
        elapsed = slow.times[first + tokens - 1] - slow.times[first - 1]
        written = sum(len(answer.times) for answer in self.answers) / len(self.answers)
        slow.wait(slow.at_next(take) + 1)
        mean = self._prompt_tokens + written - tokens / 2
        pair = (readings[0], readings[1]) if readings else None
        return Decoded(elapsed / tokens, mean, pair)

    def shrink(self, batch: int) -> None:
        """End all but the first so many."""
        for answer in self.answers[batch:]:
            answer.end()
        del self.answers[batch:]

    def close(self, finish: int = 0) -> None:
        """End all of them; those that end by themselves after `finish` tokens are waited for."""
        for answer in self.answers:
            answer.wait(finish)
        self.shrink(0)
