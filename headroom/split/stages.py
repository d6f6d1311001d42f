"""Stage: layers and their caches on one device."""

from dataclasses import replace

import torch

from headroom.layers.batch import Batch, Span
from headroom.models.model import Model
from headroom.moe.stats import RoutingStats


class Stage:
    """The layers of one device; today all of them, with embedding and head."""

    def __init__(self, device: str, model: Model) -> None:
        self.device = device
        self._model = model

    @property
    def routing(self) -> RoutingStats | None:
        """How often this stage's experts were chosen; None where it has none."""
        return self._model.routing

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of the rows whose logits are wanted."""
        return self._model.forward(batch if self.device == "cpu" else _moved(batch, self.device))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows that `forward` returned."""
        return self._model.logits(hidden)


def _moved(batch: Batch, device: str) -> Batch:
    """Return the batch with its tensors on a device."""
    tokens, positions = batch.tokens.to(device), batch.positions.to(device)
    slots, output_rows = batch.slots.to(device), batch.output_rows.to(device)
    spans = tuple(_moved_span(span, device) for span in batch.spans)
    return Batch(tokens, positions, slots, spans, output_rows)


def _moved_span(span: Span, device: str) -> Span:
    tree = None if span.tree is None else span.tree.to(device)
    return replace(span, pages=span.pages.to(device), tree=tree)
