"""Experts in worker processes: what a worker tells of its own, and the engine's view of them all.

The engine asks all workers at once for counts, places and costs, and each answers when it has
computed the steps that were sent before. The engine plans exchanges as for experts in its own
process, and tells the worker that has the layer what to do.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from headroom.errors import DeviceError
from headroom.experts.cold import ColdExperts
from headroom.experts.exchange import StoreExchanges, with_store_bytes
from headroom.experts.joined import ModelRouting, join_readings
from headroom.experts.placement import ExpertPlacement, LayerExperts
from headroom.experts.telemetry import ColdReading
from headroom.plan.cost_model import ColdSpeeds
from headroom.split.wire import Header, Message
from headroom.split.worker_messages import (
    EXCHANGE_MOVES,
    ColdReport,
    ToldLayer,
    WorkerLostError,
    read_reading,
)

if TYPE_CHECKING:
    from headroom.split.workers import Workers

log = logging.getLogger(__name__)


class StageExperts:
    """The experts of a worker's stage, as the worker tells of them and moves them."""

    def __init__(
        self,
        routing: ModelRouting | None,  # None: a stage without experts
        cold: ColdExperts | None,  # None: all are hot
        exchanges: StoreExchanges | None,  # None: nothing exchanges them
    ) -> None:
        self._routing, self._cold, self._exchanges = routing, cold, exchanges

    def report(self) -> ColdReport | None:
        """Return what was loaded; None if all experts are hot."""
        if self._cold is None:
            return None
        store = self._cold.store
        return ColdReport(
            layers=tuple(
                None
                if layer is None
                else ToldLayer(layer.expert_bytes, layer.link_copies, layer.path)
                for layer in store.layers
            ),
            cold_bytes=store.cold_bytes,
            pinned=store.pinned,
            is_cached=store.is_cached,
            same_bits=self._cold.same_bits,
            exchanges=self._exchanges is not None,
        )

    def follow(self) -> None:
        """Let shares and policies follow what was measured, between two steps."""
        if self._cold is not None:
            for keeper in self._cold.keepers:
                keeper.follow()

    def answer(self, ask: int) -> Message:
        """Return counts, places and costs: the counts as int64 `[2, layers, experts]`.

        They are those of all steps, and of decode steps.
        """
        header: Header = {"type": "experts", "ask": ask, "cold": None}
        if self._cold is not None:
            hot = self._cold.store.current_placement().hot
            header["cold"] = {"hot": hot, "costs": asdict(self._cold.meter.read())}
        counts = [] if self._routing is None else [torch.stack(self._routing.counts_with_decode())]
        return Message(header, counts)

    def move(self, ask: int, do: str, arguments: Sequence[int]) -> Header:
        """Take one step of an exchange; return whether its copies are done, or why it failed."""
        assert do in EXCHANGE_MOVES
        told: Header = {"type": "exchange", "ask": ask, "ready": True, "error": ""}
        try:
            if do == "ready":
                told["ready"] = self._exchanges is None or self._exchanges.ready()
            else:
                getattr(self._exchanges, do)(*arguments)
        except Exception as error:
            log.exception("exchanges: one failed")
            told["error"] = f"{type(error).__name__}: {error}"
        return told


