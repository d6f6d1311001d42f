"""Stage: layers and their caches on one device."""

import torch

from headroom.layers.batch import Batch
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
        return self._model.forward(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows that `forward` returned."""
        return self._model.logits(hidden)

    def forget_captures(self) -> None:
        """Do nothing: steps of a CPU are not captured."""
