"""DeviceStage: layers on a GPU; small steps are captured once and replayed, long ones run."""

import contextlib
import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

from headroom.experts.stats import RoutingStats
from headroom.experts.store import ExpertStore
from headroom.kernels.cuda.compile import compile_ahead
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.layers.batch import Batch, Span
from headroom.layers.draws import DeviceSampler, Draw, copy_event
from headroom.machine.devices import torch_name
from headroom.plan.settings import PlanSettings
from headroom.split.model import Model
from headroom.split.results import pick_rows
from headroom.split.step_inputs import StepInputs, StepKind, kind_of

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, DECODE_ROWS)  # rows of captured steps
# Rows that have kernels of their own where they are not filled up to a bucket: products are made
# for 1, 2, 4 and 8 rows, and then for every eight.
OWN_SIZES = (1, 2, 4, 8, 16, 24, DECODE_ROWS)
WARM_UPS = 2  # runs before a capture: kernels are compiled and memory is taken then

DrawnRow = tuple[int, Draw]  # a place among a step's output rows, and how its token is drawn


@contextlib.contextmanager
def no_finalizers() -> Iterator[None]:
    """Keep Python's collector away: what it ends may call the driver, which spoils a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def bucket_of(count: int) -> int:
    """Return the smallest captured step that holds so many rows."""
    return next(size for size in BUCKETS if size >= count)


class Graph(Protocol):
    """Work that was recorded once and may be repeated."""

    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A captured step and what it leaves at fixed places, until the next step of any kind."""

    graph: Graph
    hidden: torch.Tensor  # [rows, hidden]
    logits: torch.Tensor  # [rows, vocabulary]


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Where the host reads the tokens of a step."""

    tokens: torch.Tensor  # int64, pinned
    done: "torch.cuda.Event | None"

    @classmethod
    def allocate(cls, rows: int, device: str) -> "_Read":
        pinned = torch.device(device).type == "cuda"
        return cls(torch.zeros(rows, dtype=torch.int64, pin_memory=pinned), copy_event(device))

    def fetch(self, to: slice, tokens: torch.Tensor) -> None:
        """Bring tokens from the device, without waiting for them."""
        self.tokens[to].copy_(tokens, non_blocking=True)
        if self.done is not None:
            self.done.record()

    def wait(self) -> list[int]:
        """Return the tokens when they are there."""
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.tolist()


class DeviceResult:
    """A step on a GPU; what is asked of it is brought to the host then."""

    def __init__(
        self,
        hidden: Callable[[], torch.Tensor],
        logits: Callable[[Sequence[int]], torch.Tensor],
        read: _Read,
        rows: tuple[int, dict[int, int]],
        check: Callable[[], None] = lambda: None,  # raises if what was read is not to be trusted
    ) -> None:
        self._hidden, self._logits, self._read = hidden, logits, read
        self._check = check
        self._outputs, self.places = rows  # output rows, and where the drawn ones' tokens are

    def tokens(self) -> list[int | None]:
        """Wait for the step and return the tokens of its output rows that were drawn."""
        found: list[int | None] = [None] * self._outputs
        if self.places:
            read = self._read.wait()
            self._check()
            for at, place in self.places.items():
                found[at] = read[place]
        return found

    @property
    def hidden(self) -> torch.Tensor:
        """The residual stream of all output rows, on the GPU."""
        return self._hidden()

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Return logits of some output rows in host memory."""
        found = self._logits(rows).float().cpu()
        self._check()
        return found


