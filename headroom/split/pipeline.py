"""Pipeline: a loaded model as the engine sees it; today it has one stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headroom.errors import KernelError
from headroom.experts.exchange import StoreExchanges
from headroom.experts.stats import RoutingStats
from headroom.experts.store import ExpertStore
from headroom.experts.telemetry import ColdMeter
from headroom.layers.batch import Batch
from headroom.layers.draws import Draw
from headroom.layers.step_timing import part_of_step
from headroom.split.stage import Stage, StepResult


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory that layers hold on a device."""

    device: str
    planned_bytes: int  # of the lines that the engine allocates; 0 without a plan
    used_bytes: int  # by this process, now


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """How long the parts of a load took."""

    weights_bytes: int = 0
    weights_s: float = 0.0  # reading, copying and packing weights, and allocating the caches
    capture_s: float = 0.0  # compiling kernels and capturing steps; 0 on a CPU

    @property
    def bytes_per_s(self) -> float:
        """Bytes of weights per second."""
        return self.weights_bytes / self.weights_s if self.weights_s else 0.0


class Pipeline:
    """Runs the steps of the engine."""

    def __init__(
        self,
        stage: Stage,
        vocab: int,
        allocated: Mapping[str, int],
        planned_bytes: int = 0,
        experts: StoreExchanges | None = None,
        meter: ColdMeter | None = None,
        refuses_trees: str = "",
        load_times: LoadTimes | None = None,
    ) -> None:
        self._stage = stage
        self.vocab = vocab
        self.allocated = allocated  # bytes by the plan's line
        self._planned_bytes = planned_bytes
        self.experts = experts  # exchanges hot and cold experts; None if host memory holds none
        self.meter = meter  # what cold experts cost; None if no expert is cold
        self.load_times = load_times or LoadTimes()
        self.refuses_trees = refuses_trees  # why steps cannot verify draft trees; "" if they can

    @property
    def device(self) -> str:
        """The name of the device that runs the layers."""
        return self._stage.device

    @property
    def routing(self) -> RoutingStats | None:
        """How often each expert was picked; None for a model without experts."""
        return self._stage.routing

    @property
    def store(self) -> ExpertStore | None:
        """Where each expert is; None if no expert is cold."""
        return self._stage.store

    def memory(self) -> DeviceMemory:
        """Return the planned bytes and the bytes held now; may be called from any thread."""
        used = self._stage.held_bytes()
        held = sum(self.allocated.values()) if used is None else used
        return DeviceMemory(self.device, self._planned_bytes, held)

    def lost(self) -> str:
        """Return why the device can run no more steps; "" while it can."""
        return self._stage.lost()

    def close(self) -> None:
        """End all threads that the stage has started; no step follows."""
        self._stage.close()

    def step(self, batch: Batch, draws: Sequence[Draw | None] = ()) -> StepResult:
        """Run one step; `draws` says for each output row how to draw its token, if at all.

        The result has no token for a row that the stage cannot draw; the caller draws it then.
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
        """Drop the captured steps; each is captured again when it is next used."""
        self._stage.forget_captures()


@part_of_step("sampling")  # the host draws tokens from these logits
def _to_host(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().cpu()
