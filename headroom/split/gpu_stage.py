"""GpuStage: the layers of one GPU; decode steps are captured as CUDA graphs and replayed."""

import contextlib
import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from headroom.experts.stats import RoutingStats
from headroom.experts.store import ExpertStore
from headroom.kernels.cuda.compile import WantedKernel, compile_ahead, rehearsal
from headroom.kernels.cuda.matmul import refuses_type
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.layers.batch import Batch, Span
from headroom.layers.cache import CacheFiles, CacheMover
from headroom.layers.draws import DeviceSampler, Draw, TokenMask, copy_event
from headroom.machine.devices import torch_name
from headroom.plan.settings import PlanSettings
from headroom.split.model import HandedRows, Model
from headroom.split.stage import pick_rows
from headroom.split.stage_times import GpuClock, NamedTimes
from headroom.split.step_inputs import StepInputs, StepKind, kind_of

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, DECODE_ROWS)  # rows of captured steps; smaller batches are padded
# Row counts that have separate kernels in steps that are not padded to a bucket: products are
# compiled for 1, 2, 4 and 8 rows, and then for every multiple of eight.
KERNEL_ROWS = (1, 2, 4, 8, 16, 24, DECODE_ROWS)
WARM_UPS = 2  # runs before a capture, which compile kernels and allocate memory


@contextlib.contextmanager
def no_finalizers() -> Iterator[None]:
    """Disable garbage collection: a finalizer may call the driver, which would spoil a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def bucket_of(rows: int) -> int:
    """Return the rows of the smallest captured step that holds `rows`."""
    return next(size for size in BUCKETS if size >= rows)


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A captured step and its outputs, which lie at fixed addresses until the next step runs."""

    graph: "torch.cuda.CUDAGraph"
    hidden: torch.Tensor  # [rows, hidden]
    logits: torch.Tensor | None  # [rows, vocabulary]; None: a later stage has the head


@dataclass(frozen=True, slots=True, eq=False)
class _DrawnRow:
    """An output row whose token this stage draws."""

    output: int  # its number among the step's output rows
    draw: Draw


@dataclass(frozen=True, slots=True, eq=False)
class _TokenRead:
    """The copy of a step's tokens from the GPU to pinned host memory."""

    tokens: torch.Tensor  # int64, pinned
    done: "torch.cuda.Event | None"

    @classmethod
    def allocate(cls, rows: int, device: str) -> "_TokenRead":
        pinned = torch.device(device).type == "cuda"
        return cls(torch.zeros(rows, dtype=torch.int64, pin_memory=pinned), copy_event(device))

    def fetch(self, to: slice, tokens: torch.Tensor) -> None:
        """Start to copy tokens from the device."""
        self.tokens[to].copy_(tokens, non_blocking=True)
        if self.done is not None:
            self.done.record()

    def wait(self) -> list[int]:
        """Wait for the copy and return the tokens."""
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.tolist()


@dataclass(frozen=True, slots=True, eq=False)
class _LateDraws:
    """Draws of a launched step that wait until the host knows their masks."""

    outputs: list[int]  # the output rows
    draw: Callable[[Mapping[int, TokenMask | None]], None]  # takes masks by row of the sampler


