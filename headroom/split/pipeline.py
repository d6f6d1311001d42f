"""Pipeline: the whole model over all its stages, as the engine sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headroom.errors import KernelError
from headroom.experts.exchange import StoreSwaps
from headroom.experts.stats import RoutingStats
from headroom.experts.store import ExpertStore
from headroom.experts.telemetry import ColdMeter
from headroom.layers.batch import Batch
from headroom.layers.draws import Draw
from headroom.layers.step_timing import part_of_step
from headroom.split.device_stage import DeviceStage
from headroom.split.results import StepResult
from headroom.split.stages import Stage


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What layers hold of a device."""

    device: str
    planned_bytes: int  # that the engine allocates; 0 where there is no plan
    used_bytes: int  # by this process, now


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Where the time of a load went."""

    weights_bytes: int = 0
    weights_s: float = 0.0  # reading, copying and packing them; memory for the cache is taken, too
    capture_s: float = 0.0  # compiling kernels and capturing steps; 0 on a CPU, which has neither

    @property
    def bytes_per_s(self) -> float:
        """Bytes of weights in a second."""
        return self.weights_bytes / self.weights_s if self.weights_s else 0.0


class Pipeline:
    """Runs a step through the stages in order."""

    def __init__(
        self,
        stage: Stage | DeviceStage,
        vocab: int,
        allocated: Mapping[str, int],
        planned_bytes: int = 0,
        experts: StoreSwaps | None = None,
        meter: ColdMeter | None = None,
        refuses_trees: str = "",
    ) -> None:
        self._stage = stage
        self.vocab = vocab
        self.allocated = allocated  # bytes by the plan's line
        self._planned_bytes = planned_bytes
        self.experts = experts  # None where all of them are hot, or cold ones are not held
        self.meter = meter  # of the cold ones
        self.load_times = LoadTimes()  # of whoever loaded it
        self.refuses_trees = refuses_trees  # why its steps check no draft tree; "" where they do

    @property
    def device(self) -> str:
        """Where the layers run."""
        return self._stage.device

    @property
    def routing(self) -> RoutingStats | None:
        """How often each expert was chosen; None where the model has none."""
        return self._stage.routing

    @property
    def store(self) -> ExpertStore | None:
        """Where experts are; None where none is cold."""
        return self._stage.store

    def memory(self) -> DeviceMemory:
        """Return what was planned and what is held now, from any thread."""
        used = self._stage.held_bytes()
        held = sum(self.allocated.values()) if used is None else used
        return DeviceMemory(self.device, self._planned_bytes, held)

    def lost(self) -> str:
        """Return why the device runs nothing any more; "" while it does."""
        return self._stage.lost()

    def close(self) -> None:
        """End what runs beside the engine's thread; no step follows."""
        self._stage.close()

    def step(self, batch: Batch, draws: Sequence[Draw | None] = ()) -> StepResult:
        """Run one step; `draws` says for each output row how its token is drawn, if one is.

        A stage that cannot draw, or not this way, leaves it to the caller.
        """
        if self.refuses_trees and any(span.tree is not None for span in batch.spans):
            raise KernelError(
                f"This model runs no draft trees: {self.refuses_trees}.",
                hint="Draft a chain for this model, or run it without a draft.",
            )
        return self._stage.step(batch, draws)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of the rows whose logits are wanted."""
        return self.step(batch).hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` as float32 in host memory."""
        return _to_host(self._stage.logits(hidden))

    def forget_captures(self) -> None:
        """Capture steps anew when they are next used."""
        self._stage.forget_captures()


@part_of_step("sampling")  # tokens are drawn there
def _to_host(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().cpu()
