"""DeviceStage: layers on a GPU; small steps are captured once and replayed, long ones run."""

from dataclasses import dataclass

import torch

from headroom.layers.batch import Batch, Span
from headroom.layers.device_block import DeviceBatch, StepTables
from headroom.layers.device_rows import FEW_ROWS
from headroom.memory.budget import PlanSettings
from headroom.models.model import Model
from headroom.moe.stats import RoutingStats

BUCKETS = (1, 2, 4, 8, 16, FEW_ROWS)  # rows of captured steps
WARM_UPS = 2  # runs before a capture: kernels are compiled and memory is taken then


def bucket_of(count: int) -> int:
    """Return the smallest captured step that holds so many rows."""
    return next(size for size in BUCKETS if size >= count)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What a step reads, at fixed places on the GPU; filled by one copy from pinned memory."""

    host: torch.Tensor  # int64, pinned
    device: torch.Tensor
    rows: int
    sequences: int
    pages: int  # most pages of a sequence

    @classmethod
    def allocate(cls, rows: int, sequences: int, pages: int, device: str) -> "StepInputs":
        """Return inputs for steps of so many rows and sequences."""
        size = 5 * rows + (2 + pages) * sequences
        host = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        there = torch.zeros(size, dtype=torch.int64, device=device)
        return cls(host, there, rows, sequences, pages)

    def fill(self, batch: Batch) -> None:
        """Bring a batch to the GPU; rows and sequences beyond it are padding."""
        count = len(batch.tokens)
        rows, (starts, states), pages = self._views(self.host)
        tokens, positions, sequence, index, slots = rows
        rows[:, count:] = 0
        sequence[count:] = -1
        tokens[:count], positions[:count] = batch.tokens, batch.positions
        slots[:count] = batch.slots
        starts.zero_()
        for number, span in enumerate(batch.spans):
            own = slice(span.first_row, span.first_row + span.rows)
            sequence[own] = number
            index[own] = torch.arange(span.start, span.start + span.rows)
            starts[number], states[number] = span.start, span.slot
            pages[number, : len(span.pages)] = span.pages
        self.device.copy_(self.host, non_blocking=True)

    def _views(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [5, rows], sequences [2, sequences] and pages [sequences, pages]."""
        split = [5 * self.rows, 2 * self.sequences, self.sequences * self.pages]
        rows, sequences, pages = torch.split(packed, split)
        return rows.view(5, -1), sequences.view(2, -1), pages.view(self.sequences, -1)

    def batch(
        self, spans: tuple[Span, ...], rings: frozenset[int], step: "StepKind"
    ) -> DeviceBatch:
        """Return the step on the GPU; small kernels turn the inputs into tables."""
        rows, (starts, states), pages = self._views(self.device)
        tokens, positions, sequence, index, slots = rows
        lent = StepTables(
            rows=self.rows,
            positions=positions.int(),
            sequence=sequence.int(),
            index=index.int(),
            starts=starts.int(),
            pages=pages.int(),
            slots=slots,
            state_slots=states.int(),
        )
        tables = {0: lent} | {ring: _ring_tables(lent, ring, step.page_size) for ring in rings}
        return DeviceBatch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            spans=spans,
            output_rows=torch.empty(0, dtype=torch.int64),
            tables=tables,
            span_rows=step.span_rows,
            context=step.context,
        )


@dataclass(frozen=True, slots=True)
class StepKind:
    """What a captured step is captured for."""

    rows: int
    span_rows: int  # most rows of one sequence
    context: int
    page_size: int


def _ring_tables(lent: StepTables, ring: int, page_size: int) -> StepTables:
    """Return the same step as layers with a window number their pages."""
    numbers = torch.arange(lent.pages.shape[1], device=lent.pages.device, dtype=torch.int32)
    pages = numbers[None] % ring + lent.state_slots[:, None] * ring
    own = pages[lent.sequence.clamp(min=0).long(), (lent.index // page_size).long()]
    slots = own.long() * page_size + lent.index % page_size
    return StepTables(
        rows=lent.rows,
        positions=lent.positions,
        sequence=lent.sequence,
        index=lent.index,
        starts=lent.starts,
        pages=pages,
        slots=slots,
        state_slots=lent.state_slots,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    hidden: torch.Tensor  # [rows, hidden]
    logits: torch.Tensor  # [rows, vocabulary]


class DeviceStage:
    """The layers of one GPU, with embedding and head."""

    def __init__(
        self, device: str, model: Model, settings: PlanSettings, rings: frozenset[int]
    ) -> None:
        self.device = device
        self._model = model
        self._settings = settings
        self._rings = rings
        self._captured: dict[StepKind, _Captured] = {}
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # hidden rows, their logits

    @property
    def routing(self) -> RoutingStats | None:
        """How often this stage's experts were chosen; None where it has none."""
        return self._model.routing

    def capture(self) -> None:
        """Capture the steps in which every running sequence decodes one token."""
        for size in BUCKETS:
            self._capture_of(StepKind(size, 1, self._context, self._settings.page_size))
            if size >= self._settings.parallel:
                return

    def forget_captures(self) -> None:
        """Capture steps anew when they are next used."""
        self._captured.clear()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of the rows whose logits are wanted."""
        with torch.cuda.device(self.device):
            if len(batch.tokens) <= FEW_ROWS:
                return self._replay(batch)
            self._last = None
            sizes = len(batch.tokens), len(batch.spans), self._settings.sequence_pages
            inputs = StepInputs.allocate(*sizes, self.device)
            inputs.fill(batch)
            longest = max(span.rows for span in batch.spans)
            kind = StepKind(len(batch.tokens), longest, self._context, self._settings.page_size)
            spans = tuple(_on_device(span, self.device) for span in batch.spans)
            x = self._model.run(inputs.batch(spans, self._rings, kind))
            return x.index_select(0, batch.output_rows.to(self.device))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows that `forward` returned."""
        if self._last is not None:
            rows, logits = self._last
            offset = (hidden.data_ptr() - rows.data_ptr()) // (hidden.shape[1] * 4)
            return logits[offset : offset + len(hidden)]
        with torch.cuda.device(self.device):
            return self._model.logits(hidden)

    @property
    def _context(self) -> int:
        return self._settings.context

    def _replay(self, batch: Batch) -> torch.Tensor:
        longest = max(span.rows for span in batch.spans)
        size = bucket_of(len(batch.tokens))
        kind = StepKind(size, bucket_of(longest), self._context, self._settings.page_size)
        step = self._capture_of(kind)
        step.inputs.fill(batch)
        step.graph.replay()
        wanted = batch.output_rows.to(self.device, non_blocking=True)
        hidden = step.hidden.index_select(0, wanted)
        self._last = (hidden, step.logits.index_select(0, wanted))
        return hidden

    def _capture_of(self, kind: StepKind) -> _Captured:
        if kind not in self._captured:
            with torch.cuda.device(self.device), torch.inference_mode():
                self._captured[kind] = self._capture(kind)
        return self._captured[kind]

    def _capture(self, kind: StepKind) -> _Captured:
        pages = self._settings.sequence_pages
        inputs = StepInputs.allocate(kind.rows, kind.rows, pages, self.device)
        inputs.host[2 * kind.rows : 3 * kind.rows] = -1  # all rows are padding
        inputs.device.copy_(inputs.host)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self._model.run(inputs.batch((), self._rings, kind))
            return hidden, self._model.logits(hidden)

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden, logits = run()
        return _Captured(graph, inputs, hidden, logits)


def _on_device(span: Span, device: str) -> Span:
    return Span(span.first_row, span.rows, span.start, span.pages.to(device), span.slot, span.tree)