class GpuResult:
    """The results of a step on a GPU; each is copied to the host when it is asked for."""

    lasts = False
    names_tokens = True

    def __init__(
        self,
        hidden: Callable[[], torch.Tensor],
        logits: Callable[[Sequence[int]], torch.Tensor],
        norm: Callable[[torch.Tensor], torch.Tensor],  # the final one, of rows of `hidden`
        read: _TokenRead,
        outputs: int,  # output rows
        token_rows: dict[int, int],  # of the drawn output rows: where in `read` their tokens are
        check: Callable[[], None] = lambda: None,  # raises if the step's results are wrong
        late: "_LateDraws | None" = None,  # draws that wait for masks, and then for `read`
    ) -> None:
        self._hidden, self._logits, self._norm, self._read = hidden, logits, norm, read
        self._outputs, self.token_rows = outputs, token_rows
        self._check, self._late = check, late

    def draw_limited(self, masks: Mapping[int, TokenMask | None]) -> None:
        """Start to draw the limited rows of the step with their masks, and to copy all tokens."""
        late, self._late = self._late, None
        if late is not None:
            late.draw({self.token_rows[row]: masks[row] for row in late.outputs})

    def tokens(self) -> list[int | None]:
        """Wait for the step; return each output row's token, None where the engine must draw it."""
        assert self._late is None  # the engine has given the masks
        found: list[int | None] = [None] * self._outputs
        if self.token_rows:
            read = self._read.wait()
            self._check()
            for output, token_row in self.token_rows.items():
                found[output] = read[token_row]
        return found

    @property
    def hidden(self) -> torch.Tensor:
        """The residual stream of all output rows, on the GPU."""
        return self._hidden()

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` of some output rows, float32 in host memory."""
        found = self._logits(rows).float().cpu()
        self._check()
        return found

    def normed(self, rows: Sequence[int]) -> torch.Tensor:
        """Return hidden states of some output rows after the final norm, float32 on the host."""
        found = self._norm(pick_rows(self._hidden(), rows)).float().cpu()
        self._check()
        return found


class GpuStage:
    """The layers of one GPU; the last stage draws the tokens of its steps."""

    def __init__(
        self,
        device: str,
        model: Model,
        settings: PlanSettings,
        rings: frozenset[int],  # pages in a sequence's ring, of all layers with a window
        sampler: DeviceSampler | None,  # None: a later stage has the head
        drawn: torch.Tensor | None = None,  # int64 [rows]: where another stage keeps its tokens
    ) -> None:
        self.device = device
        self._torch_device = there = torch_name(device)
        self._model, self._settings, self._rings = model, settings, rings
        self._sampler = sampler
        if sampler is not None:
            drawn = sampler.tokens
        elif drawn is None:  # the pipeline copies here what the last stage has drawn
            drawn = torch.zeros(DECODE_ROWS, dtype=torch.int64, device=there)
        self.drawn = tokens = drawn
        pages = settings.sequence_pages
        # Captured steps read their inputs at fixed addresses; all other steps use the second set.
        self._captured_inputs = StepInputs(DECODE_ROWS, DECODE_ROWS, pages, there, tokens)
        self._inputs = StepInputs(settings.rows, settings.parallel, pages, there, tokens)
        self._captured: dict[StepKind, Captured] = {}
        self._pool: Any = None  # memory of all graphs, which never run at the same time
        self._rehearses = False  # whether steps run without our kernels, to learn which they are
        self._on_gpu = torch.device(there).type == "cuda"
        self._clock = GpuClock()  # of a stage that is not the only one
        # Two, because a step may be launched before the tokens of the previous one are read.
        most = max(DECODE_ROWS, settings.parallel)
        self._reads = deque(_TokenRead.allocate(most, there) for _ in range(2))

    @property
    def has_head(self) -> bool:
        """Whether this stage returns logits."""
        return self._model.has_head

    @property
    def routing(self) -> RoutingStats | None:
        """How often each expert of this stage was picked; None without experts."""
        return self._model.routing

    @property
    def caches(self) -> CacheMover:
        """Moves what the stage's caches hold of a sequence."""
        return self._model.caches

    @property
    def cache_files(self) -> CacheFiles:
        """Tells what the stage's caches hold as bytes."""
        return self._model.caches

    @property
    def store(self) -> ExpertStore | None:
        """Where each expert of this stage is; None if no expert is cold."""
        return self._model.store

    @property
    def guesses(self) -> None:
        """None: a GPU's recurrent layers do not leave states as they were yet."""

    @property
    def draft_network(self) -> None:
        """None: steps without guesses need none."""

    def capture(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile every kernel that requests need, and capture the usual decode steps.

        All runs below are rehearsed first: they run without our kernels, which are only noted. Then
        the noted kernels are compiled, many at a time. `report` is told how many sources of kernels
        and runs are done, and how many there are.

        Captured here: steps in which every running sequence decodes one token, and the largest
        step of the decode path. Other steps of the decode path, where a sequence has several rows
        or a draft tree, are captured when one is first asked for (that takes the time of three
        runs); the same kernels are compiled here by running each size once.

        A model with parts that wait for the host cannot be captured: each size runs once here, and
        all its steps run without a graph. Steps of the prefill path run once here with one
        sequence and once with as many as run together, because their kernels may differ.
        """
        most, together = self._settings.rows, min(self._settings.parallel, DECODE_ROWS)
        sequences = sorted({min(size, together) for size in KERNEL_ROWS})
        runs: list[Callable[[], object]] = []
        if self._model.capturable:
            sizes = [size for size in BUCKETS if size < 2 * self._settings.parallel]
            kinds = [*(self._kind(size, 1) for size in sizes), self._kind(DECODE_ROWS)]
            runs += [partial(self._capture_first, kind) for kind in kinds]
            runs += [partial(self._run_padding, size) for size in BUCKETS[1:-1]]
        else:
            runs += [partial(self._warm_up, [1] * count) for count in sequences]
            runs += [partial(self._warm_up, [size]) for size in KERNEL_ROWS[1:] if size < most]
        runs.append(partial(self._warm_up, [min(DECODE_ROWS + 1, most)]))
        if together > 1 and most > DECODE_ROWS:
            runs.append(partial(self._warm_up_together, together, sequences))
        with self._current_device(), torch.inference_mode():
            sources = 0

            def compiled(done: int, total: int) -> None:
                nonlocal sources
                sources = total
                report(done, total + len(runs))

            compile_ahead(self._rehearse(runs), compiled)
            for done, run in enumerate(runs):
                report(sources + done, sources + len(runs))
                run()
            report(sources + len(runs), sources + len(runs))
            if self._model.routing is not None:
                self._model.routing.clear()
            if self._model.cold_experts is not None:
                self._model.cold_experts.restart()

    def _rehearse(self, runs: Sequence[Callable[[], object]]) -> set[WantedKernel]:
        """Return the kernels that some runs ask for, which are not launched.

        What cannot be rehearsed is compiled by the step that first needs it, one kernel after
        another.
        """
        if not self._on_gpu or refuses_type(self._settings.compute_type):
            return set()  # other kernels than those of `compile_kernel` take the time
        self._rehearses = True
        try:
            with rehearsal() as wanted:
                for run in runs:
                    try:
                        run()
                    except Exception as error:  # it shows again, or not, when the step really runs
                        log.debug("kernels: a step is not rehearsed: %s", error)
        finally:
            self._rehearses = False
        return wanted

    def _capture_first(self, kind: StepKind) -> None:
        """Capture a step; in a rehearsal run it once."""
        if self._rehearses:
            self._captured_inputs.clear()
            self._run_captured(kind)
        else:
            self._capture_of(kind)

    def _run_padding(self, rows: int) -> None:
        """Run a step in which one sequence has all rows, without capturing it."""
        self._captured_inputs.clear()
        self._wake_cold_worker()
        self._run_captured(self._kind(rows, rows))

    def _warm_up_together(self, together: int, sequences: Sequence[int]) -> None:
        """Run a step of the prefill path with many sequences, and draw for some of them only."""
        hidden = self._warm_up([DECODE_ROWS + 2 - together] + [1] * (together - 1))
        if self._sampler is not None:
            for count in sequences:
                self._sampler.draw(self._model.logits(hidden[:count]))

    def forget_captures(self) -> None:
        """Drop the captured steps; each is captured again when it is next used."""
        self._captured.clear()

    def receive(self, received: HandedRows) -> None:
        """Copy the rows of the stage before; the next step that is given none works on them."""
        with self._current_device():
            self._model.receive(received)
            self._clock.receive()

    def run(self, batch: Batch, received: HandedRows | None = None) -> HandedRows:
        """Run one step on the rows of the stage before; return them for the stage after."""
        self._check_cold()
        with self._current_device():
            if self._on_gpu:
                self._clock.begin()
            if self._model.capturable and len(batch.tokens) <= DECODE_ROWS:
                captured = self._fill_captured(batch, received)
                self._wake_cold_worker()
                captured.graph.replay()
                x = captured.hidden
            else:
                x = self._run_layers(batch, received)
            if self._model.tap is not None:
                self._model.tap.end_step(batch)
            handed = self._model.handed(x, len(batch.tokens))
            if self._on_gpu:
                self._clock.end(handed.nbytes)
        return handed

    def step(
        self,
        batch: Batch,
        draws: Sequence[Draw | None] = (),
        received: HandedRows | None = None,
    ) -> GpuResult:
        """Run one step of the last stage; draw the tokens whose settings fit the sampler."""
        drawn = [
            _DrawnRow(output, draw)
            for output, draw in enumerate(draws)
            if draw is not None and draw.fits
        ]
        if len(drawn) > DECODE_ROWS:  # drawn in groups, which share the tables
            drawn = [row for row in drawn if not row.draw.limited]
        self._check_cold()
        with self._current_device():
            split = self._on_gpu and received is not None
            if split:
                self._clock.begin()
            if self._model.capturable and len(batch.tokens) <= DECODE_ROWS:
                result = self._replay(batch, drawn, received)
            else:
                result = self._run(batch, drawn, received)
            if self._model.tap is not None:
                self._model.tap.end_step(batch)
            if split:
                self._clock.end()
        return result

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows of the residual stream."""
        with self._current_device():
            return self._model.logits(hidden)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return rows of the residual stream after the final norm."""
        with self._current_device():
            return self._model.normed(hidden)

    def held_bytes(self) -> int | None:
        """Return the bytes of the GPU that torch holds for all models, with captured graphs."""
        return torch.cuda.memory_reserved(self._torch_device) if self._on_gpu else None

    def close(self) -> None:
        """Wait for steps under way, then end the CPU worker that computes cold experts."""
        if self._model.decode_worker is None:
            return
        try:
            if self._on_gpu:
                torch.cuda.synchronize(self._torch_device)
        except RuntimeError as error:  # a lost GPU sends the worker no requests
            log.warning("close: %s: %s", self.device, str(error).partition("\n")[0])
        self._model.decode_worker.close()

    def times(self) -> NamedTimes:
        """Return what the steps took that the GPU has ended."""
        return [(self.device, self._clock.times())]

    def repair(self) -> None:
        """Copy experts into their slots again, which a step that failed may have given away."""
        if self.store is not None:
            with self._current_device():
                self.store.repair()

    def lost(self) -> str:
        """Return why the GPU can run no more steps; "" while it can.

        After an error inside a kernel, every later call to the GPU raises the same error.
        """
        if self._model.decode_worker is not None and (
            reason := self._model.decode_worker.failure()
        ):
            return reason
        try:
            if self._on_gpu:
                torch.cuda.synchronize(self._torch_device)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    def _current_device(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.device(self._torch_device) if self._on_gpu else contextlib.nullcontext()

    def _kind(self, rows: int, span_rows: int = DECODE_ROWS) -> StepKind:
        return StepKind(rows, span_rows, self._settings.context, self._settings.page_size)

    def _warm_up(self, counts: Sequence[int]) -> torch.Tensor:
        """Run a step of sequences with these row counts, before any page is in use, and draw.

        Return the residual stream of each sequence's last row, or of all rows without a head.
        """
        rows, page = sum(counts), torch.zeros(1, dtype=torch.int64)
        ends = list(accumulate(counts))
        spans = tuple(
            Span(end - count, count, 0, page, number)
            for number, (count, end) in enumerate(zip(counts, ends, strict=True))
        )
        batch = Batch(
            tokens=torch.zeros(rows, dtype=torch.int64),
            positions=torch.cat([torch.arange(count) for count in counts]),
            kv_slots=torch.arange(rows),
            spans=spans,
            output_rows=torch.tensor(ends) - 1,
        )
        if self._sampler is None:
            return self._run_layers(batch)
        hidden = self._run(batch, []).hidden
        self._sampler.draw(self._model.logits(hidden))
        return hidden

    def _replay(
        self, batch: Batch, drawn: list[_DrawnRow], received: HandedRows | None
    ) -> GpuResult:
        """Replay the captured step that fits a batch; drawing is part of the graph."""
        step = self._fill_captured(batch, received)
        output_rows: list[int] = batch.output_rows.tolist()
        logits = step.logits
        assert logits is not None
        assert self._sampler is not None
        self._sampler.fill([(output_rows[row.output], row.draw) for row in drawn])
        self._wake_cold_worker()
        step.graph.replay()
        read = self._next_read()
        count = output_rows[drawn[-1].output] + 1 if drawn else 0
        late = self._fetch_tokens(read, count, drawn, logits)
        return GpuResult(
            hidden=lambda: pick_rows(step.hidden, output_rows),
            logits=lambda rows: pick_rows(logits, [output_rows[row] for row in rows]),
            norm=self.normed,
            read=read,
            outputs=len(output_rows),
            token_rows={row.output: output_rows[row.output] for row in drawn},
            check=self._check_cold,
            late=late,
        )

    def _fill_captured(self, batch: Batch, received: HandedRows | None) -> Captured:
        """Return the captured step that fits a batch, after filling its inputs."""
        rows, settings = bucket_of(len(batch.tokens)), self._settings
        step = self._capture_of(kind_of(batch, rows, settings.context, settings.page_size))
        self._captured_inputs.fill(batch)
        if received is not None:  # not before a capture, whose runs overwrite these rows
            self.receive(received)
        return step

    def _fetch_tokens(
        self, read: _TokenRead, count: int, drawn: list[_DrawnRow], logits: torch.Tensor
    ) -> _LateDraws | None:
        """Start to copy the first `count` tokens of a step to the host.

        If some rows are limited, return their draws: the copy follows them.
        """
        limited = [row.output for row in drawn if row.draw.limited]
        tokens, sampler = slice(0, count), self._sampler
        assert sampler is not None
        if not limited:
            if count:
                read.fetch(tokens, sampler.tokens[tokens])
            return None

        def draw(masks: Mapping[int, TokenMask | None]) -> None:
            with self._current_device():
                sampler.draw_limited(logits, masks)
                read.fetch(tokens, sampler.tokens[tokens])

        return _LateDraws(limited, draw)

    def _run(
        self, batch: Batch, drawn: list[_DrawnRow], received: HandedRows | None = None
    ) -> GpuResult:
        """Run a step of any size without a graph; only its output rows get logits."""
        assert self._sampler is not None
        x = self._run_layers(batch, received)
        hidden = pick_rows(x, batch.output_rows.tolist())
        read, late = self._next_read(), None
        for first in range(0, len(drawn), DECODE_ROWS):
            group = drawn[first : first + DECODE_ROWS]
            self._sampler.fill([(index, row.draw) for index, row in enumerate(group)])
            logits = self._model.logits(pick_rows(hidden, [row.output for row in group]))
            tokens = self._sampler.draw(logits)
            if len(drawn) <= DECODE_ROWS:  # the only group, which may have limited rows
                late = self._fetch_tokens(read, len(group), group, logits)
            else:
                read.fetch(slice(first, first + len(group)), tokens)
            del logits
        return GpuResult(
            hidden=lambda: hidden,
            logits=lambda rows: self.logits(pick_rows(hidden, rows)),
            norm=self.normed,
            read=read,
            outputs=len(hidden),
            token_rows={row.output: index for index, row in enumerate(drawn)},
            check=self._check_cold,
            late=late,
        )

    def _run_layers(self, batch: Batch, received: HandedRows | None = None) -> torch.Tensor:
        """Run a step of any size without a graph; return the residual stream of all its rows."""
        count, settings = len(batch.tokens), self._settings
        if received is not None:
            self.receive(received)
        if count <= DECODE_ROWS:  # the model has layers that cannot be captured
            self._wake_cold_worker()
        elif self._model.cold_experts is not None:
            self._model.cold_experts.begin_prompt(batch)
        self._inputs.fill(batch)
        kind = kind_of(batch, count, settings.context, settings.page_size)
        spans = self._inputs.spans(batch)
        return self._model.run(self._inputs.batch(spans, self._rings, kind, len(spans)))

    def _next_read(self) -> _TokenRead:
        self._reads.rotate()
        return self._reads[0]

    def _capture_of(self, kind: StepKind) -> Captured:
        if kind not in self._captured:
            with torch.inference_mode():
                # The runs before a capture draw tokens, but the next step may read the last ones.
                drawn = self.drawn.clone()
                self._captured[kind] = self._capture(kind)
                self.drawn.copy_(drawn)
        return self._captured[kind]

    def _wake_cold_worker(self) -> None:
        """Wake the CPU threads that compute cold experts, before a step of the decode path."""
        if self._model.decode_worker is not None and not self._rehearses:
            self._model.decode_worker.begin_step()

    def _check_cold(self) -> None:
        """Raise if the CPU failed to compute cold experts in an earlier step."""
        if self._model.decode_worker is not None:
            self._model.decode_worker.check()

    def _run_captured(self, kind: StepKind) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a step on the captured inputs and draw; return its residual stream and logits."""
        hidden = self._model.run(self._captured_inputs.batch((), self._rings, kind, kind.rows))
        if self._sampler is None:
            return hidden, None
        logits = self._model.logits(hidden)
        self._sampler.draw(logits)
        return hidden, logits

    def _capture(self, kind: StepKind) -> Captured:
        self._captured_inputs.clear()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._wake_cold_worker()
                self._run_captured(kind)
        torch.cuda.current_stream().wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with no_finalizers(), torch.cuda.graph(graph, pool=self._pool):
            hidden, logits = self._run_captured(kind)
        return Captured(graph, hidden, logits)
