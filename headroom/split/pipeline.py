"""Pipeline: a loaded model as the engine sees it: its stages, one after the other."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch

from headroom.errors import KernelError
from headroom.experts.exchange import StoreExchanges
from headroom.experts.joined import ModelRouting, ModelStore, join_routing, join_stores
from headroom.experts.telemetry import ColdMeter
from headroom.layers.batch import Batch
from headroom.layers.cache import CacheFiles
from headroom.layers.draws import Draw
from headroom.layers.features import ModelFeatures
from headroom.layers.step_timing import part_of_step
from headroom.layers.workspace import copy_rows
from headroom.split.stage import Stage, StepResult
from headroom.split.stage_times import NamedTimes

NO_MEMORY: "Mapping[str, StageMemory]" = MappingProxyType({})


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

    def plus(self, other: "LoadTimes") -> "LoadTimes":
        """Return the times of two loads, one after the other."""
        return LoadTimes(
            self.weights_bytes + other.weights_bytes,
            self.weights_s + other.weights_s,
            self.capture_s + other.capture_s,
        )

    @property
    def bytes_per_s(self) -> float:
        """Bytes of weights per second."""
        return self.weights_bytes / self.weights_s if self.weights_s else 0.0


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory of one stage's device: what was planned, and what the engine has allocated."""

    planned: Mapping[str, int]  # bytes by the plan's line
    allocated: "Counter[str]"


class Keeper(Protocol):
    """Follows what was measured, and changes tables on a device between two steps."""

    def follow(self) -> None:
        """Take what was measured; waits for nothing."""


class Restarter(Protocol):
    """Starts lost parts of a pipeline again; all caches are empty then."""

    on_loss: Callable[[], None]  # is called by any thread when something is lost

    def trouble(self) -> str:
        """Return what is lost, so that no step can run; "" while all is well. From any thread."""

    def restart(self, stop: Callable[[], bool]) -> None:
        """Start what is lost again, or raise an error; `stop` says whether to give up."""


