"""Batch: what one step computes."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from headroom.kernels.ops import Span

__all__ = ["Batch", "Span"]  # a Span is the kernels' own view of a batch

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of tokens, each at its position in its sequence; complete before the step begins."""

    tokens: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    slots: torch.Tensor  # int64 [rows]: where each row's key and value are cached
    spans: tuple[Span, ...]  # one per sequence, in row order, covering all rows
    output_rows: torch.Tensor  # int64: rows whose logits are wanted
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what several layers of this step need, made by the first that asks."""
        if key not in self._shared:
            self._shared[key] = make()
        value: T = self._shared[key]
        return value
