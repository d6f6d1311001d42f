"""The work that is measured: requests that decode together, and whole steps without the engine."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headroom.bench.expert_use import TelemetryReading
from headroom.engine.batching import make_batch
from headroom.engine.engine import Engine
from headroom.engine.request import GenerationRequest, SamplingParams, TokenConstraint, TokenEvent
from headroom.engine.scheduler import Turn
from headroom.engine.sequence import Sequence as RunningSequence
from headroom.errors import HeadroomError
from headroom.experts.traces.taps import ImposedTrace
from headroom.layers.batch import Batch
from headroom.llm import OpenedModel
from headroom.plan.settings import pages_for
from headroom.split.stage_times import NamedTimes

_NUMBERS = itertools.count()
VARIANTS = 8  # different steps that take turns, so that no expert stays in a CPU's cache
MOST_STEPS, ENOUGH_S = 64, 2.0  # a measurement ends after so many steps or seconds


def random_prompt(tokens: int, vocab: int, seed: int) -> tuple[int, ...]:
    """Return random token ids, which make routers choose many experts; equal seeds, equal ids."""
    return tuple(random.Random(seed).choices(range(vocab), k=tokens))


class TimedRequest:
    """One request and the times at which its tokens came; the engine's thread writes them."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        params: SamplingParams,
        constraint: TokenConstraint | None = None,
        *,
        cache_key: str | None = None,  # None: the prompt is computed whole, and not kept
        message_ends: frozenset[int] = frozenset(),  # tokens after which its prompt may be cut
    ) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._submitted = 0.0
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.last: TokenEvent | None = None  # the last event, once the request has ended
        self.request = GenerationRequest(
            id=f"bench-{next(_NUMBERS)}",
            prompt=tuple(prompt),
            params=params,
            stop_ids=message_ends,
            constraint=constraint,
            cache_key=cache_key,
        )
        self._wanted = 0
        self._call: Callable[[], None] | None = None

    def submit(self) -> None:
        """Hand the request to the engine."""
        self._submitted = time.perf_counter()
        self._engine.submit(self.request, self._on_event)

    @property
    def first_token_s(self) -> float:
        """Seconds from the submission to the first token."""
        return self.times[0] - self._submitted

    def wait(self, tokens: int) -> None:
        """Wait until `tokens` tokens have come; an answer that ends with fewer is an error."""
        with self._changed:
            self._wanted = tokens
            self._changed.wait_for(lambda: len(self.times) >= tokens or self.last is not None)
        if len(self.times) < tokens:
            assert self.last is not None
            reason = self.last.error or self.last.finish_reason
            raise HeadroomError(f"An answer ended after {len(self.times)} tokens: {reason}.")

    def at_next(self, call: Callable[[], None]) -> int:
        """Run `call` in the engine's thread at the next token; return the tokens before it."""
        with self._changed:
            self._call = call
            return len(self.times)

    def end(self) -> None:
        """Cancel the request if it still runs, and wait until it has ended."""
        self._engine.cancel(self.request.id)
        with self._changed:
            self._changed.wait_for(lambda: self.last is not None)

    def _on_event(self, event: TokenEvent) -> None:
        now = time.perf_counter()
        with self._changed:
            if event.token is not None:
                self.times.append(now)
                self.tokens.append(event.token)
                call, self._call = self._call, None
                if call is not None:
                    call()
            if event.finish_reason is not None:
                self.last = event
            # Waking the waiting thread at every token would cost the engine's thread time.
            if self.last is not None or len(self.times) == self._wanted:
                self._changed.notify()


class Reading(NamedTuple):
    """Counters of the engine at one time."""

    experts: TelemetryReading | None  # None: the model has no experts
    stages: NamedTimes  # empty: one stage runs all layers


@dataclass(frozen=True, slots=True)
class DecodeMeasurement:
    """Steps in which all concurrent requests decoded."""

    step_s: float  # mean time of a step
    mean_context: float  # mean number of tokens that a request had in the cache
    # A few steps before the first measured step, and after the last.
    readings: "tuple[Reading, Reading] | None" = None


