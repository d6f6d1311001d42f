"""Stage: the layers of one device, as the pipeline runs them; CpuStage runs them on a CPU."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from headroom.experts.joined import ModelRouting
from headroom.experts.stats import RoutingStats
from headroom.experts.store import ExpertStore
from headroom.layers.batch import Batch
from headroom.layers.cache import CacheFiles, CacheMover
from headroom.layers.draft_network import DraftNetwork
from headroom.layers.draws import Draw, TokenMask
from headroom.layers.guesses import Guesses
from headroom.split.model import HandedRows, Model
from headroom.split.stage_times import NamedTimes, StageTimes


class StepResult(Protocol):
    """The results of one step by output row, numbered as in the batch's `output_rows`.

    They are valid until the next step begins, unless they last. Tokens that a device has drawn are
    valid while no more steps are under way than the pipeline allows.
    """

    @property
    def lasts(self) -> bool:
        """Whether results stay valid while as many steps are under way as the pipeline allows."""

    @property
    def token_rows(self) -> Mapping[int, int]:
        """The output rows whose tokens the device draws, and where it keeps each token."""

    @property
    def names_tokens(self) -> bool:
        """Whether batches may name the tokens that the device draws, before the host knows them.

        Until the step after the next begins, a batch may name such a token as -1 - its row in
        `token_rows`.
        """

    @property
    def hidden(self) -> torch.Tensor:
        """The residual stream of all output rows."""

    def draw_limited(self, masks: Mapping[int, TokenMask | None]) -> None:
        """Draw the tokens of rows whose draws are limited, with the mask of each such output row.

        It must be called before `tokens` and before the next step; masks of other rows are ignored.
        """

    def tokens(self) -> list[int | None]:
        """Wait for the step; return each output row's token, None where the engine must draw it."""

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` of some output rows, float32 in host memory.

        At most as many rows as sequences run together.
        """

    def normed(self, rows: Sequence[int]) -> torch.Tensor:
        """Return hidden states `[rows, hidden]` of some output rows after the final norm.

        They are float32 in host memory.
        """


class Stage(Protocol):
    """Some consecutive layers of a model with their caches, on one device.

    The first stage looks tokens up. Every stage but the last hands the rows of a step to the stage
    after it; the last one has the head.
    """

    @property
    def device(self) -> str:
        """The device's name in the plan."""

    @property
    def drawn(self) -> torch.Tensor | None:
        """Where the tokens that this stage has drawn lie on its device; None: it draws none.

        For the first stage: where it finds tokens that the last stage has drawn.
        """

    @property
    def has_head(self) -> bool:
        """Whether this stage returns logits."""

    @property
    def routing(self) -> ModelRouting | None:
        """How often each expert of this stage was picked; None without experts."""

    @property
    def caches(self) -> CacheMover:
        """Moves what the stage's caches hold of a sequence."""

    @property
    def cache_files(self) -> CacheFiles:
        """Tells what the stage's caches hold as bytes."""

    @property
    def store(self) -> ExpertStore | None:
        """Where each expert of this stage is; None if no expert is cold."""

    @property
    def guesses(self) -> Guesses | None:
        """Keeps the accepted rows of guesses; None: its steps verify no guesses."""

    @property
    def draft_network(self) -> DraftNetwork | None:
        """Guesses what follows sequences; None: this stage has no weights for that."""

    def receive(self, received: HandedRows) -> None:
        """Copy the rows of the stage before; the next step that is given none works on them."""

    def run(self, batch: Batch, received: HandedRows | None = None) -> HandedRows:
        """Run one step on the rows of the stage before; return them for the stage after.

        The first stage receives None.
        """

    def step(
        self,
        batch: Batch,
        draws: Sequence[Draw | None] = (),
        received: HandedRows | None = None,
    ) -> StepResult:
        """Run one step on the last stage, on the rows of the stage before.

        Draw the tokens of output rows as `draws` says, where this stage can. A stage that is the
        only one receives None.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows of the residual stream."""

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return rows of the residual stream after the final norm."""

    def forget_captures(self) -> None:
        """Drop the captured steps; each is captured again when it is next used."""

    def close(self) -> None:
        """Wait for steps under way and end the stage's threads; no step follows."""

    def held_bytes(self) -> int | None:
        """Return the bytes of the device that this process holds for all its models.

        None if they are not known.
        """

    def lost(self) -> str:
        """Return why the device can run no more steps; "" while it can."""

    def repair(self) -> None:
        """Put tables in order that a step may have left half changed when it failed."""

    def times(self) -> NamedTimes:
        """Return what the steps took, by the name of each device; nothing if it is not measured."""


class CpuResult:
    """The results of a step on a CPU, which draws no tokens."""

    lasts = False
    names_tokens = False

    def __init__(
        self,
        hidden: torch.Tensor,
        logits: Callable[[torch.Tensor], torch.Tensor],  # of rows of the residual stream
        norm: Callable[[torch.Tensor], torch.Tensor],  # the final one, of such rows
    ) -> None:
        self.hidden = hidden
        self.token_rows: Mapping[int, int] = {}
        self._logits, self._norm = logits, norm

    def draw_limited(self, masks: Mapping[int, TokenMask | None]) -> None:
        """Do nothing: the engine draws all tokens."""

    def tokens(self) -> list[int | None]:
        """Return None for each output row: the engine draws all tokens."""
        return [None] * len(self.hidden)

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` of some output rows, float32."""
        return self._logits(pick_rows(self.hidden, rows)).float()

    def normed(self, rows: Sequence[int]) -> torch.Tensor:
        """Return hidden states `[rows, hidden]` of some output rows after the final norm."""
        return self._norm(pick_rows(self.hidden, rows)).float()


class CpuStage:
    """The layers of a CPU."""

    drawn: torch.Tensor | None = None  # the engine draws all tokens

    def __init__(self, device: str, model: Model) -> None:
        self.device = device
        self._model = model
        self._times = StageTimes()
        self._waited_s = self._handover_s = 0.0  # for rows that no step has taken yet

    @property
    def has_head(self) -> bool:
        """Whether this stage returns logits."""
        return self._model.has_head

    @property
    def routing(self) -> RoutingStats | None:
        """How often each expert of this stage was picked; None without experts."""
        return self._model.routing

    @property
    def caches(self) -> CacheMover:
        """Moves what the stage's caches hold of a sequence."""
        return self._model.caches

    @property
    def cache_files(self) -> CacheFiles:
        """Tells what the stage's caches hold as bytes."""
        return self._model.caches

    @property
    def store(self) -> ExpertStore | None:
        """Where each expert of this stage is; None if no expert is cold."""
        return self._model.store

    @property
    def guesses(self) -> Guesses | None:
        """Keeps the accepted rows of guesses; None: no guesses were planned for."""
        return self._model.guesses

    @property
    def draft_network(self) -> DraftNetwork | None:
        """Guesses what follows sequences; None: this stage has no weights for that."""
        return self._model.draft_network

    def run(self, batch: Batch, received: HandedRows | None = None) -> HandedRows:
        """Run one step on the rows of the stage before; return them for the stage after."""
        started = self._take(received)
        handed = self._model.handed(self._model.run(batch), len(batch.tokens))
        self._end(batch, started, handed.nbytes)
        return handed

    def receive(self, received: HandedRows) -> None:
        """Copy the rows of the stage before; the next step that is given none works on them."""
        started = time.perf_counter()
        if received.stream.device.type != "cpu":
            torch.cuda.current_stream(received.stream.device).synchronize()
        computed = time.perf_counter()
        self._model.receive(received)
        self._waited_s, self._handover_s = computed - started, time.perf_counter() - computed

    def _take(self, received: HandedRows | None) -> float:
        """Copy the rows of the stage before; return the time now."""
        if received is not None:
            self.receive(received)
        return time.perf_counter()

    def _end(self, batch: Batch, started: float, handover_bytes: int = 0) -> None:
        """Note the end of a step's layers, which began at a time."""
        if self._model.tap is not None:
            self._model.tap.end_step(batch)
        self._times.add(
            busy_s=time.perf_counter() - started,
            waited_s=self._waited_s,
            handover_bytes=handover_bytes,
            handover_s=self._handover_s,
            embed_s=self._model.embed_s,
        )
        self._waited_s = self._handover_s = 0.0

    def step(
        self,
        batch: Batch,
        draws: Sequence[Draw | None] = (),
        received: HandedRows | None = None,
    ) -> CpuResult:
        """Run one step on the last stage; the engine draws its tokens."""
        started = self._take(received)
        hidden = self._model.forward(batch)
        self._end(batch, started)
        return CpuResult(hidden, self.logits, self._model.normed)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows of the residual stream."""
        started = time.perf_counter()
        logits = self._model.logits(hidden)
        self._times.add_head(time.perf_counter() - started)
        return logits

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return rows of the residual stream after the final norm."""
        return self._model.normed(hidden)

    def forget_captures(self) -> None:
        """Do nothing: steps on a CPU are not captured."""

    def close(self) -> None:
        """Do nothing: the stage has no threads."""

    def held_bytes(self) -> int | None:
        """Return None: a process's host memory holds more than its layers."""
        return None

    def lost(self) -> str:
        """Return "": a CPU is never lost."""
        return ""

    def repair(self) -> None:
        """Do nothing: steps on a CPU change no tables."""

    def times(self) -> NamedTimes:
        """Return what the steps took."""
        return [(self.device, self._times)]


def pick_rows(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows of `x` in ascending order: a view if they are neighbours, else a copy."""
    if not rows:
        return x[:0]
    if rows[-1] - rows[0] == len(rows) - 1:
        return x[rows[0] : rows[-1] + 1]
    chosen = torch.tensor(rows, dtype=torch.int64)
    if x.device.type != "cpu":
        chosen = chosen.pin_memory().to(x.device, non_blocking=True)
    return x.index_select(0, chosen)
