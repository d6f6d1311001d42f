"""Pipeline: a loaded model as the engine sees it: its stages, one after the other."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Protocol

import torch

from headroom.errors import DeviceError, KernelError
from headroom.experts.exchange import Exchanges
from headroom.experts.joined import ModelRouting, ModelStore, join_routing, join_stores
from headroom.experts.telemetry import Meter
from headroom.layers.batch import Batch, Span
from headroom.layers.cache import CacheFiles
from headroom.layers.draft_network import Asked, Guessed
from headroom.layers.draws import Draw, TokenMask
from headroom.layers.features import ModelFeatures
from headroom.layers.guesses import Accepted
from headroom.layers.step_timing import part_of_step
from headroom.layers.workspace import copy_rows
from headroom.split.model import HandedRows
from headroom.split.stage import Stage, StepResult
from headroom.split.stage_times import NamedTimes, StepParts

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
        experts: Exchanges | None = None,
        meter: Meter | None = None,
        keepers: Sequence[Keeper] = (),
        refuses_trees: str = "",
        load_times: LoadTimes | None = None,
        depth: int = 1,
        pays_to_share: Callable[[int, int], bool] = lambda sequences, steps: True,
        restarter: Restarter | None = None,
        kept_logits: torch.Tensor | None = None,
        features: ModelFeatures | None = None,
        store: ModelStore | None = None,
    ) -> None:
        self._stages = tuple(stages)
        if not self._stages[-1].has_head:
            raise DeviceError(
                f"{self._stages[-1].device} is the last stage and has no head, so that it cannot "
                "return logits.",
                hint="Give the model's last layers to the last stage: the head lies with them.",
            )
        self.depth = depth  # most steps among which sequences are shared: stages work at once
        self._pays_to_share = cache(pays_to_share)
        # The stages from this one on run a step when the next one is launched, or when somebody
        # asks for its results. All stages of a shorter pipeline run when it is launched.
        self._late_from = _first_late(self._stages) if depth > 1 else len(self._stages)
        self._late: LateStep | None = None  # a step that these stages have not run yet
        self.vocab = vocab
        # float32 [snapshots, vocabulary]: the logits after the last token of each snapshot.
        self.kept_logits = torch.empty(0, vocab) if kept_logits is None else kept_logits
        self.features = features  # output rows of some layers; None: nobody asked for any
        if features is not None:
            features.settle = self.settle
        self.restarter = restarter  # None: what is lost stays lost
        self._store = store  # of experts in other processes; None: they are all here, or hot
        self._memory = memory
        self.experts = experts  # exchanges hot and cold experts; None if host memory holds none
        self.meter = meter  # what cold experts cost; None if no expert is cold
        # Follow what was measured between steps: shares of the CPU, policies of slots.
        self.keepers = tuple(keepers)
        self.load_times = load_times or LoadTimes()
        # Why recurrent layers run trees only as guesses, one path of which is kept; "": none does.
        self.refuses_trees = refuses_trees

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
        if self._store is not None:
            return self._store
        return join_stores([x.store for x in self._stages if x.store is not None])

    @property
    def verifies_guesses(self) -> bool:
        """Whether steps may have guesses, whose accepted rows `commit` keeps."""
        return all(stage.guesses is not None for stage in self._stages)

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Keep the accepted rows of the guessed spans of the last step; drop the others.

        Keys and values of other rows stay where later tokens are cached, and are overwritten.
        """
        for stage in self._stages:
            assert stage.guesses is not None
            stage.guesses.commit(accepted)

    @property
    def has_draft_network(self) -> bool:
        """Whether the last stage has weights that guess what follows sequences."""
        return self._stages[-1].draft_network is not None

    def guess(self, asked: Sequence[Asked]) -> list[Guessed]:
        """Return what the draft network guesses to follow sequences, for all of them at once."""
        self.settle()
        network = self._stages[-1].draft_network
        assert network is not None
        return network.guess(asked)

    @property
    def on_cpu(self) -> bool:
        """Whether this process runs all layers on CPUs: a step has ended when its call returns."""
        here = self.restarter is None  # no worker processes
        return here and all(device.startswith("cpu") for device in self.devices)

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
        return self._all_times() if self.has_stages else []

    def step_parts(self, sampling_s: float) -> StepParts | None:
        """Return the parts of all steps, with the time of drawing; None if a GPU runs layers."""
        if any(not stage.device.startswith("cpu") for stage in self._stages):
            return None
        times = self._all_times()
        on_cpu = all(device.startswith("cpu") for device, _ in times)  # of all workers, too
        return StepParts.of(times, sampling_s) if on_cpu and times else None

    def _all_times(self) -> NamedTimes:
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

    def steps_for(self, sequences: int) -> int:
        """Return the number of steps among which so many sequences that decode are shared."""
        steps = min(self.depth, sequences)
        return steps if steps > 1 and self._pays_to_share(sequences, steps) else 1

    def settle(self) -> None:
        """Run what some stages have not run yet of the last step.

        Code that reads or changes caches between steps must call this first.
        """
        late, self._late = self._late, None
        if late is not None:
            late.run()

    def save_state(self, state_slot: int, snapshot: int, position: int) -> None:
        """Copy the state of a sequence that has `position` tokens to a snapshot's slot."""
        self.settle()
        for stage in self._stages:
            stage.caches.save_state(state_slot, snapshot, position)

    def load_state(self, snapshot: int, state_slot: int, position: int) -> None:
        """Copy a snapshot that was taken after `position` tokens to the state of a sequence."""
        self.settle()
        for stage in self._stages:
            stage.caches.load_state(snapshot, state_slot, position)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of keys and values in all layers that the engine lends pages to."""
        self.settle()
        for stage in self._stages:
            stage.caches.copy_page(source, target)

    def save_page(self, page: int, slot: int) -> None:
        """Copy a page of keys and values to a slot of host memory."""
        self.settle()
        for stage in self._stages:
            stage.caches.save_page(page, slot)

    def load_page(self, slot: int, page: int) -> None:
        """Copy a slot of host memory to a page of keys and values."""
        self.settle()
        for stage in self._stages:
            stage.caches.load_page(slot, page)

    def drop_host_pages(self) -> None:
        """Forget all pages in host memory, and give this back to the system until it is used."""
        self.settle()
        for stage in self._stages:
            stage.caches.drop_host_pages()

    def drop_snapshots(self) -> None:
        """Forget all snapshots, and give their memory back to the system until it is used."""
        self.settle()
        for stage in self._stages:
            stage.caches.drop_snapshots()

    @property
    def cache_files(self) -> "PipelineFiles":
        """Tells what all caches hold as bytes."""
        return PipelineFiles([stage.cache_files for stage in self._stages], self.settle)

    def step(self, batch: Batch, draws: Sequence[Draw | None] = ()) -> StepResult:
        """Run one step; `draws` says for each output row how to draw its token, if at all.

        The result has no token for a row that the stage cannot draw; the caller draws it then.
        """
        if self.refuses_trees and any(not self._runs(span) for span in batch.spans):
            raise KernelError(
                f"This model runs no draft trees: {self.refuses_trees}.",
                hint="Draft a chain for this model, or run it without a draft.",
            )
        first, last = self._stages[0], self._stages[-1]
        if self._late_from < len(self._stages):
            return self._run_late(batch, draws)
        if first.drawn is None and last.drawn is not None:
            return HostTokens(_run_stages(self._stages, batch, draws))
        # The first stage waits for the copy, and so for the step before: only if it must.
        if (
            first.drawn is not None
            and last.drawn is not None
            and first.drawn is not last.drawn
            and int(batch.tokens.min()) < 0
        ):
            copy_rows(first.drawn, last.drawn)  # tokens of the step before
        return _run_stages(self._stages, batch, draws)

    def _runs(self, span: Span) -> bool:
        """Whether recurrent layers can run a span: a tree only if its rows are guesses."""
        return span.tree is None or (span.guessed and self.verifies_guesses)

    def _run_late(self, batch: Batch, draws: Sequence[Draw | None]) -> StepResult:
        """Launch a step on the GPUs that come first; meanwhile run the step before on a CPU."""
        before, self._late = self._late, None
        if before is not None:
            before.receive()  # the GPUs' buffers are free then
        try:
            received = None
            for stage in self._stages[: self._late_from]:
                received = stage.run(batch, received)
            assert received is not None
            self._late = LateStep(self._stages[self._late_from :], batch, draws, received)
        finally:
            if before is not None:
                before.run()
        return self._late

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


def _run_stages(
    stages: Sequence[Stage],
    batch: Batch,
    draws: Sequence[Draw | None],
    received: HandedRows | None = None,
) -> StepResult:
    """Run a step through consecutive stages, of which the last has the head."""
    for stage in stages[:-1]:
        received = stage.run(batch, received)
    return stages[-1].step(batch, draws, received)


def _first_late(stages: Sequence[Stage]) -> int:
    """Return the first CPU's number after a GPU, if a CPU is last; else the number of stages.

    GPUs that come first can work on a step while the CPU works on the one before. A GPU that comes
    last needs no such order: it works while the host goes on.
    """
    on_cpu = [stage.device.startswith("cpu") for stage in stages]
    if not on_cpu[-1] or all(on_cpu) or on_cpu[0]:
        return len(stages)
    return on_cpu.index(True)


class LateStep:
    """The results of a step whose last stages run on a CPU, later than the GPUs before them.

    The CPU runs it when the next step has been launched on the GPUs, or once somebody asks for
    results. They are valid until the step after the next begins.
    """

    lasts = True
    names_tokens = False

    def __init__(
        self,
        stages: Sequence[Stage],
        batch: Batch,
        draws: Sequence[Draw | None],
        received: HandedRows,  # valid until the stage before begins its next step
    ) -> None:
        self._stages, self._batch, self._draws = stages, batch, draws
        self._received: HandedRows | None = received
        self._result: StepResult | None = None
        self._error: Exception | None = None  # why the step has failed
        self.token_rows: Mapping[int, int] = {}

    def receive(self) -> None:
        """Copy the rows of the stage before; wait until it has computed them."""
        received, self._received = self._received, None
        if received is None:
            return
        try:
            self._stages[0].receive(received)
        except Exception as error:
            self._error = error

    def run(self) -> None:
        """Run the step, unless that is done; an error is raised when results are asked for."""
        if self._result is not None or self._error is not None:
            return
        self.receive()
        try:
            if self._error is None:
                self._result = _run_stages(self._stages, self._batch, self._draws)
        except Exception as error:
            self._error = error

    @property
    def _done(self) -> StepResult:
        self.run()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    @property
    def hidden(self) -> torch.Tensor:
        """The residual stream of all output rows."""
        return self._done.hidden

    def draw_limited(self, masks: Mapping[int, TokenMask | None]) -> None:
        """Do nothing: the engine draws all tokens."""

    def tokens(self) -> list[int | None]:
        """Wait for the step; return None for each output row: the engine draws all tokens."""
        return self._done.tokens()

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` of some output rows, float32."""
        return self._done.logits(rows)

    def normed(self, rows: Sequence[int]) -> torch.Tensor:
        """Return hidden states of some output rows after the final norm, float32."""
        return self._done.normed(rows)


class PipelineFiles:
    """What the caches of all stages hold, as bytes in host memory."""

    def __init__(self, parts: Sequence[CacheFiles], settle: Callable[[], None]) -> None:
        self._parts, self._settle = parts, settle
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

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of one snapshot of all parts."""
        return sum(self._snapshot_sizes)

    def settle(self) -> None:
        """Let the caches hold what all launched steps write; only the engine's thread may ask."""
        self._settle()

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

    names_tokens = False

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self.token_rows, self.lasts = result.token_rows, result.lasts
        self.draw_limited, self.tokens = result.draw_limited, result.tokens
        self.logits, self.normed = result.logits, result.normed

    @property
    def hidden(self) -> torch.Tensor:
        """The residual stream of all output rows."""
        return self._result.hidden


@part_of_step("sampling")  # the host draws tokens from these logits
def _to_host(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().cpu()
