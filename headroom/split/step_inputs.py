"""StepInputs: what a step on a GPU reads, at fixed places, filled from pinned memory."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from headroom.errors import KernelError
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.ops import StepTables
from headroom.layers.batch import Batch, GpuBatch, Span
from headroom.layers.draws import copy_event

WIDE_ROWS, NARROW_ROWS = 4, 3  # tables of one number a row: int64 ones, int32 ones


@dataclass(frozen=True, slots=True)
class StepKind:
    """What a step is captured for."""

    rows: int
    span_rows: int  # most rows of one sequence
    context: int
    page_size: int
    tree: bool = False  # some rows do not see all that is before them


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """All inputs of a step in one piece of memory, here or on the device."""

    packed: torch.Tensor  # uint8
    wide: torch.Tensor  # int64 [4, rows]: tokens, slots, trees, where tokens come from
    narrow: torch.Tensor  # int32 [3, rows]: positions, sequence, index
    sequences: torch.Tensor  # int32 [2, sequences]: starts, state slots
    pages: torch.Tensor  # int32 [sequences, most pages]

    @classmethod
    def allocate(
        cls, rows: int, sequences: int, pages: int, device: str, *, pin: bool = False
    ) -> "_Tables":
        # Pages come last: they change seldom and are not always copied.
        shapes = ((WIDE_ROWS, rows), (NARROW_ROWS, rows), (2, sequences), (sequences, pages))
        kinds = (torch.int64, torch.int32, torch.int32, torch.int32)
        sizes = [a * b * kind.itemsize for (a, b), kind in zip(shapes, kinds, strict=True)]
        packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=device, pin_memory=pin)
        parts = [
            part.view(kind).view(shape)
            for part, kind, shape in zip(torch.split(packed, sizes), kinds, shapes, strict=True)
        ]
        return cls(packed, *parts)


class StepInputs:
    """The inputs of all steps of up to so many rows and sequences.

    A token of -1 - row stands for the one that the step before drew for that row: it is in
    `drawn` on the device before the host knows it.
    """

    def __init__(
        self, rows: int, sequences: int, pages: int, device: str, drawn: torch.Tensor
    ) -> None:
        cuda = torch.device(device).type == "cuda"
        self._here = _Tables.allocate(rows, sequences, pages, "cpu", pin=cuda)
        self._there = _Tables.allocate(rows, sequences, pages, device)
        self._drawn = drawn
        self._own = len(drawn) + np.arange(rows)  # where tokens that the host knows come from
        self._wide = tuple(self._here.wide.numpy())
        self._narrow = tuple(self._here.narrow.numpy())
        self._sequences = tuple(self._here.sequences.numpy())
        self._pages = self._here.pages.numpy()
        self._held: list[torch.Tensor | None] = [None] * sequences  # whose pages are in place
        self._copied = copy_event(device)
        self.clear()

    def clear(self) -> None:
        """Make all rows padding, for runs that must leave no trace."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, slots, _, source = self._wide
        tokens[:] = slots[:] = (
            0  # those of the last step may stand for what is drawn, and be negative
        )
        source[:] = self._own
        self._narrow[1][:] = -1
        self._send(pages=True)

    def fill(self, batch: Batch) -> None:
        """Bring a batch to the GPU; rows beyond it are padding. Nothing waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy must have left this memory
        count = len(batch.tokens)
        tokens, slots, trees, source = self._wide
        positions, sequence, index = self._narrow
        tokens[:count] = given = batch.tokens.numpy()
        source[:] = self._own
        if given.min() < 0:
            source[:count] = np.where(given < 0, -1 - given, self._own[:count])
        slots[:count] = batch.slots.numpy()
        positions[:count] = batch.positions.numpy()
        tokens[count:] = slots[count:] = 0
        sequence[count:] = -1
        starts, states = self._sequences
        starts[len(batch.spans) :] = 0
        changed = False
        for number, span in enumerate(batch.spans):
            first, rows, start = span.first_row, span.rows, span.start
            starts[number], states[number] = start, span.slot
            if rows == 1:
                sequence[first], index[first], trees[first] = number, start, 1
            else:
                own = slice(first, first + rows)
                sequence[own] = number
                index[own] = np.arange(start, start + rows)
                if rows <= DECODE_ROWS:
                    trees[own] = _tree_bits(span)
            if self._held[number] is not span.pages:
                self._held[number] = span.pages
                self._pages[number, : len(span.pages)] = span.pages.numpy()
                changed = True
        self._send(pages=changed)

    def batch(
        self, spans: tuple[Span, ...], rings: frozenset[int], kind: StepKind, sequences: int
    ) -> GpuBatch:
        """Return the step on the GPU; its tensors are views of the inputs."""
        known, slots, trees, source = self._there.wide[:, : kind.rows]
        tokens = torch.cat((self._drawn, known)).index_select(0, source)
        positions, sequence, index = self._there.narrow[:, : kind.rows]
        starts, states = self._there.sequences[:, :sequences]
        lent = StepTables(
            rows=kind.rows,
            positions=positions,
            sequence=sequence,
            index=index,
            starts=starts,
            pages=self._there.pages[:sequences],
            slots=slots,
            state_slots=states,
            trees=trees if kind.tree else None,
        )
        tables = {0: lent} | {ring: _ring_tables(lent, ring, kind.page_size) for ring in rings}
        return GpuBatch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            spans=spans,
            output_rows=torch.empty(0, dtype=torch.int64),
            tables=tables,
            span_rows=kind.span_rows,
            context=kind.context,
        )

    def spans(self, batch: Batch) -> tuple[Span, ...]:
        """Return the spans of a batch that was filled in, their pages on the GPU, int64."""
        counts = [len(span.pages) for span in batch.spans]
        pages = self._there.pages[: len(counts)].long()
        return tuple(
            replace(
                span,
                pages=pages[number, :count],
                tree=None if span.tree is None else span.tree.to(pages.device),
            )
            for number, (span, count) in enumerate(zip(batch.spans, counts, strict=True))
        )

    def _send(self, *, pages: bool) -> None:
        """Copy all inputs, or all but the pages, which come last."""
        size = len(self._here.packed) - (0 if pages else self._here.pages.nbytes)
        self._there.packed[:size].copy_(self._here.packed[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _tree_bits(span: Span) -> npt.NDArray[np.int64]:
    """Return which rows of its span each row sees, a bit for each; itself and all before it."""
    bits = np.int64(1) << np.arange(span.rows, dtype=np.int64)
    if span.tree is None:
        return 2 * bits - 1
    seen: npt.NDArray[np.int64] = np.where(span.tree.numpy(), bits, 0).sum(1)
    return seen


def _ring_tables(lent: StepTables, ring: int, page_size: int) -> StepTables:
    """Return the same step as layers with a window number their pages."""
    numbers = torch.arange(lent.pages.shape[1], device=lent.pages.device, dtype=torch.int32)
    pages = numbers[None] % ring + lent.state_slots[:, None] * ring
    own = pages[lent.sequence.clamp(min=0).long(), (lent.index // page_size).long()]
    return replace(lent, pages=pages, slots=own.long() * page_size + lent.index % page_size)


def kind_of(batch: Batch, rows: int, context: int, page_size: int) -> StepKind:
    """Return what a step of a batch in so many rows is captured for."""
    decodes = all(span.rows == 1 for span in batch.spans)
    tree = any(span.tree is not None for span in batch.spans)
    if tree and rows > DECODE_ROWS:
        raise KernelError(
            f"A step with a draft tree has {rows} rows.",
            hint=f"At most {DECODE_ROWS} rows of such a step are seen through one mask.",
        )
    longest = max(span.rows for span in batch.spans) if rows > DECODE_ROWS else rows
    return StepKind(rows, 1 if decodes else longest, context, page_size, tree)
