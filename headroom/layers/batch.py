"""Batch: the tokens that one step computes, and where their keys and values lie."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from headroom.kernels.ops import Span, StepTables

__all__ = ["Batch", "GpuBatch", "Span"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of tokens, each at its position in its sequence; complete before the step begins."""

    tokens: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    kv_slots: torch.Tensor  # int64 [rows]: where each row's key and value are cached
    spans: tuple[Span, ...]  # one per sequence, in row order, covering all rows
    output_rows: torch.Tensor  # int64: rows whose logits are wanted
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def guessed(self) -> bool:
        """Whether it has rows of which only some may stay."""
        return any(span.guessed for span in self.spans)

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return a value that several layers of this step use; the first one to ask makes it."""
        if key not in self._shared:
            self._shared[key] = make()
        value: T = self._shared[key]
        return value


@dataclass(frozen=True, slots=True, eq=False)
class GpuBatch(Batch):
    """A batch whose tensors are on a GPU, with the tables that CUDA kernels read."""

    # By the number of pages in a sequence's ring (see KvPages); 0: pages lent by the engine.
    tables: dict[int, StepTables] = field(kw_only=True)
    span_rows: int = field(kw_only=True)  # most rows of one sequence
    context: int = field(kw_only=True)  # most tokens that any of its sequences may have
