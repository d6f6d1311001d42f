"""StepInputs: the inputs of a step on a GPU, at fixed addresses, copied from pinned host memory."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from headroom.errors import KernelError
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.ops import StepTables
from headroom.layers.batch import Batch, GpuBatch, Span
from headroom.layers.draws import copy_event

INT64_ROWS, INT32_ROWS = 4, 3  # tables with one int64, or one int32, per row


@dataclass(frozen=True, slots=True)
class StepKind:
    """What distinguishes captured steps: a graph is recorded for one kind, and replayed for it."""

    rows: int
    span_rows: int  # most rows of one sequence
    context: int
    page_size: int
    tree: bool = False  # a draft tree: some rows do not attend to all rows before them


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """All inputs of a step as views of one allocation, on the host or on the device."""

    packed: torch.Tensor  # uint8
    int64: torch.Tensor  # int64 [4, rows]: tokens, KV slots, trees, token sources
    int32: torch.Tensor  # int32 [3, rows]: positions, sequence, index
    sequences: torch.Tensor  # int32 [2, sequences]: starts, state slots
    pages: torch.Tensor  # int32 [sequences, most pages]

    @classmethod
    def allocate(
        cls, rows: int, sequences: int, pages: int, device: str, *, pin: bool = False
    ) -> "_Tables":
        # Pages come last, because they change seldom and are then left out of the copy.
        shapes = ((INT64_ROWS, rows), (INT32_ROWS, rows), (2, sequences), (sequences, pages))
        kinds = (torch.int64, torch.int32, torch.int32, torch.int32)
        sizes = [a * b * kind.itemsize for (a, b), kind in zip(shapes, kinds, strict=True)]
        packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=device, pin_memory=pin)
        parts = [
            part.view(kind).view(shape)
            for part, kind, shape in zip(torch.split(packed, sizes), kinds, shapes, strict=True)
        ]
        return cls(packed, *parts)


class StepInputs:
    """The inputs of all steps of up to `rows` rows and `sequences` sequences.

    A batch names a token that the previous step drew for row r as -1 - r. That token is in `drawn`
    on the device before the host knows it. Each row's token is therefore taken from `drawn`
    followed by the batch's own tokens, at the row's *token source*.
    """

    def __init__(
        self, rows: int, sequences: int, pages: int, device: str, drawn: torch.Tensor
    ) -> None:
        cuda = torch.device(device).type == "cuda"
        self._host = _Tables.allocate(rows, sequences, pages, "cpu", pin=cuda)
        self._device = _Tables.allocate(rows, sequences, pages, device)
        self._drawn = drawn
        self._own_sources = len(drawn) + np.arange(rows)  # of tokens that the host knows
        self._int64 = tuple(self._host.int64.numpy())
        self._int32 = tuple(self._host.int32.numpy())
        self._sequences = tuple(self._host.sequences.numpy())
        self._pages = self._host.pages.numpy()
        self._held_pages: list[torch.Tensor | None] = [None] * sequences  # copied into `_pages`
        self._copied = copy_event(device)
        self.clear()

    def clear(self) -> None:
        """Make all rows padding, for runs that must not change any cache."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, kv_slots, _, source = self._int64
        tokens[:] = kv_slots[:] = 0  # tokens of the last step may be negative
        source[:] = self._own_sources
        self._int32[1][:] = -1
        self._send(pages=True)

    def fill(self, batch: Batch) -> None:
        """Start to copy a batch to the GPU; the rows after the batch's become padding."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy must have read this memory
        count = len(batch.tokens)
        tokens, kv_slots, trees, source = self._int64
        positions, sequence, index = self._int32
        tokens[:count] = given = batch.tokens.numpy()
        source[:] = self._own_sources
        if given.min() < 0:
            source[:count] = np.where(given < 0, -1 - given, self._own_sources[:count])
        kv_slots[:count] = batch.kv_slots.numpy()
        positions[:count] = batch.positions.numpy()
        tokens[count:] = kv_slots[count:] = 0
        sequence[count:] = -1
        starts, states = self._sequences
        starts[len(batch.spans) :] = 0
        changed = False
        for number, span in enumerate(batch.spans):
            first, rows, start = span.first_row, span.rows, span.start
            starts[number], states[number] = start, span.state_slot
            if rows == 1:
                sequence[first], index[first], trees[first] = number, start, 1
            else:
                own = slice(first, first + rows)
                sequence[own] = number
                index[own] = np.arange(start, start + rows)
                if rows <= DECODE_ROWS:
                    trees[own] = _tree_bits(span)
            if self._held_pages[number] is not span.pages:
                self._held_pages[number] = span.pages
                self._pages[number, : len(span.pages)] = span.pages.numpy()
                changed = True
        self._send(pages=changed)

    def batch(
        self, spans: tuple[Span, ...], rings: frozenset[int], kind: StepKind, sequences: int
    ) -> GpuBatch:
        """Return the filled step as a batch on the GPU; its tensors are views of the inputs."""
        known, kv_slots, trees, source = self._device.int64[:, : kind.rows]
        tokens = torch.cat((self._drawn, known)).index_select(0, source)
        positions, sequence, index = self._device.int32[:, : kind.rows]
        starts, states = self._device.sequences[:, :sequences]
        lent = StepTables(
            rows=kind.rows,
            positions=positions,
            sequence=sequence,
            index=index,
            starts=starts,
            pages=self._device.pages[:sequences],
            kv_slots=kv_slots,
            state_slots=states,
            trees=trees if kind.tree else None,
        )
        tables = {0: lent} | {ring: _ring_tables(lent, ring, kind.page_size) for ring in rings}
        return GpuBatch(
            tokens=tokens,
            positions=positions,
            kv_slots=kv_slots,
            spans=spans,
            output_rows=torch.empty(0, dtype=torch.int64),
            tables=tables,
            span_rows=kind.span_rows,
            context=kind.context,
        )

    def spans(self, batch: Batch) -> tuple[Span, ...]:
        """Return the spans of the filled batch with their pages on the GPU, int64."""
        counts = [len(span.pages) for span in batch.spans]
        pages = self._device.pages[: len(counts)].long()
        return tuple(
            replace(
                span,
                pages=pages[number, :count],
                tree=None if span.tree is None else span.tree.to(pages.device),
            )
            for number, (span, count) in enumerate(zip(batch.spans, counts, strict=True))
        )

    def _send(self, *, pages: bool) -> None:
        """Start to copy the inputs to the device; the page tables only if `pages`."""
        size = len(self._host.packed) - (0 if pages else self._host.pages.nbytes)
        self._device.packed[:size].copy_(self._host.packed[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _tree_bits(span: Span) -> npt.NDArray[np.int64]:
    """Return a bit mask per row: which rows of its span it attends to.

    Without a draft tree these are the row itself and all rows before it.
    """
    bits = np.int64(1) << np.arange(span.rows, dtype=np.int64)
    if span.tree is None:
        return 2 * bits - 1
    seen: npt.NDArray[np.int64] = np.where(span.tree.numpy(), bits, 0).sum(1)
    return seen


def _ring_tables(lent: StepTables, ring: int, page_size: int) -> StepTables:
    """Return the tables of a step for layers with a window, whose pages are rings of `ring`."""
    numbers = torch.arange(lent.pages.shape[1], device=lent.pages.device, dtype=torch.int32)
    pages = numbers[None] % ring + lent.state_slots[:, None] * ring
    own = pages[lent.sequence.clamp(min=0).long(), (lent.index // page_size).long()]
    return replace(lent, pages=pages, kv_slots=own.long() * page_size + lent.index % page_size)


def kind_of(batch: Batch, rows: int, context: int, page_size: int) -> StepKind:
    """Return the kind of a batch's step when it is padded to `rows` rows."""
    decodes = all(span.rows == 1 for span in batch.spans)
    tree = any(span.tree is not None for span in batch.spans)
    if tree and rows > DECODE_ROWS:
        raise KernelError(
            f"A step with a draft tree has {rows} rows.",
            hint=f"Such a step may have at most {DECODE_ROWS} rows: each is one bit of a mask.",
        )
    longest = max(span.rows for span in batch.spans) if rows > DECODE_ROWS else rows
    return StepKind(rows, 1 if decodes else longest, context, page_size, tree)