class ConcurrentRequests:
    """Several requests with prompts of equal length that run at the same time."""

    def __init__(
        self,
        engine: Engine,
        prompt_tokens: int,
        batch: int,
        params: SamplingParams,
        constraints: Sequence[TokenConstraint | None] | None = None,  # one for each request
    ) -> None:
        self._engine = engine
        self._prompt_tokens = prompt_tokens
        self.answers = [
            TimedRequest(
                engine, random_prompt(prompt_tokens, engine.vocab, seed), params, constraint
            )
            for seed, constraint in enumerate(constraints or [None] * batch)
        ]

    def start(self) -> None:
        """Submit all requests and wait until each has its first token."""
        for answer in self.answers:
            answer.submit()
        for answer in self.answers:
            answer.wait(1)

    def decode(
        self, tokens: int, warm: int, read: Callable[[], Reading] | None = None
    ) -> DecodeMeasurement:
        """Let each request decode `warm` tokens, then measure `tokens` more.

        The engine's thread calls `read` before and after.
        """
        # The request that began last: when it had its first token, all others were decoding.
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
        return DecodeMeasurement(elapsed / tokens, mean, pair)

    def shrink(self, batch: int) -> None:
        """End all requests but the first `batch`."""
        for answer in self.answers[batch:]:
            answer.end()
        del self.answers[batch:]

    def close(self, finish: int = 0) -> None:
        """Wait until every request has `finish` tokens, then end all requests."""
        for answer in self.answers:
            answer.wait(finish)
        self.shrink(0)


def move_trace(opened: OpenedModel, tokens: int) -> None:
    """Let what is measured next begin so many tokens later in the routing trace, if one is imposed.

    A cache of experts would hold what the same tokens chose a moment ago.
    """
    if isinstance(opened.tap, ImposedTrace):
        opened.tap.move(tokens)


def step_seconds(opened: OpenedModel, context: int, *, batch: int = 1, rows: int = 1) -> float:
    """Return the mean time in seconds of steps in which each sequence has `rows` new tokens.

    The cache holds whatever earlier prompts left there: only its length matters here.
    """
    steps = _variants(opened, context, batch, rows)
    with torch.inference_mode():
        for step in steps[:2]:
            _run(opened, step)
            move_trace(opened, rows)
        _wait(opened)
        done, started = 0, time.perf_counter()
        while not done or (done < MOST_STEPS and time.perf_counter() - started < ENOUGH_S):
            for step in steps:
                _run(opened, step)
                move_trace(opened, rows)
            _wait(opened)
            done += len(steps)
    return (time.perf_counter() - started) / done


def run_steps(
    opened: OpenedModel, context: int, count: int, *, batch: int = 1, rows: int = 1
) -> None:
    """Run `count` steps over whatever earlier prompts left in the cache, and wait for them."""
    steps = _variants(opened, context, batch, rows)
    with torch.inference_mode():
        for turn in range(count):
            _run(opened, steps[turn % VARIANTS])
            move_trace(opened, rows)
        _wait(opened)


def _run(opened: OpenedModel, step: Batch) -> None:
    result = opened.pipeline.step(step)
    if opened.on_gpu:
        return  # a captured step computes the logits, too; they stay on the GPU
    most = opened.plan.settings.parallel
    rows = range(len(step.output_rows))
    for first in range(0, len(rows), most):
        if opened.in_workers:
            result.logits(rows[first : first + most])
        else:
            opened.pipeline.logits(result.hidden[first : first + most])


def _wait(opened: OpenedModel) -> None:
    if opened.on_gpu:
        torch.cuda.synchronize(opened.torch_device)


def _variants(opened: OpenedModel, context: int, batch: int, rows: int) -> list[Batch]:
    return [_batch(opened, context, batch, rows, seed) for seed in range(VARIANTS)]


def _batch(opened: OpenedModel, context: int, batch: int, rows: int, seed: int) -> Batch:
    pages, vocab = pages_for(context + rows), opened.pipeline.vocab
    new = [random_prompt(rows, vocab, seed * batch + number) for number in range(batch)]
    turns = [Turn(_cached(context, new[number], number, pages), rows) for number in range(batch)]
    return make_batch(turns, opened.plan.settings.page_size)


def _cached(context: int, new: tuple[int, ...], number: int, pages: int) -> RunningSequence:
    """Return a sequence that has `context` tokens in the cache and the `new` ones to compute."""
    request = GenerationRequest(
        id=f"step-{number}",
        prompt=(0,) * context + new,
        params=SamplingParams(prompt_logprobs=True),  # logits of all rows
        stop_ids=frozenset(),
    )
    own = list(range(number * pages, (number + 1) * pages))
    one = RunningSequence(request, lambda event: None, limit=1 << 30, pages=own, state_slot=number)
    one.cached = context
    return one
