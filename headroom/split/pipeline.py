"""Pipeline: a loaded model as the engine sees it; today it has one stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from headroom.errors import KernelError
from headroom.experts.exchange import StoreExchanges
from headroom.experts.policies import PolicyKeeper
from headroom.experts.shares import ShareKeeper
from headroom.experts.stats import RoutingStats
from headroom.experts.store import ExpertStore
from headroom.experts.telemetry import ColdMeter
from headroom.layers.batch import Batch
from headroom.layers.draws import Draw
from headroom.layers.step_timing import part_of_step
from headroom.split.stage import Stage, StepResult

NOT_PLANNED: Mapping[str, Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory that one engine has of a device; host memory behind a GPU is that of `cpu`."""

    device: str
    planned_bytes: int  # of the lines that the engine allocates
    used_bytes: int  # what the engine has allocated of these lines
    # What torch holds of the device for all engines of this process, with captured graphs and what
    # libraries took from it; None: not known.
    process_bytes: int | None = None


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
        planned: Mapping[str, Mapping[str, int]] = NOT_PLANNED,
        experts: StoreExchanges | None = None,
        meter: ColdMeter | None = None,
        shares: ShareKeeper | None = None,
        policies: PolicyKeeper | None = None,
        refuses_trees: str = "",
        load_times: LoadTimes | None = None,
    ) -> None:
        self._stage = stage
        self.vocab = vocab
        self.allocated = allocated  # bytes by the plan's line
        self._planned = planned  # by device: bytes by the plan's line
        self.experts = experts  # exchanges hot and cold experts; None if host memory holds none
        self.meter = meter  # what cold experts cost; None if no expert is cold
        self.shares = shares  # lets the CPU's share of cold experts follow its speed; None: fixed
        self.policies = policies  # chooses how slots change hands; None: that is fixed
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

    def memory(self) -> list[DeviceMemory]:
        """Return the memory of each device; may be called from any thread."""
        return [
            DeviceMemory(
                device=device,
                planned_bytes=sum(lines.values()),
                used_bytes=sum(self.allocated.get(line, 0) for line in lines),
                process_bytes=self._stage.held_bytes() if device == self.device else None,
            )
            for device, lines in self._planned.items()
        ]

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