class WorkerExperts:
    """The experts of all workers: how often each was picked, and what the cold ones cost.

    Workers that are started again count from 0. What they had counted since somebody asked is lost.
    """

    def __init__(self, workers: "Workers", layers: int, experts: int) -> None:
        self._workers, self._start = workers, workers.starts
        # Of earlier starts; and of the present one, when it was last asked.
        self._before = torch.zeros(2, layers, experts, dtype=torch.int64)
        self._now = torch.zeros_like(self._before)
        self._cost_before, self._cost_now = ColdReading(), ColdReading()
        # Hot experts by worker and layer, as they were told last; None: all of the worker are hot.
        self.hot: list[list[list[int]] | None] = [None] * workers.count

    def counts(self) -> torch.Tensor:
        """Return all choices so far, `[layers, experts]`."""
        return self.counts_with_decode()[0]

    def counts_with_decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all choices so far, and those of decode steps alone.

        While a worker is lost, these are the choices that were read last.
        """
        self.ask()
        every, decode = self._before + self._now
        return every, decode

    def read(self) -> ColdReading:
        """Return what cold experts cost, as it was told last."""
        return join_readings([self._cost_before, self._cost_now])

    def ask(self) -> None:
        """Ask all workers for counts, places and costs; this waits for all steps that were sent.

        While a worker is lost, what was told last stays known.
        """
        with contextlib.suppress(WorkerLostError):
            told = self._workers.ask_all({"type": "experts"})
            if self._workers.starts != self._start:
                self._start = self._workers.starts
                self._before = self._before + self._now
                self._cost_before = join_readings([self._cost_before, _past(self._cost_now)])
            tables = [tensor for message in told for tensor in message.tensors]
            self._now = torch.stack(tables).sum(0)
            cold = [message.header["cold"] for message in told]
            self._cost_now = join_readings([read_reading(one["costs"]) for one in cold if one])
            self.hot = [one["hot"] if one else None for one in cold]


def _past(reading: ColdReading) -> ColdReading:
    """Return the totals of a reading, without what only holds for workers that run."""
    return ColdReading(figures=reading.figures, cache=reading.cache)


class WorkerStore:
    """Where each expert of all workers is."""

    def __init__(
        self,
        experts: WorkerExperts,
        reports: Sequence[ColdReport | None],  # of the workers; one of them at least has some cold
        placement: ExpertPlacement,  # with which they loaded
    ) -> None:
        self._experts, self._placement = experts, placement
        told = [report for report in reports if report is not None]
        count = len(placement.hot)
        # By layer: the worker that has it, and what it tells of it; None: dense, or all hot.
        self.owners: list[int | None] = [None] * count
        self.layers: list[ToldLayer | None] = [None] * count
        for number, report in enumerate(reports):
            for index, layer in enumerate(() if report is None else report.layers):
                if layer is not None:
                    self.owners[index], self.layers[index] = number, layer
        self.source = placement.source
        self.is_cached = any(report.is_cached for report in told)
        self.pinned = all(report.pinned for report in told)
        self.cold_bytes = sum(report.cold_bytes for report in told)
        self.same_bits = all(report.same_bits for report in told)
        self.exchanges = all(report.exchanges for report in told)

    def current_placement(self, *, ask: bool = True) -> ExpertPlacement:
        """Return which experts are hot now; without `ask`, as the workers told last."""
        if ask:
            self._experts.ask()
        hot = list(self._placement.hot)
        for index, owner in enumerate(self.owners):
            told = None if owner is None else self._experts.hot[owner]
            if told is not None:
                hot[index] = tuple(told[index])
        return replace(self._placement, hot=tuple(hot))


class WorkerExchanges:
    """Exchanges of hot and cold experts in workers, which the engine plans."""

    def __init__(
        self,
        workers: "Workers",
        store: WorkerStore,
        layers: Sequence[LayerExperts],
        speeds: ColdSpeeds | None,  # of decode steps; None: cold experts cost no time
    ) -> None:
        self._workers, self._store, self.speeds = workers, store, speeds
        self.same_bits = store.same_bits
        self._layers = with_store_bytes(layers, store.layers)
        self._owner = 0  # the worker of the exchange that was begun last
        self._asked: int | None = None  # the question whether its copies are done, if one is open

    def placement(self) -> ExpertPlacement:
        """Return which experts are hot now."""
        return self._store.current_placement()

    def layers(self) -> Sequence[LayerExperts]:
        """Return all layers of the model, with the bytes that their experts have in workers."""
        return self._layers

    def begin(self, layer: int, promoted: int, demoted: int) -> None:
        """Let the layer's worker start copies to the spare buffers, after the steps sent so far."""
        owner = self._store.owners[layer]
        assert owner is not None, "only layers with cold experts change"
        self._owner = owner
        self._do("begin", layer, promoted, demoted)

    def ready(self) -> bool:
        """Return whether the worker has told that the copies are done; ask it again if not."""
        if self._asked is None:
            self._asked = self._ask("ready")
        if not self._workers.has_answer("exchange", self._owner, self._asked):
            return False
        asked, self._asked = self._asked, None
        return bool(self._answer(asked)["ready"])

    def wait(self) -> None:
        """Wait for the copies that were started last."""
        self._do("wait")

    def turn(self) -> None:
        """Let the two change sides, after the steps that were sent so far."""
        self._do("turn")

    def end(self) -> None:
        """Let kernels find the two at their new places, after the steps sent so far."""
        self._do("end")

    def _do(self, do: str, *arguments: int) -> None:
        self._asked = None
        self._answer(self._ask(do, *arguments))

    def _ask(self, do: str, *arguments: int) -> int:
        header: Header = {"type": "exchange", "do": do, "arguments": arguments}
        return self._workers.ask(self._owner, header)

    def _answer(self, asked: int) -> Header:
        header = self._workers.answer("exchange", self._owner, asked).header
        if header["error"]:
            raise DeviceError(f"Worker {self._owner + 1}: {header['error']}")
        return header