class Pipeline:
    """Runs the steps of the engine."""

    def __init__(
        self,
        stages: Sequence[Stage],
        vocab: int,
        memory: Mapping[str, StageMemory] = NO_MEMORY,  # by device; "cpu" also behind GPUs
        experts: StoreExchanges | None = None,
        meter: ColdMeter | None = None,
        keepers: Sequence[Keeper] = (),
        refuses_trees: str = "",
        load_times: LoadTimes | None = None,
        depth: int = 1,
        restarter: Restarter | None = None,
        kept_logits: torch.Tensor | None = None,
        features: ModelFeatures | None = None,
    ) -> None:
        self._stages = tuple(stages)
        self.depth = depth  # steps among which sequences are shared, because stages work at once
        self.vocab = vocab
        # float32 [snapshots, vocabulary]: the logits after the last token of each snapshot.
        self.kept_logits = torch.empty(0, vocab) if kept_logits is None else kept_logits
        self.features = features  # output rows of some layers; None: nobody asked for any
        self.restarter = restarter  # None: what is lost stays lost
        self._memory = memory
        self.experts = experts  # exchanges hot and cold experts; None if host memory holds none
        self.meter = meter  # what cold experts cost; None if no expert is cold
        # Follow what was measured between steps: shares of the CPU, policies of slots.
        self.keepers = tuple(keepers)
        self.load_times = load_times or LoadTimes()
        self.refuses_trees = refuses_trees  # why steps cannot verify draft trees; "" if they can

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the stages' devices, in the order of the stages."""
        return tuple(stage.device for stage in self._stages)

    @property
    def routing(self) -> ModelRouting | None:
        """How often each expert was picked; None for a model without experts."""
        return join_routing([x.routing for x in self._stages if x.routing is not None])

    @property
    def store(self) -> ModelStore | None:
        """Where each expert is; None if no expert is cold."""
        return join_stores([x.store for x in self._stages if x.store is not None])

    @property
    def on_cpu(self) -> bool:
        """Whether all layers run on CPUs, so that a step has ended when its call returns."""
        return all(device.startswith("cpu") for device in self.devices)

    @property
    def allocated(self) -> Mapping[str, int]:
        """The bytes that the engine has allocated on all devices together, by the plan's line."""
        total: Counter[str] = Counter()
        for memory in self._memory.values():
            total.update(memory.allocated)
        return total

    def memory(self) -> list[DeviceMemory]:
        """Return the memory of each device; may be called from any thread."""
        held = {stage.device: stage.held_bytes for stage in self._stages}
        return [
            DeviceMemory(
                device=device,
                planned_bytes=sum(memory.planned.values()),
                used_bytes=sum(memory.allocated.get(line, 0) for line in memory.planned),
                process_bytes=held[device]() if device in held else None,
            )
            for device, memory in self._memory.items()
        ]

    @property
    def has_stages(self) -> bool:
        """Whether the layers are shared among several stages."""
        return self.depth > 1 or len(self._stages) > 1

    def stage_times(self) -> NamedTimes:
        """Return what the steps of each stage took, if there are several; later steps add to it."""
        if not self.has_stages:
            return []
        return [
            (device, replace(times)) for stage in self._stages for device, times in stage.times()
        ]

    def lost(self) -> str:
        """Return which device can run no more steps, and why; "" while all can."""
        for stage in self._stages:
            if reason := stage.lost():
                return f"{stage.device} is lost: {reason}"
        return ""

    def repair(self) -> None:
        """Put in order what a step may have left half changed when it failed."""
        for stage in self._stages:
            stage.repair()

    def close(self) -> None:
        """End all threads that the stages have started; no step follows."""
        for stage in self._stages:
            stage.close()

    @property
    def needs_snapshots(self) -> bool:
        """Whether some layers have recurrent states or windows, which no page holds."""
        return any(stage.caches.needs_snapshots for stage in self._stages)

    def save_state(self, state_slot: int, snapshot: int, position: int) -> None:
        """Copy the state of a sequence that has `position` tokens to a snapshot's slot."""
        for stage in self._stages:
            stage.caches.save_state(state_slot, snapshot, position)

    def load_state(self, snapshot: int, state_slot: int, position: int) -> None:
        """Copy a snapshot that was taken after `position` tokens to the state of a sequence."""
        for stage in self._stages:
            stage.caches.load_state(snapshot, state_slot, position)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of keys and values in all layers that the engine lends pages to."""
        for stage in self._stages:
            stage.caches.copy_page(source, target)

    @property
    def cache_files(self) -> "PipelineFiles | None":
        """Tells what all caches hold as bytes; None: some are in other processes."""
        parts = [stage.cache_files for stage in self._stages]
        known = [part for part in parts if part is not None]
        return PipelineFiles(known) if len(known) == len(parts) else None

    def step(self, batch: Batch, draws: Sequence[Draw | None] = ()) -> StepResult:
        """Run one step; `draws` says for each output row how to draw its token, if at all.

        The result has no token for a row that the stage cannot draw; the caller draws it then.
        """
        if self.refuses_trees and any(span.tree is not None for span in batch.spans):
            raise KernelError(
                f"This model runs no draft trees: {self.refuses_trees}.",
                hint="Draft a chain for this model, or run it without a draft.",
            )
        first, last = self._stages[0], self._stages[-1]
        if first.drawn is None and last.drawn is not None:
            return HostTokens(self._run_stages(batch, draws))
        if first.drawn is not None and last.drawn is not None and first.drawn is not last.drawn:
            copy_rows(first.drawn, last.drawn)  # tokens of the step before
        return self._run_stages(batch, draws)

    def _run_stages(self, batch: Batch, draws: Sequence[Draw | None]) -> StepResult:
        received = None
        for stage in self._stages[:-1]:
            received = stage.run(batch, received)
        return self._stages[-1].step(batch, draws, received)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of the rows whose logits are wanted."""
        return self.step(batch).hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` as float32 in host memory."""
        return _to_host(self._stages[-1].logits(hidden))

    def forget_captures(self) -> None:
        """Drop the captured steps; each is captured again when it is next used."""
        for stage in self._stages:
            stage.forget_captures()


class PipelineFiles:
    """What the caches of all stages hold, as bytes in host memory."""

    def __init__(self, parts: Sequence[CacheFiles]) -> None:
        self._parts = parts
        self._page_sizes = [part.page_bytes for part in parts]
        self._snapshot_sizes = [part.snapshot_bytes for part in parts]

    @property
    def layout(self) -> str:
        """The sizes of all parts: equal for caches that can exchange their bytes."""
        return f"{self._page_sizes} {self._snapshot_sizes}"

    @property
    def page_bytes(self) -> int:
        """The bytes of one page of all parts."""
        return sum(self._page_sizes)

    def read_page(self, page: int) -> torch.Tensor:
        """Return a page as bytes; any thread may ask."""
        return torch.cat([part.read_page(page) for part in self._parts])

    def write_page(self, page: int, data: torch.Tensor) -> None:
        """Fill a page with what `read_page` has returned."""
        pieces = torch.split(data, self._page_sizes)
        for part, piece in zip(self._parts, pieces, strict=True):
            part.write_page(page, piece)

    def read_snapshot(self, snapshot: int) -> torch.Tensor:
        """Return a snapshot as bytes; any thread may ask."""
        return torch.cat([part.read_snapshot(snapshot) for part in self._parts])

    def write_snapshot(self, snapshot: int, data: torch.Tensor) -> None:
        """Fill a snapshot with what `read_snapshot` has returned."""
        pieces = torch.split(data, self._snapshot_sizes)
        for part, piece in zip(self._parts, pieces, strict=True):
            part.write_snapshot(snapshot, piece)


class HostTokens:
    """The results of a step whose tokens the host must read before the next step.

    The last stage draws them, and the first one, on a CPU, looks them up.
    """

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self.token_rows: Mapping[int, int] = {}  # no later batch may name a token by its row
        self.lasts = result.lasts
        self.draw_limited, self.tokens = result.draw_limited, result.tokens
        self.logits, self.normed = result.logits, result.normed

    @property
    def hidden(self) -> torch.Tensor:
        """The residual stream of all output rows."""
        return self._result.hidden


@part_of_step("sampling")  # the host draws tokens from these logits
def _to_host(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().cpu()
