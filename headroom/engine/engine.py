"""Engine: one thread schedules requests, runs steps, samples tokens and emits events."""

import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from headroom.engine.batching import make_batch
from headroom.engine.drafting import Drafting
from headroom.engine.host_pressure import HostWatch
from headroom.engine.masks import MaskPool
from headroom.engine.outputs import (
    ChosenToken,
    LaunchedStep,
    Output,
    ReadOutput,
    list_draws,
    list_outputs,
    read_outputs,
)
from headroom.engine.pages import PagePool
from headroom.engine.pooling import NORM_ROWS, PooledRows
from headroom.engine.prefix_disk import PrefixFiles
from headroom.engine.prefixes import PrefixEntries, Prefixes
from headroom.engine.request import (
    FinishReason,
    GenerationRequest,
    TokenEvent,
    TokenLogprobs,
    check_request,
)
from headroom.engine.sampler import LogitRow
from headroom.engine.scheduler import Limits, Scheduler, Turn
from headroom.engine.sequence import Sequence
from headroom.engine.stats import Counters, EngineStats
from headroom.errors import CapacityError, DeviceError, HeadroomError, ModelError, RequestError
from headroom.layers.draws import TokenMask
from headroom.layers.guesses import Accepted
from headroom.machine.devices import HostRoom
from headroom.plan.settings import PlanSettings
from headroom.spec.drafter import Drafter
from headroom.split.pipeline import Pipeline
from headroom.split.stage_times import StepParts, times_between
from headroom.split.upkeep import ExpertUpkeep, ExpertView

__all__ = ["Engine", "ExpertView"]

log = logging.getLogger(__name__)

T = TypeVar("T")

LEAST_CHUNK = 32  # prompt tokens of a step that is not made smaller when memory is short
CALM_STEPS = 64  # after so many steps without a lack of memory, prompts take twice as many rows
FILE_WAIT_S = 0.02  # how long an engine without anything to compute waits for a file at a time


