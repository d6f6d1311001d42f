"""Pipeline: the whole model over all its stages, as the engine sees it."""

from collections.abc import Mapping

import torch

from headroom.layers.batch import Batch
from headroom.layers.parts import part_of_step
from headroom.moe.stats import RoutingStats
from headroom.split.device_stage import DeviceStage
from headroom.split.stages import Stage


class Pipeline:
    """Runs a step through the stages in order."""

    def __init__(
        self, stage: Stage | DeviceStage, vocab: int, allocated: Mapping[str, int]
    ) -> None:
        self._stage = stage
        self.vocab = vocab
        self.allocated = allocated  # bytes by the plan's line

    @property
    def routing(self) -> RoutingStats | None:
        """How often each expert was chosen; None where the model has none."""
        return self._stage.routing

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of the rows whose logits are wanted."""
        return self._stage.forward(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` as float32 in host memory."""
        return _to_host(self._stage.logits(hidden))

    def forget_captures(self) -> None:
        """Capture steps anew when they are next used."""
        self._stage.forget_captures()


@part_of_step("sampling")  # tokens are drawn there
def _to_host(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().cpu()
