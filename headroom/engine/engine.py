"""Engine: the thread that schedules, runs, samples and emits."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from headroom.engine.batching import make_batch
from headroom.engine.outputs import Flight, Output, list_draws, list_outputs, read_outputs
from headroom.engine.pages import PagePool
from headroom.engine.request import (
    FinishReason,
    GenerationRequest,
    TokenEvent,
    TokenLogprobs,
    check_request,
)
from headroom.engine.sampler import Row
from headroom.engine.scheduler import Limits, Scheduler, Turn
from headroom.engine.sequence import Sequence
from headroom.engine.stats import Counters, EngineStats
from headroom.errors import CapacityError, DeviceError, RequestError
from headroom.plan.settings import PlanSettings
from headroom.split.pipeline import Pipeline
from headroom.split.upkeep import ExpertUpkeep

log = logging.getLogger(__name__)


class Engine:
    """Takes requests from any thread; one thread of its own turns them into tokens."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: PlanSettings,
        queue: int,
        upkeep: ExpertUpkeep | None = None,
    ) -> None:
        self._pipeline = pipeline
        self.upkeep = upkeep  # of experts; other threads may call it when the engine is closed
        self._settings = settings
        self.vocab = pipeline.vocab
        self.capacity = settings.parallel + queue  # requests that may run or wait
        self._pool = PagePool(settings.pages)
        limits = Limits(settings.parallel, settings.chunk, settings.page_size)
        self._scheduler = Scheduler(limits, self._pool)
        self._counters = Counters()
        # The lock guards what other threads see: the five fields below and nothing else.
        self._changed = threading.Condition()
        self._live: dict[str, Sequence] = {}
        self._inbox: deque[Sequence] = deque()
        self._cancelled: set[str] = set()
        self._closing = False
        self._failure = ""  # what ended the thread, if it was not close()
        self._thread = threading.Thread(target=self._run, name="headroom-engine", daemon=True)
        self._thread.start()

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that this engine cannot run, whatever else it is doing."""
        check_request(request, self._settings.context, self.vocab)

    def submit(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        """Queue a request; `on_event` is called from the engine thread and must not block.

        An answer ends where the context ends, also if `max_tokens` would allow more.
        """
        self.check(request)
        limit = self._settings.context
        wanted = request.params.max_tokens
        if wanted is not None and len(request.prompt) + wanted > limit:
            log.info(
                "request: %s may generate %d tokens, not %d: a prompt of %d in a context of %d",
                request.id,
                limit - len(request.prompt),
                wanted,
                len(request.prompt),
                limit,
            )
        elif wanted is not None:
            limit = len(request.prompt) + wanted
        sequence = Sequence(request, on_event, limit)
        with self._changed:
            if self._closing:
                raise CapacityError(self._failure or "The engine is shutting down.")
            if len(self._live) >= self.capacity:
                raise CapacityError(
                    f"{len(self._live)} requests are running or waiting, which is the limit.",
                    hint="Try again later, or raise --queue.",
                )
            if request.id in self._live:
                raise RequestError(f"Request id {request.id!r} is in use.", param="id")
            self._live[request.id] = sequence
            self._inbox.append(sequence)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """End a request at the next step; an id that has ended already is nobody's."""
        with self._changed:
            if request_id in self._live:
                self._cancelled.add(request_id)
                self._changed.notify()

    @property
    def tells_experts(self) -> bool:
        """Whether a request's last event, a cancelled one's too, says what its experts cost."""
        return self.upkeep is not None and self.upkeep.tells_requests

    def stats(self) -> EngineStats:
        """Return what the engine is doing and has done."""
        with self._changed:
            live = len(self._live)
        memory = self._pipeline.memory()
        experts = self.upkeep.latest if self.upkeep is not None else None
        return self._counters.snapshot(self._scheduler, self._pool, live, memory, experts)

    @property
    def alive(self) -> bool:
        """Whether requests are taken: the thread runs and is not about to stop."""
        return self._thread.is_alive() and not self._closing

    def close(self) -> None:
        """End all requests as cancelled and stop the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._pipeline.close()

    def _run(self) -> None:
        try:
            flying: Flight | None = None
            while self._take_orders():
                started = time.perf_counter()
                with torch.inference_mode():
                    flying = self._step(self._scheduler.next_turns(), flying)
                self._counters.step_s += time.perf_counter() - started
                flying = self._look_after(flying)
            for sequence in list(self._live.values()):
                self._finish(sequence, "cancelled")
            if self.upkeep is not None:
                with torch.inference_mode():
                    self.upkeep.close()
        except BaseException as error:
            # Steps and readers have nets of their own: what comes here is a broken engine.
            log.critical("engine: stopped by an error", exc_info=True)
            self._break(_named(error))
            if self.upkeep is not None:
                with torch.inference_mode():
                    self.upkeep.close_after_error()

    def _break(self, error: str) -> None:
        """Refuse all requests to come and end those that are here, without the scheduler."""
        with self._changed:
            self._closing = True
            self._failure = f"The engine stopped after an error: {error}."
            ended = list(self._live.values())
            self._live.clear()
        for sequence in ended:
            self._counters.finished["error"] += 1
            self._tell(sequence, _end_of(sequence, "error", error))

    def _take_orders(self) -> bool:
        """Wait for something to do and take in what came; False when it is time to stop."""
        with self._changed:
            while not (self._live or self._closing):
                if not self._changed.wait(self._idle_s()):
                    return True  # nobody came, and there is something else to do
            while self._inbox:
                self._scheduler.add(self._inbox.popleft())
            ended = [self._live[name] for name in self._cancelled if name in self._live]
            self._cancelled.clear()
            if self._closing:
                return False
        for sequence in ended:
            self._finish(sequence, "cancelled")
        return True

    def _idle_s(self) -> float | None:
        """Return how long to wait for requests; None: as long as it takes."""
        return None if self.upkeep is None else self.upkeep.idle_s(self._counters.tokens)

    def _look_after(self, flying: Flight | None) -> Flight | None:
        """Do what is due between steps; where that must not run beside one, none is left."""
        if self.upkeep is None:
            return flying
        # Whoever gave way for want of pages is in the middle of an answer, too.
        resting = not self._scheduler.running and not any(
            sequence.started_at for sequence in self._scheduler.waiting
        )
        tokens = self._counters.tokens
        with torch.inference_mode():
            self.upkeep.go_on(resting)
            if not self.upkeep.due(tokens, resting):
                return flying
            self._step([], flying)
            self.upkeep.run(tokens, resting)
        return None

    def _step(self, turns: list[Turn], flying: Flight | None) -> Flight | None:
        """Launch a step, then read the one before; return what is still to be read."""
        launched = self._launch(turns) if turns else None
        if flying is not None:
            self._land(flying)
        if launched is None or launched.may_wait:
            return launched
        self._land(launched)
        return None

    def _launch(self, turns: list[Turn]) -> Flight | None:
        """Start a step and take its rows as cached; None if that failed."""
        now = time.perf_counter()
        self._counters.steps += 1
        for turn in turns:
            turn.sequence.started_at = turn.sequence.started_at or now
        try:
            self._mark(turns)
            outputs = list_outputs(turns)
            batch = make_batch(turns, self._settings.page_size)
            flight = Flight(turns, outputs, self._pipeline.step(batch, list_draws(outputs)))
        except Exception as error:
            self._fail(turns, error)
            return None
        for turn in turns:
            if len(turn.sequence.tokens) == len(turn.sequence.request.prompt):
                self._counters.prompt_tokens += turn.rows
            turn.sequence.cached += turn.rows
        if flight.may_wait:
            flight.leave()
        return flight

    def _land(self, flight: Flight) -> None:
        """Use each output row of a step as is due."""
        try:
            for output, token, logits in read_outputs(
                flight.outputs, flight.result, self._settings.parallel
            ):
                if self._is_live(output.sequence):  # or it ended since, or failed at another row
                    self._use(output, token, logits)
        except Exception as error:
            self._fail(flight.turns, error)

    def _fail(self, turns: list[Turn], error: Exception) -> None:
        """End the requests of a bad step, but neither the others' answers nor the process."""
        log.error("step: failed with %d sequences", len(turns), exc_info=error)
        for turn in turns:
            if self._is_live(turn.sequence):
                self._finish(turn.sequence, "error", _named(error))
        if lost := self._pipeline.lost():  # no later step would work either
            raise DeviceError(f"{self._pipeline.device} is lost: {lost}") from error

    def _use(self, output: Output, token: int | None, logits: Row | None) -> None:
        """Do with one row what is due; a failure here is one request's alone."""
        try:
            if output.weighs:
                assert logits is not None
                output.weigh(logits)
            if output.draws:
                self._take(output, *output.choose(token, logits))
        except Exception as error:
            log.exception("sample: failed for request %s", output.sequence.request.id)
            self._finish(output.sequence, "error", _named(error))

    def _take(self, output: Output, token: int, logprobs: TokenLogprobs | None) -> None:
        """Put a token at its place in an answer and tell it."""
        sequence, request = output.sequence, output.sequence.request
        sequence.learn(output.place, token)
        sequence.first_token_at = sequence.first_token_at or time.perf_counter()
        self._counters.generated_tokens += 1
        stops = token in request.stop_ids and not request.params.ignore_eos
        reason: FinishReason | None = "stop" if stops else None
        if reason is None and output.place + 1 >= sequence.limit:
            reason = "length"
        first = output.place == len(request.prompt)
        self._emit(
            sequence,
            TokenEvent(
                request_id=request.id,
                token=token,
                logprobs=logprobs,
                prompt_logprobs=tuple(sequence.prompt_logprobs) if first else (),
                finish_reason=reason,
                prompt_tokens=len(request.prompt),
                generated_tokens=sequence.generated,
                timings=sequence.timings(),
            ),
        )

    def _is_live(self, sequence: Sequence) -> bool:
        """Whether a request has not ended; its id may be another's by now."""
        return self._live.get(sequence.request.id) is sequence

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """Tell the end of a request that no token ends."""
        self._emit(sequence, _end_of(sequence, reason, error))

    def _emit(self, sequence: Sequence, event: TokenEvent) -> None:
        if event.finish_reason is not None:
            self._scheduler.remove(sequence)
            self._counters.finished[event.finish_reason] += 1
            event = self._with_experts(sequence, event)
            with self._changed:
                self._live.pop(sequence.request.id, None)
                # An order that came too late must not hit the next request of that id.
                self._cancelled.discard(sequence.request.id)
        self._tell(sequence, event)

    def _mark(self, turns: list[Turn]) -> None:
        """Note what cold experts did before the first step of a request."""
        new = [turn.sequence for turn in turns if turn.sequence.experts_before is None]
        if self.upkeep is None or not new:
            return
        before = self.upkeep.begin_request()  # waits for a GPU: once for all of them
        for sequence in new:
            sequence.experts_before = before

    def _with_experts(self, sequence: Sequence, event: TokenEvent) -> TokenEvent:
        """Return a request's last event with what its cold experts cost."""
        if self.upkeep is None or event.timings is None or event.finish_reason == "error":
            return event
        experts = self.upkeep.end_request(sequence.experts_before)
        return replace(event, timings=replace(event.timings, experts=experts))

    def _tell(self, sequence: Sequence, event: TokenEvent) -> None:
        try:
            sequence.on_event(event)
        except BaseException:  # whatever a reader does, it must not end this thread
            log.exception("emit: the reader of request %s failed", sequence.request.id)
            self.cancel(sequence.request.id)


def _end_of(sequence: Sequence, reason: FinishReason, error: str) -> TokenEvent:
    return TokenEvent(
        request_id=sequence.request.id,
        finish_reason=reason,
        error=error,
        prompt_tokens=len(sequence.request.prompt),
        generated_tokens=sequence.generated,
        timings=sequence.timings(),
    )


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
