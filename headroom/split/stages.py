"""Stage: layers and their caches on one device."""

from collections.abc import Sequence

import torch

from headroom.experts.stats import RoutingStats
from headroom.experts.store import ExpertStore
from headroom.layers.batch import Batch
from headroom.layers.draws import Draw
from headroom.split.model import Model
from headroom.split.results import HostResult


class Stage:
    """The layers of one device; today all of them, with embedding and head."""

    def __init__(self, device: str, model: Model) -> None:
        self.device = device
        self._model = model

    @property
    def routing(self) -> RoutingStats | None:
        """How often this stage's experts were chosen; None where it has none."""
        return self._model.routing

    @property
    def store(self) -> ExpertStore | None:
        """Where this stage's experts are; None where none is cold."""
        return self._model.store

    def step(self, batch: Batch, draws: Sequence[Draw | None] = ()) -> HostResult:
        """Run one step; its tokens are drawn by whoever asked for them."""
        return HostResult(self._model.forward(batch), self._model.logits)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows of the residual stream."""
        return self._model.logits(hidden)

    def forget_captures(self) -> None:
        """Do nothing: steps of a CPU are not captured."""

    def close(self) -> None:
        """Do nothing: no thread runs beside the engine's."""

    def held_bytes(self) -> int | None:
        """Return None: what a process holds of host memory is not its layers' alone."""
        return None

    def lost(self) -> str:
        """Return that a CPU is never lost."""
        return ""