class Engine:
    """Takes requests from any thread and turns them into tokens in its own thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: PlanSettings,
        queue: int,
        upkeep: ExpertUpkeep | None = None,
        prefix_files: PrefixFiles | None = None,  # None: prefixes are kept in memory alone
        drafter: Drafter | None = None,  # None: tokens are generated one at a time
        *,
        draft_always: bool = False,  # check guesses even where that is slower
    ) -> None:
        self._pipeline = pipeline
        # Upkeep of experts between steps. Only the engine's thread may call it while requests run.
        self.upkeep = upkeep
        self._settings = settings
        self.vocab = pipeline.vocab
        self.capacity = settings.parallel + queue  # requests that may run or wait
        self._pool = PagePool(settings.pages)
        limits = Limits(settings.parallel, settings.chunk, settings.page_size, settings.exact_batch)
        caches = pipeline.cache_files
        self._prefixes = Prefixes(
            *(pipeline, self._pool, settings, prefix_files),
            *(caches.page_bytes, caches.snapshot_bytes, pipeline.kept_logits),
        )
        self._scheduler = Scheduler(limits, self._pool, self._prefixes)
        self._counters = Counters()
        assert drafter is None or pipeline.verifies_guesses
        self._drafting = Drafting(drafter, settings, always=draft_always)
        self._masks = MaskPool()
        self._unread: deque[LaunchedStep] = deque()  # steps under way, oldest first
        self._calm_steps = 0  # since memory was short
        self._losses = 0  # how often parts of the pipeline were lost, and all steps under way
        # The lock guards the six fields below, which other threads use, and nothing else.
        self._changed = threading.Condition()
        self._live: dict[str, Sequence] = {}
        self._inbox: deque[Sequence] = deque()
        self._cancelled: set[str] = set()
        self._calls: list[Callable[[], None]] = []  # what is to be done between two steps
        self._closing = False
        self._failure = ""  # what ended the thread, if it was not close()
        if pipeline.restarter is not None:
            pipeline.restarter.on_loss = self._wake
        if prefix_files is not None:
            prefix_files.folder.on_done = self._wake
        self._thread = threading.Thread(target=self._run, name="headroom-engine", daemon=True)
        self._thread.start()
        pressure = self._prefixes.host_pressure
        self._looked: Future[None] | None = None  # the last look at host memory
        self._host_watch = HostWatch(self._look_at_host) if pressure.watches else None
        # Python would end the thread in the midst of a step, which aborts the whole process.
        atexit.register(self.close)

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError for a request that this engine could never run."""
        check_request(request, self._settings.context, self.vocab)
        self._drafting.check(request)

    def submit(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        """Queue a request; `on_event` is called from the engine thread and must not block.

        An answer ends where the context ends, even if `max_tokens` would allow more.
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
                raise RequestError(
                    f"A request with the id {request.id!r} is running or waiting.", param="id"
                )
            self._live[request.id] = sequence
            self._inbox.append(sequence)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """End a request at the next step; the id of a request that has ended is ignored."""
        with self._changed:
            if request_id in self._live:
                self._cancelled.add(request_id)
                self._changed.notify()

    @property
    def reports_costs(self) -> bool:
        """Whether the last event of a request reports what experts cost or stages took.

        The last event of a cancelled request does so, too.
        """
        told = self.upkeep is not None and self.upkeep.tells_requests
        return told or self._pipeline.has_stages

    def stats(self) -> EngineStats:
        """Return what the engine is doing and has done."""
        with self._changed:
            live = len(self._live)
        memory = self._pipeline.memory()
        experts = self.upkeep.latest if self.upkeep is not None else None
        stages = self._pipeline.stage_times()
        return self._counters.snapshot(
            *(self._scheduler, self._pool, live, memory, experts, stages, self._prefixes.counts),
            parts=self._step_parts(),
        )

    def view_experts(self) -> "Future[ExpertView] | None":
        """Ask for the experts as they are after the step under way; None: the model has none."""
        if self.upkeep is None:
            return None
        with self._changed:
            if self._closing:
                raise CapacityError(self._failure or "The engine is shutting down.")
            view = self.upkeep.ask_view()
            self._changed.notify()
        return view

    def list_prefixes(self, owner: str = "") -> "Future[PrefixEntries]":
        """Ask for what is kept of an owner's prompts, as it is after the step under way."""
        return self._between_steps(lambda: self._prefixes.entries(owner))

    def forget_prefixes(self, owner: str = "") -> "Future[int]":
        """Forget an owner's prompts after the step under way; the result is in pages."""
        return self._between_steps(lambda: self._prefixes.forget(owner))

    def _look_at_host(self, room: HostRoom) -> None:
        """Give up kept prefixes after the step under way if host memory is short."""
        if self._looked is not None and not self._looked.done():
            return  # what is known now may be old when the step under way has ended
        pressure = self._prefixes.host_pressure
        if pressure.concerns(room):
            with contextlib.suppress(CapacityError):  # the engine is closing
                self._looked = self._between_steps(lambda: pressure.look(room))

    def _between_steps(self, work: Callable[[], T]) -> "Future[T]":
        """Let the engine's thread do something between two steps."""
        asked: Future[T] = Future()

        def run() -> None:
            if not asked.set_running_or_notify_cancel():
                return
            try:
                asked.set_result(work())
            except Exception as error:
                log.exception("engine: what was asked for between two steps failed")
                asked.set_exception(error)

        with self._changed:
            if self._closing:
                raise CapacityError(self._failure or "The engine is shutting down.")
            self._calls.append(run)
            self._changed.notify()
        return asked

    @property
    def alive(self) -> bool:
        """Whether requests are taken: the thread runs and is not about to stop."""
        return self._thread.is_alive() and not self._closing

    @property
    def trouble(self) -> str:
        """What is lost and is being started again; "" while steps can run."""
        restarter = self._pipeline.restarter
        return "" if restarter is None else restarter.trouble()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """End all requests as cancelled and stop the thread."""
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._host_watch is not None:
            self._host_watch.close()
        self._masks.close()
        self._prefixes.close()
        self._pipeline.close()

    def _run(self) -> None:
        try:
            while self._take_requests():
                self._recover()
                started = time.perf_counter()
                with torch.inference_mode():
                    self._step()
                self._counters.step_s += time.perf_counter() - started
                self._keep_experts()
            for sequence in list(self._live.values()):
                self._finish(sequence, "cancelled")
            if self.upkeep is not None:
                with torch.inference_mode():
                    self.upkeep.close()
        except BaseException as error:
            # Errors of one step or one reader are caught elsewhere: this one breaks the engine.
            log.critical("engine: stopped by an error", exc_info=True)
            self._end_broken(_named(error))
            if self.upkeep is not None:
                with torch.inference_mode():
                    self.upkeep.close_after_error()

    def _end_broken(self, error: str) -> None:
        """Take no more requests and end the present ones, without using the scheduler."""
        with self._changed:
            self._closing = True
            self._failure = f"The engine stopped after an error: {error}."
            ended = list(self._live.values())
            self._live.clear()
        for sequence in ended:
            self._counters.finished["error"] += 1
            self._call_reader(sequence, _end_of(sequence, "error", error))

    def _take_requests(self) -> bool:
        """Wait for requests, queue new ones, end cancelled ones; False if the engine is closing."""
        with self._changed:
            while not (self._live or self._closing or self.trouble or self._has_calls):
                if not self._changed.wait(self._idle_s()):
                    return True  # no request came, and the upkeep has something to do
            calls = list(self._calls)
            self._calls.clear()
            while self._inbox:
                self._scheduler.add(self._inbox.popleft())
            ended = [self._live[name] for name in self._cancelled if name in self._live]
            self._cancelled.clear()
            if self._closing:
                return False
        for call in calls:
            call()
        for sequence in ended:
            self._finish(sequence, "cancelled")
        return True

    @property
    def _has_calls(self) -> bool:
        return bool(self._calls) or self._prefixes.has_news

    def _idle_s(self) -> float | None:
        """Return how many seconds to wait for requests before the upkeep is due; None: forever."""
        return None if self.upkeep is None else self.upkeep.idle_s(self._counters.tokens)

    def _keep_experts(self) -> None:
        """Do the upkeep of experts that is due; some of it must not run during a step."""
        if self.upkeep is None:
            return
        # A preempted request waits in the middle of its answer, so the engine does not rest.
        resting = not self._scheduler.running and not any(
            sequence.started_at for sequence in self._scheduler.waiting
        )
        tokens = self._counters.tokens
        with torch.inference_mode():
            self.upkeep.go_on(resting)
            if self.upkeep.due(tokens, resting):
                self._read_all()
                self.upkeep.run(tokens, resting)

    def _step(self) -> None:
        """Launch a step, then read earlier ones until few enough are under way.

        Where several stages can work at once, and that pays, the sequences that decode are shared
        among as many steps; otherwise one step is launched before the last one is read.
        """
        self._prefixes.collect()
        depth = self._pipeline.depth
        parts = self._pipeline.steps_for(self._scheduler.decoding)
        turns = self._scheduler.next_turns(parts)
        for turn in turns:
            if not turn.rows:
                self._draw_first(turn.sequence)
        started, generated = time.perf_counter(), self._counters.generated_tokens
        turns = self._with_guesses([turn for turn in turns if turn.rows])
        launched = self._launch(turns, ahead=parts == 1) if turns else None
        if launched is None:
            if self._unread:
                self._read_step(self._unread.popleft())
            elif self._prefixes.uses_files:  # a request waits for one, or for its pages
                with self._changed:
                    self._changed.wait(FILE_WAIT_S)
            return
        under_way, losses = max(1, depth - 1), self._losses  # besides the launched step
        while self._unread and (len(self._unread) >= under_way or self._unread[0].keeps_tokens):
            self._read_step(self._unread.popleft())
        if self._losses != losses or not self._draw_limited(launched):
            return
        self._unread.append(launched)
        if not launched.may_stay_unread:
            self._read_all()
            tokens = self._counters.generated_tokens - generated
            self._drafting.record(turns, tokens, time.perf_counter() - started)
            self._counters.held_back_tokens = self._drafting.held_back

    def _read_all(self) -> None:
        """Read all steps that are under way."""
        while self._unread:
            self._read_step(self._unread.popleft())

    def _launch(self, turns: list[Turn], *, ahead: bool) -> LaunchedStep | None:
        """Start a step and count its rows as cached; return None if the step failed.

        `ahead`: the next step may name tokens of this one that are not read yet.
        """
        now = time.perf_counter()
        self._counters.steps += 1
        for turn in turns:
            turn.sequence.started_at = turn.sequence.started_at or now
        try:
            self._read_costs_before(turns)
            self._start(turns)
            outputs = list_outputs(turns)
            batch = make_batch(turns, self._settings.page_size)
            result = self._pipeline.step(batch, list_draws(outputs))
            step = LaunchedStep(turns, outputs, result, ahead=ahead, spans=batch.spans)
        except Exception as error:
            if not (_lacks_memory(error) and self._relieve(turns, error)):
                self._fail(turns, error)
            return None
        self._calm_steps += 1
        if self._scheduler.chunk < self._settings.chunk and self._calm_steps >= CALM_STEPS:
            self._calm_steps = 0
            self._scheduler.chunk = min(2 * self._scheduler.chunk, self._settings.chunk)
            log.info("pressure: prompts take %d rows of a step again", self._scheduler.chunk)
        if (
            self._scheduler.most_running < self._settings.parallel
            and self._calm_steps >= CALM_STEPS
        ):
            self._calm_steps = 0
            self._scheduler.most_running += 1
            log.info("pressure: %d sequences run again", self._scheduler.most_running)
        if self._drafting.rows < self._settings.verify_rows and self._calm_steps >= CALM_STEPS:
            self._calm_steps = 0
            self._drafting.rows = min(2 * self._drafting.rows, self._settings.verify_rows)
            log.info("pressure: steps check guesses in %d rows again", self._drafting.rows)
        for turn in turns:
            if len(turn.sequence.tokens) == len(turn.sequence.request.prompt):
                self._counters.prompt_tokens += turn.rows
            turn.sequence.cached += turn.rows
            self._prefixes.advance(turn.sequence)
        if not ahead:
            step.await_outputs()
        elif step.may_stay_unread:
            step.add_placeholders()
        return step

    def _draw_first(self, sequence: Sequence) -> None:
        """Draw the first token of an answer from logits that are kept with its whole prompt."""
        turn, prefix = Turn(sequence, 0), sequence.prefix
        assert prefix is not None
        try:
            sequence.started_at = sequence.started_at or time.perf_counter()
            self._read_costs_before([turn])
            self._start([turn])
            limits = sequence.request.constraint
            mask: TokenMask | None = None
            if limits is not None and limits.may_limit(0):
                (found,) = self._masks.compute([limits])
                if isinstance(found, Exception):
                    raise found
                mask = found
            last = len(sequence.tokens) - 1
            output = Output(sequence, last, scores_prompt=False, draws=True, constraint=limits)
            logits = self._prefixes.logits_after(prefix)
        except Exception as error:
            self._fail([turn], error)
        else:
            self._read_row(ReadOutput(output, None, logits, mask))

    def _start(self, turns: list[Turn]) -> None:
        """Let new sequences begin after their known prefixes, in the order of their admission."""
        for sequence in (turn.sequence for turn in turns):
            if sequence.starting:
                self._use_picks(sequence)
                self._prefixes.start(sequence)
                sequence.starting = False

    def _with_guesses(self, turns: list[Turn]) -> list[Turn]:
        """Return turns with guesses, or without any if guessing failed: no answer needs them."""
        try:
            return self._drafting.add_guesses(turns, self._scheduler)
        except Exception as error:
            if lost := self._pipeline.lost():
                raise DeviceError(lost) from error
            log.warning("draft: guessing failed, and the step has no guesses: %s", _named(error))
            return turns

    def _use_picks(self, sequence: Sequence) -> None:
        """Exchange experts by the picks of a conversation that goes on, if no other one runs."""
        picks = None if sequence.prefix is None else sequence.prefix.picks
        if self.upkeep is None or picks is None:
            return
        sequence.earlier_picks = picks
        if self._scheduler.running == [sequence]:
            self._read_all()
            self.upkeep.prepare(picks)

    def _draw_limited(self, step: LaunchedStep) -> bool:
        """Compute the masks of a launched step and let the device draw the tokens they limit.

        The masks follow from the tokens of the step before, which are read by now. A GPU computes
        the launched step meanwhile. Return False if the step failed.
        """
        rows = {
            row: output.constraint
            for row, output in enumerate(step.outputs)
            if output.constraint is not None
        }
        if not rows:
            return True
        # A request that has ended since needs no mask: nobody reads the token of its row.
        live = [row for row in rows if self._is_live(step.outputs[row].sequence)]
        try:
            step.masks.update(dict.fromkeys(rows))
            for row, found in zip(
                live, self._masks.compute([rows[row] for row in live]), strict=True
            ):
                if isinstance(found, Exception):
                    self._finish(step.outputs[row].sequence, "error", _named(found))
                else:
                    step.masks[row] = found
            step.result.draw_limited(step.masks)
        except Exception as error:
            self._fail(step.turns, error)
            return False
        return True

    def _read_step(self, step: LaunchedStep) -> None:
        """Read the output rows of a step: record prompt logprobs, take and emit drawn tokens."""
        step.end_await()
        try:
            self._pool_rows(step)
            if step.has_guesses:
                self._read_guesses(step)
                return
            for read in read_outputs(step, self._settings.logits_rows):
                self._read_row(read)
        except Exception as error:
            self._fail(step.turns, error)

    def _pool_rows(self, step: LaunchedStep) -> None:
        """Take the hidden states of prompts that become vectors; emit those that are complete."""
        pooled = [row for row, output in enumerate(step.outputs) if output.pools]
        for first in range(0, len(pooled), NORM_ROWS):
            rows = pooled[first : first + NORM_ROWS]
            for row, state in zip(rows, step.result.normed(rows).numpy(), strict=True):
                sequence, position = step.outputs[row].sequence, step.outputs[row].position
                if sequence.pooled is None or not self._is_live(sequence):
                    continue
                sequence.pooled.add(position, state)
                if position + 1 == len(sequence.tokens):
                    self._emit_vector(sequence, sequence.pooled)

    def _emit_vector(self, sequence: Sequence, pooled: PooledRows) -> None:
        """Emit a prompt's vector; a vector that is not finite ends only this request."""
        sequence.first_token_at = time.perf_counter()
        try:
            end = replace(_end_of(sequence, "stop", ""), vector=pooled.vector())
        except ModelError as error:
            end = _end_of(sequence, "error", _named(error))
        self._emit(sequence, end)

    def _fail(self, turns: list[Turn], error: Exception) -> None:
        """End the requests of a step that failed; other requests and the process go on."""
        told = None if isinstance(error, DeviceError) else error  # its text says all
        log.error("step: failed with %d sequences: %s", len(turns), error, exc_info=told)
        for turn in turns:
            if self._is_live(turn.sequence):
                self._finish(turn.sequence, "error", _named(error))
        if lost := self._pipeline.lost():  # no later step could work
            raise DeviceError(lost) from error
        self._pipeline.repair()
        self._recover()

    def _relieve(self, turns: list[Turn], error: Exception) -> bool:
        """Let a step that lacked memory be tried again with fewer rows; False: it has the fewest.

        Its sequences begin again after what the prefix cache has of them. First prompts take half
        as many rows and steps half as many guesses, then the newest sequences wait for the others.
        """
        rows, before = sum(turn.all_rows for turn in turns), self._scheduler.chunk
        guesses = sum(len(turn.draft) for turn in turns)  # only steps without prompts have some
        smaller = before > LEAST_CHUNK and rows > LEAST_CHUNK and not self._settings.exact_batch
        if not guesses and not smaller and len(turns) == 1:
            return False
        if self._pipeline.lost() or self._pipeline.restarter is not None:
            return False
        self._read_all()
        self._pipeline.repair()
        self._calm_steps = 0
        if guesses:
            self._drafting.rows = len(turns) + guesses // 2
        elif smaller:
            self._scheduler.chunk = max(LEAST_CHUNK, before // 2)
        else:
            self._scheduler.most_running = len(turns) - 1
        self._scheduler.step_back(turns)
        log.warning(
            "pressure: a step of %d rows of %d sequences lacked memory and is tried again; prompts "
            "take %d rows of a step, not %d, at most %d sequences run, and guesses are checked in "
            "at most %d rows: %s",
            *(rows, len(turns), self._scheduler.chunk, before, self._scheduler.most_running),
            *(self._drafting.rows, error),
        )
        return True

    def _recover(self) -> None:
        """Start what the pipeline has lost again; requests that were running end with an error.

        Requests that wait go on: what a preempted one has cached is computed again in any case.
        """
        restarter = self._pipeline.restarter
        if restarter is None or not (trouble := restarter.trouble()):
            return
        self._losses += 1
        self._unread.clear()
        for sequence in list(self._scheduler.running):
            self._finish(sequence, "error", trouble)
        self._prefixes.clear()
        for sequence in self._scheduler.waiting:
            sequence.awaited = False
        restarter.restart(lambda: self._closing)
        if self.upkeep is not None and not self._closing:
            self.upkeep.begin_again()

    def _read_row(self, read: ReadOutput) -> None:
        """Take one output row's results; a failure ends only the request of that row."""
        output, token, logits, mask = read
        live = self._is_live(output.sequence)  # not if it has ended since
        try:
            if output.scores_prompt:  # also for other answers to the prompt
                assert logits is not None
                output.score_prompt(logits)
            if live and output.keeps_logits:
                assert logits is not None
                self._prefixes.keep_logits(output.sequence, logits)
            if live and output.draws:
                self._add_token(output, *self._choose(output, token, logits, mask))
        except Exception as error:
            self._end_after(error, output.sequence, ends=live)

    def _choose(
        self,
        output: Output,
        token: int | None,
        logits: LogitRow | None,
        mask: TokenMask | None,
    ) -> ChosenToken:
        """Return an output's token, and count the time of drawing it."""
        started = time.perf_counter()
        chosen = output.choose(token, logits, mask)
        self._counters.sampling_s += time.perf_counter() - started
        return chosen

    def _step_parts(self) -> StepParts | None:
        return self._pipeline.step_parts(self._counters.sampling_s)

    def _end_after(self, error: Exception, sequence: Sequence, *, ends: bool = True) -> None:
        """Log that a token could not be drawn, and end the request if it has not ended."""
        # An error of our own says all that there is to say: the weights are broken.
        trace = None if isinstance(error, HeadroomError) else error
        log.error("sample: failed for request %s: %s", sequence.request.id, error, exc_info=trace)
        if ends:
            self._finish(sequence, "error", _named(error))

    def _read_guesses(self, step: LaunchedStep) -> None:
        """Take the tokens of a step with guesses, keep its right rows, then emit the tokens.

        The rows are kept first, because the end of an answer keeps what was computed as a prefix.
        """
        reads = list(read_outputs(step, self._settings.logits_rows))
        paths, accepted, row = [], [], 0
        for turn, span in zip(step.turns, step.spans, strict=True):
            own, row = reads[row : row + turn.all_rows], row + turn.all_rows
            if not self._is_live(turn.sequence):
                continue
            path = self._follow(turn, own)
            paths.append((turn.sequence, path))
            if turn.draft:
                turn.sequence.cached += len(path.rows) - 1
                accepted.append(Accepted(span, tuple(path.rows)))
                self._drafting.judge(turn, len(path.rows) - 1)
        self._pipeline.commit(accepted)
        for sequence, path in paths:
            for event in path.events:
                self._emit(sequence, event)
            if path.error is not None:
                self._end_after(path.error, sequence)

    def _follow(self, turn: Turn, reads: SequenceOf[ReadOutput]) -> "_Path":
        """Draw a token at the last row of a turn's own, and at each guess as long as it is right.

        Each token is drawn as without guesses: from the model's logits after the tokens before it,
        which are in the sequence by then, by the settings of the request, at its own position.
        """
        sequence, path = turn.sequence, _Path([0], [])
        constraint = sequence.request.constraint
        sequence.guessed += len(turn.draft)
        self._counters.guessed_tokens += len(turn.draft)
        try:
            while True:
                row = path.rows[-1]
                output, _, logits, mask = reads[row]
                if row and constraint is not None and constraint.may_limit(0):
                    mask = constraint.mask()
                event = self._take_token(output, *self._choose(output, None, logits, mask))
                path.events.append(event)
                assert event.token is not None
                child = turn.draft.child(row, event.token)
                if child is None or event.finish_reason is not None:
                    return path
                path.rows.append(child)
                sequence.accepted += 1
                self._counters.accepted_tokens += 1
        except Exception as error:
            path.error = error
            return path

    def _add_token(self, output: Output, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token to its answer, and emit it."""
        self._emit(output.sequence, self._take_token(output, token, logprobs))

    def _take_token(self, output: Output, token: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        """Add a token to its answer, and return its event."""
        sequence, request = output.sequence, output.sequence.request
        sequence.learn(output.token_index, token)
        if request.constraint is not None:
            request.constraint.advance(token)
        if output.token_index == len(request.prompt):
            self._prefixes.confirm(sequence)
        sequence.first_token_at = sequence.first_token_at or time.perf_counter()
        self._counters.generated_tokens += 1
        stops = token in request.stop_ids and not request.params.ignore_eos
        reason: FinishReason | None = "stop" if stops else None
        if reason is None and output.token_index + 1 >= sequence.limit:
            reason = "length"
        return TokenEvent(
            request_id=request.id,
            token=token,
            logprobs=logprobs,
            prompt_logprobs=output.prompt_logprobs(),
            finish_reason=reason,
            prompt_tokens=len(request.prompt),
            cached_tokens=sequence.reused or 0,
            generated_tokens=sequence.generated,
            timings=sequence.timings(),
        )

    def _is_live(self, sequence: Sequence) -> bool:
        """Whether this request has not ended; a later request may have the same id."""
        return self._live.get(sequence.request.id) is sequence

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """Emit the end of a request that no token ends."""
        self._emit(sequence, _end_of(sequence, reason, error))

    def _emit(self, sequence: Sequence, event: TokenEvent) -> None:
        if (reason := event.finish_reason) is not None:
            event = self._with_costs(sequence, event)
            self._scheduler.remove(sequence, keep=reason != "error")
            self._counters.finished[reason] += 1
            if sequence.guessed or sequence.held_back:
                log.info(
                    "draft: %s had %d tokens guessed, %d right, %d not checked",
                    *(sequence.request.id, sequence.guessed, sequence.accepted),
                    sequence.held_back,
                )
            with self._changed:
                self._live.pop(sequence.request.id, None)
                # A cancellation that came too late must not end the next request with this id.
                self._cancelled.discard(sequence.request.id)
        self._call_reader(sequence, event)

    def _read_costs_before(self, turns: list[Turn]) -> None:
        """Record counters of experts and stages before the first step of each new request."""
        for sequence in (turn.sequence for turn in turns):
            if sequence.stages_before is None:
                sequence.stages_before = self._pipeline.stage_times()
                sequence.parts_before = self._step_parts()
        new = [turn.sequence for turn in turns if turn.sequence.experts_before is None]
        if self.upkeep is None or not new:
            return
        before = self.upkeep.begin_request()  # waits for a GPU, so once for all new requests
        for sequence in new:
            sequence.experts_before = before
            sequence.picks_before = self.upkeep.picks

    def _with_costs(self, sequence: Sequence, event: TokenEvent) -> TokenEvent:
        """Return a request's last event with what its cold experts cost and each stage took."""
        timings = event.timings
        if timings is None or event.finish_reason == "error":
            return event
        if self.upkeep is not None:
            timings = replace(timings, experts=self.upkeep.end_request(sequence.experts_before))
            if sequence.picks_before is not None:
                sequence.picks = self.upkeep.picks_since(
                    sequence.picks_before, sequence.earlier_picks
                )
        if sequence.stages_before:
            stages = times_between(sequence.stages_before, self._pipeline.stage_times())
            timings = replace(timings, stages=stages)
        if sequence.parts_before is not None and (now := self._step_parts()) is not None:
            timings = replace(timings, parts=now.since(sequence.parts_before).summary())
        return replace(event, timings=timings)

    def _call_reader(self, sequence: Sequence, event: TokenEvent) -> None:
        try:
            sequence.on_event(event)
        except BaseException:  # a reader must not be able to end this thread
            log.exception("emit: the reader of request %s failed", sequence.request.id)
            self.cancel(sequence.request.id)


@dataclass(slots=True, eq=False)
class _Path:
    """The rows of a turn with guesses whose tokens are in the answer, and the events of tokens."""

    rows: list[int]
    events: list[TokenEvent]
    error: Exception | None = None  # ends the request after these tokens


def _end_of(sequence: Sequence, reason: FinishReason, error: str) -> TokenEvent:
    return TokenEvent(
        request_id=sequence.request.id,
        finish_reason=reason,
        error=error,
        prompt_tokens=len(sequence.request.prompt),
        cached_tokens=sequence.reused or 0,
        generated_tokens=sequence.generated,
        timings=sequence.timings(),
    )


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError)


def _named(error: BaseException) -> str:
    """Return what a client is told: a sentence of our own, or the name and text of any error."""
    return str(error) if isinstance(error, HeadroomError) else f"{type(error).__name__}: {error}"
