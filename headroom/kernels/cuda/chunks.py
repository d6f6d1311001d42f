"""Spans as tables on a device, with their rows in chunks."""

from dataclasses import dataclass
from typing import Protocol

import torch

from headroom.kernels.ops import Span

CHUNK = 64  # rows whose products run at once; the kernels are written for it


class SequenceTables(Protocol):
    """What kernels that keep a state read of a step, int32 on their device."""

    @property
    def sequence(self) -> torch.Tensor:
        """Each row's sequence within the step; -1 for padding."""

    @property
    def index(self) -> torch.Tensor:
        """Each row's place in its whole sequence."""

    @property
    def starts(self) -> torch.Tensor:
        """The rows that each sequence had before the step."""

    @property
    def state_slots(self) -> torch.Tensor:
        """The slot of each sequence's state."""


@dataclass(frozen=True, slots=True, eq=False)
class SpanTables:
    """The spans of a step, and their rows in chunks counted from each span's first row."""

    spans: tuple[Span, ...]  # for the host, which then need not wait for the device
    sequence: torch.Tensor  # [rows]
    index: torch.Tensor  # [rows]
    starts: torch.Tensor  # [sequences]
    state_slots: torch.Tensor  # [sequences]
    chunk_ends: torch.Tensor  # [sequences]: the chunk after a sequence's last
    first_rows: torch.Tensor  # [chunks]
    counts: torch.Tensor  # [chunks]: rows, CHUNK but for a span's last


def span_tables(spans: tuple[Span, ...], rows: int, device: torch.device) -> SpanTables:
    """Return the tables of a step of `rows` rows, brought to the device in one copy."""
    sequence, index = [-1] * rows, [0] * rows
    chunk_ends: list[int] = []
    first_rows: list[int] = []
    counts: list[int] = []
    for number, span in enumerate(spans):
        own = slice(span.first_row, span.first_row + span.rows)
        sequence[own] = [number] * span.rows
        index[own] = range(span.start, span.start + span.rows)
        for row in range(0, span.rows, CHUNK):
            first_rows.append(span.first_row + row)
            counts.append(min(CHUNK, span.rows - row))
        chunk_ends.append(len(first_rows))
    starts = [span.start for span in spans]
    slots = [span.slot for span in spans]
    parts = (sequence, index, starts, slots, chunk_ends, first_rows, counts)
    joined = torch.tensor([number for part in parts for number in part], dtype=torch.int32)
    if device.type != "cpu":  # from pinned memory nothing waits for the copy
        joined = joined.pin_memory().to(device, non_blocking=True)
    return SpanTables(spans, *torch.split(joined, [len(part) for part in parts]))