class DeviceStage:
    """The layers of one GPU, with embedding and head; draws the tokens of its steps."""

    def __init__(
        self,
        device: str,
        model: Model,
        settings: PlanSettings,
        rings: frozenset[int],
        sampler: DeviceSampler,
    ) -> None:
        self.device = device
        self._place = place = torch_name(device)
        self._model, self._settings, self._rings = model, settings, rings
        self._sampler = sampler
        pages = settings.sequence_pages
        self._few = StepInputs(DECODE_ROWS, DECODE_ROWS, pages, place, sampler.tokens)
        self._many = StepInputs(settings.rows, settings.parallel, pages, place, sampler.tokens)
        self._captured: dict[StepKind, Captured] = {}
        self._pool: Any = None  # of all graphs: they never run at the same time
        self._on_gpu = torch.device(place).type == "cuda"
        # Two, since a step may be launched before the tokens of the last one are read.
        most = max(DECODE_ROWS, settings.parallel)
        self._reads = deque(_Read.allocate(most, place) for _ in range(2))

    @property
    def routing(self) -> RoutingStats | None:
        """How often this stage's experts were chosen; None where it has none."""
        return self._model.routing

    @property
    def store(self) -> ExpertStore | None:
        """Where this stage's experts are; None where none is cold."""
        return self._model.store

    def capture(self) -> None:
        """Run what requests need once, so that no kernel is compiled while one waits.

        Captured are the steps in which every running sequence decodes one token, and the largest
        of few rows. Smaller ones in which a sequence has several rows run once, and are captured
        when one is first asked for, as are those with draft trees, whose kernels are the same: that
        takes the time of three runs without a graph. A model with parts that wait for the host
        is not captured: all its steps just run, and each size runs once here. So does a long step,
        of one sequence and of as many as there may be, whose kernels may differ.
        """
        most, together = self._settings.rows, min(self._settings.parallel, DECODE_ROWS)
        sequences = sorted({min(size, together) for size in OWN_SIZES})
        with self._here(), torch.inference_mode():
            self._compile_ahead(sequences)
            if self._model.capturable:
                sizes = [size for size in BUCKETS if size < 2 * self._settings.parallel]
                for kind in (*(self._kind(size, 1) for size in sizes), self._kind(DECODE_ROWS)):
                    self._capture_of(kind)
                for size in BUCKETS[1:-1]:
                    self._few.clear()
                    self._begin_few()
                    self._run_few(self._kind(size, size))
            else:
                for count in sequences:
                    self._warm_up([1] * count)
                for size in (size for size in OWN_SIZES[1:] if size < most):
                    self._warm_up([size])
            self._warm_up([min(DECODE_ROWS + 1, most)])
            if together > 1 and most > DECODE_ROWS:
                hidden = self._warm_up([DECODE_ROWS + 2 - together] + [1] * (together - 1))
                for count in sequences:  # some of which may be drawn for
                    self._sampler.draw(self._model.logits(hidden[:count]))
            if self._model.routing is not None:
                self._model.routing.clear()

    def _compile_ahead(self, sequences: Sequence[int]) -> None:
        """Compile the CUDA kernels of the row counts that `capture` runs, many at a time.

        Kernels that are not compiled here are compiled one after another, by the step that first
        needs them.
        """
        most = self._settings.rows
        sizes = BUCKETS if self._model.capturable else [size for size in OWN_SIZES if size < most]
        counts = {rows for rows in (*sizes, *sequences, most) if rows <= DECODE_ROWS}
        variants, device = self._model.to_compile, torch.device(self._place)
        if variants:  # empty without a GPU, and with kernels that are not compiled by NVRTC
            compile_ahead(
                code for one in variants for count in counts for code in one.codes(count, device)
            )

    def forget_captures(self) -> None:
        """Capture steps anew when they are next used."""
        self._captured.clear()

    def step(self, batch: Batch, draws: Sequence[Draw | None] = ()) -> DeviceResult:
        """Run one step and draw the tokens whose draws fit the tables of a device."""
        drawn = [(at, draw) for at, draw in enumerate(draws) if draw is not None and draw.fits]
        self._check_cold()
        with self._here():
            if self._model.capturable and len(batch.tokens) <= DECODE_ROWS:
                return self._replay(batch, drawn)
            return self._run(batch, drawn)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows of the residual stream."""
        with self._here():
            return self._model.logits(hidden)

    def held_bytes(self) -> int | None:
        """Return the bytes of the GPU that this process holds, those in graphs included."""
        return torch.cuda.memory_reserved(self._place) if self._on_gpu else None

    def close(self) -> None:
        """Wait for steps under way and end the CPU's thread that they may ask; none follows."""
        if self._model.cold is None:
            return
        try:
            if self._on_gpu:
                torch.cuda.synchronize(self._place)
        except RuntimeError as error:  # a GPU that is lost asks nobody
            log.warning("close: %s: %s", self.device, str(error).partition("\n")[0])
        self._model.cold.close()

    def lost(self) -> str:
        """Return why the GPU runs nothing any more; "" while it does.

        An error inside a kernel comes up at any later call and never goes away.
        """
        if self._model.cold is not None and (reason := self._model.cold.failure()):
            return reason
        try:
            if self._on_gpu:
                torch.cuda.synchronize(self._place)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    def _here(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.device(self._place) if self._on_gpu else contextlib.nullcontext()

    def _kind(self, rows: int, span_rows: int = DECODE_ROWS) -> StepKind:
        return StepKind(rows, span_rows, self._settings.context, self._settings.page_size)

    def _warm_up(self, counts: Sequence[int]) -> torch.Tensor:
        """Run a step of sequences with so many rows over pages that nobody has yet, and draw.

        Return the last row of each.
        """
        rows, page = sum(counts), torch.zeros(1, dtype=torch.int64)
        ends = list(accumulate(counts))
        spans = tuple(
            Span(end - count, count, 0, page, slot)
            for slot, (count, end) in enumerate(zip(counts, ends, strict=True))
        )
        batch = Batch(
            tokens=torch.zeros(rows, dtype=torch.int64),
            positions=torch.cat([torch.arange(count) for count in counts]),
            slots=torch.arange(rows),
            spans=spans,
            output_rows=torch.tensor(ends) - 1,
        )
        hidden = self._run(batch, []).hidden
        self._sampler.draw(self._model.logits(hidden))
        return hidden

    def _replay(self, batch: Batch, drawn: list[DrawnRow]) -> DeviceResult:
        """Run a step of few rows as it was captured: drawing is its end."""
        rows = bucket_of(len(batch.tokens))
        settings = self._settings
        step = self._capture_of(kind_of(batch, rows, settings.context, settings.page_size))
        where: list[int] = batch.output_rows.tolist()
        self._few.fill(batch)
        self._sampler.fill([(where[at], draw) for at, draw in drawn])
        self._begin_few()
        step.graph.replay()
        read = self._next_read()
        if drawn:
            count = where[drawn[-1][0]] + 1
            read.fetch(slice(0, count), self._sampler.tokens[:count])
        return DeviceResult(
            hidden=lambda: pick_rows(step.hidden, where),
            logits=lambda rows: pick_rows(step.logits, [where[row] for row in rows]),
            read=read,
            rows=(len(where), {at: where[at] for at, _ in drawn}),
            check=self._check_cold,
        )

    def _run(self, batch: Batch, drawn: list[DrawnRow]) -> DeviceResult:
        """Run a step of any size as it is; only its output rows get logits."""
        count, settings = len(batch.tokens), self._settings
        if count <= DECODE_ROWS:  # of a model some of whose layers cannot be captured
            self._begin_few()
        self._many.fill(batch)
        kind = kind_of(batch, count, settings.context, settings.page_size)
        spans = self._many.spans(batch)
        x = self._model.run(self._many.batch(spans, self._rings, kind, len(spans)))
        hidden = pick_rows(x, batch.output_rows.tolist())
        read = self._next_read()
        for first in range(0, len(drawn), DECODE_ROWS):
            group = drawn[first : first + DECODE_ROWS]
            self._sampler.fill([(row, draw) for row, (_, draw) in enumerate(group)])
            tokens = self._sampler.draw(
                self._model.logits(pick_rows(hidden, [at for at, _ in group]))
            )
            read.fetch(slice(first, first + len(group)), tokens)
        return DeviceResult(
            hidden=lambda: hidden,
            logits=lambda rows: self.logits(pick_rows(hidden, rows)),
            read=read,
            rows=(len(hidden), {at: row for row, (at, _) in enumerate(drawn)}),
            check=self._check_cold,
        )

    def _next_read(self) -> _Read:
        self._reads.rotate()
        return self._reads[0]

    def _capture_of(self, kind: StepKind) -> Captured:
        if kind not in self._captured:
            with torch.inference_mode():
                # Runs before a capture draw, too, and the next step may read what the last drew.
                drawn = self._sampler.tokens.clone()
                self._captured[kind] = self._capture(kind)
                self._sampler.tokens.copy_(drawn)
        return self._captured[kind]

    def _begin_few(self) -> None:
        """Let the CPU's threads be awake for the step that comes."""
        if self._model.cold is not None:
            self._model.cold.begin_step()

    def _check_cold(self) -> None:
        """Refuse what follows a step that the CPU failed."""
        if self._model.cold is not None:
            self._model.cold.check()

    def _run_few(self, kind: StepKind) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step of few rows on what the inputs hold; its tokens go to the sampler's place."""
        hidden = self._model.run(self._few.batch((), self._rings, kind, kind.rows))
        logits = self._model.logits(hidden)
        self._sampler.draw(logits)
        return hidden, logits

    def _capture(self, kind: StepKind) -> Captured:
        self._few.clear()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._begin_few()
                self._run_few(kind)
        torch.cuda.current_stream().wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with no_finalizers(), torch.cuda.graph(graph, pool=self._pool):
            hidden, logits = self._run_few(kind)
        return Captured(graph, hidden, logits)
