"""ExpertUpkeep: what the engine does for a model's experts between steps.

It counts choices and hits, saves the routing statistics, exchanges hot and cold experts, and reads
what cold experts cost.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from headroom.errors import CapacityError
from headroom.experts.exchange import ExchangeRound, Exchanges, plan_exchanges, recent
from headroom.experts.placement import ExpertCounts, ExpertPlacement, save_placement
from headroom.experts.stats import HistoryKeeper, RoutingHistory
from headroom.experts.telemetry import ExpertTelemetry, HitCounter
from headroom.options import SWAP_WINDOW
from headroom.split.expert_records import ExpertRecords
from headroom.split.pipeline import Pipeline
from headroom.split.worker_messages import WorkerLostError
from headroom.units import gib

__all__ = ["ExpertTelemetry", "ExpertUpkeep", "ExpertView", "open_upkeep"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerView:
    """The routed experts of one layer; a dense layer has none."""

    used: int  # experts that a token visits
    picks: tuple[int, ...]  # since the start, by expert
    hot: tuple[bool, ...]  # by expert


@dataclass(frozen=True, slots=True)
class ExpertView:
    """All experts of a model at one moment between two steps."""

    layers: tuple[LayerView, ...]
    telemetry: ExpertTelemetry  # since the start


def open_upkeep(pipeline: Pipeline, records: ExpertRecords) -> "ExpertUpkeep | None":
    """Return the upkeep of a loaded model; None for a model without experts."""
    return None if pipeline.routing is None else ExpertUpkeep(pipeline, records)


class ExpertUpkeep:
    """The upkeep of one model.

    Only the engine's thread calls it. Other threads may read `latest` and, one at a time, call
    `ask_view`.
    """

    def __init__(self, pipeline: Pipeline, records: ExpertRecords) -> None:
        assert pipeline.routing is not None
        self._routing, self._meter, self._lost = pipeline.routing, pipeline.meter, pipeline.lost
        model, file, rules = records.model, records.file, records.rules
        self._model, self._rules = model, rules
        self._history = HistoryKeeper(file, model.identity)
        # What exchanges are planned by.
        self._view = recent(file.history.counts, model.used, SWAP_WINDOW)
        self._counts = self._viewed = self._routing.counts()  # as they were read last
        self._hits = HitCounter(model.used, self._counts.shape[1])
        self._experts: Exchanges | None = pipeline.experts
        self._store, self._keepers = pipeline.store, pipeline.keepers
        self._exchanging = self._experts is not None and rules.swap_every is not None
        self._round: ExchangeRound | None = None  # under way
        if (placement := self._placement()) is not None:
            self._hits.set_placement(placement)
        self._some_cold = placement is not None
        # With all experts hot on a GPU or in workers, reading the counts is not worth waiting for a
        # step.
        self._watched = self._some_cold or pipeline.on_cpu
        self._exchanged, self._unfinished = 0, False
        self._round_tokens = self._saved_tokens = 0
        self._saved_at = time.monotonic()
        # Costs and choices of warm-up steps are left out.
        self._start = self._hits.reading(self._meter)
        self._start_counts = self._counts
        self._asked: Future[ExpertView] | None = None  # for the next moment between two steps
        self.latest: ExpertTelemetry | None = self.read() if self._watched else None
        self._log_limits()

    def due(self, tokens: int, resting: bool) -> bool:
        """Return whether `run` has anything to do after so many tokens.

        `resting`: no request is being answered; one that is preempted still is.
        """
        exchanging = self._turn_due(resting) or self._exchange_due(tokens, resting)
        return exchanging or self._asked is not None or self._save_in(tokens) == 0.0

    def idle_s(self, tokens: int) -> float | None:
        """Return the seconds that an engine without requests may sleep; None: until one comes."""
        exchanging = self._turn_due(True) or self._exchange_due(tokens, True)
        return 0.0 if exchanging or self._asked is not None else self._save_in(tokens)

    def go_on(self, resting: bool) -> None:
        """Let shares and policies follow what was measured, and continue a round of exchanges.

        Steps may run. If an exchange could change an answer, one that has not turned is dropped
        when a request runs.
        """
        for keeper in self._keepers:
            keeper.follow()
        if self._round is None:
            return
        if not self._may_turn(resting):
            self._round.give_way()
        if self._round.turned and self._round.ready():
            self._count_done(self._round, self._round.end)
        self._note(self._round)

    def run(self, tokens: int, resting: bool) -> None:
        """Exchange, save and show what is due; no step may be running.

        While requests run, this waits for no copy. If none runs, it waits for the copies of one
        exchange, so that every pause completes one, and a new request waits for at most one.
        """
        if self._exchange_due(tokens, resting):
            self._begin_round(self._seen(self._count_hits()))
            self._round_tokens = tokens
        if self._round is not None and self._turn_due(resting):
            if self._round.turned:
                self._count_done(self._round, self._round.end)
            if not self._round.over:
                self._turn(self._round)
            self._note(self._round)
        if self._save_in(tokens) == 0.0:
            self._save()
            self._saved_tokens, self._saved_at = tokens, time.monotonic()
        if self._asked is not None:
            asked, self._asked = self._asked, None
            asked.set_result(self._view_now())

    def ask_view(self) -> "Future[ExpertView]":
        """Ask for a view, which `run` takes; all who ask before that share one."""
        asked = self._asked
        if asked is None:
            asked = self._asked = Future()
            asked.set_running_or_notify_cancel()  # those who share it cannot cancel it
        return asked

    def read(self) -> ExpertTelemetry:
        """Return all totals so far; waits for a step that runs."""
        self._count_hits()
        self.latest = self._hits.reading(self._meter, self._exchanged).since(self._start)
        return self.latest

    def history(self) -> RoutingHistory:
        """Return all choices, including those of earlier days."""
        self._counts = self._routing.counts()
        return self._known_history()

    @property
    def tells_requests(self) -> bool:
        """Whether requests report what cold experts cost: only if some are cold."""
        return self._some_cold

    def begin_request(self) -> ExpertTelemetry | None:
        """Return the totals at the begin of a request; None if all experts are hot."""
        return self.read() if self.tells_requests else None

    def end_request(self, began: ExpertTelemetry | None) -> dict[str, object] | None:
        """Return what experts cost since a request began, other requests included."""
        if not self._watched:
            return None
        now = self.read()
        return now.since(began).summary() if began is not None else None

    @property
    def picks(self) -> torch.Tensor | None:
        """All choices `[layers, experts]` as they were read last; None: they prepare nothing."""
        return self._counts if self._exchanging else None

    def picks_since(self, before: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
        """Return the choices since `before`, other requests included, and `earlier` ones.

        They are float32, and those of about the last SWAP_WINDOW tokens.
        """
        new = (self._counts - before).float()
        grown = (new if earlier is None else new + earlier).tolist()
        return torch.tensor(recent(grown, self._model.used, SWAP_WINDOW))

    def prepare(self, picks: torch.Tensor) -> None:
        """Carry out a round of exchanges by the picks of a conversation that goes on.

        No step may be running. This waits for the copies of the round.
        """
        if not self._exchanging:
            return
        if self._round is not None:
            self._count_done(self._round, self._round.stop)
            self._note(self._round)
        if not self._exchanging:  # the round has failed
            return
        self._count_hits()
        layers = zip(picks.tolist(), self._model.layers, strict=True)
        counts = [row[: layer.experts] for row, layer in layers]
        self._begin_round(recent(counts, self._model.used, SWAP_WINDOW))
        while (left := self._round) is not None:
            self._turn(left)
            if left.turned:
                self._count_done(left, left.end)
            self._note(left)

    def begin_again(self) -> None:
        """Take the experts as they are after workers were started again: as they were loaded."""
        self._round = None  # the copies under way are gone, too
        self._count_hits()
        if (placement := self._placement()) is not None:
            self._hits.set_placement(placement)

    def close(self) -> None:
        """End a round that is under way, and save statistics and placement; failures are logged."""
        self._refuse_view()
        if self._round is not None:
            self._count_done(self._round, self._round.stop)
            self._note(self._round)
        try:
            self._save()
            self._save_placement()
        except Exception as error:
            log.warning("experts: not saved: %s", error)

    def close_after_error(self) -> None:
        """Save what the host knows after the engine broke; raises no error.

        Exchanges under way are left as they are, and a lost GPU is not asked for its counts.
        """
        self._refuse_view()
        asks = not self._lost()
        if asks:
            try:
                self._counts = self._routing.counts()
            except Exception:  # lost, too: what it said last is saved
                asks = False
        try:
            self._known_history()
            self._history.save()
            self._save_placement(ask=asks)
        except Exception as error:
            log.warning("experts: not saved: %s", error)

    def _known_history(self) -> RoutingHistory:
        """Return the history with all choices that the host has seen."""
        return self._history.take(self._counts.tolist(), time.time())

    def _placement(self, *, ask: bool = True) -> ExpertPlacement | None:
        """Return which experts are hot now; None if all are.

        Without `ask`, the GPU is lost: return what is known of it.
        """
        if self._experts is not None:
            return self._experts.placement()
        return None if self._store is None else self._store.current_placement(ask=ask)

    def _log_limits(self) -> None:
        if self._rules.placement_path is not None and not self._some_cold:
            log.warning(
                "experts: all are hot, so that no placement will be saved to %s; on a GPU, try a "
                "smaller --expert-budget or --device-memory",
                self._rules.placement_path,
            )
        cached = self._store is not None and self._store.is_cached
        if cached:
            log.info("exchanges: none, since decode steps fill the slots of experts themselves")
        elif self._some_cold and self._experts is None and self._rules.swap_every is not None:
            log.info(
                "exchanges: none, since cold experts are left out and held nowhere; with "
                "--keep-host-copy they are held, and may become hot"
            )
        if self._exchanging and self._rules.swap_every and not self._within_requests:
            log.info(
                "exchanges: hot and cold experts differ in their last bits here, so that exchanges "
                "wait for the ends of requests"
            )
        limit = self._rules.policy.most_bytes
        if not self._exchanging or self._experts is None or limit is None:
            return
        sizes = [layer.exchange_bytes for layer in self._experts.layers() if layer.experts]
        if large := [size for size in sizes if size > limit]:
            log.warning(
                "exchanges: none in %d of %d layers, where one copies %s and --swap-bytes is %s",
                len(large),
                len(sizes),
                gib(max(large)),
                gib(limit),
            )

    @property
    def _within_requests(self) -> bool:
        """Whether an exchange changes no bit of an answer, so that requests may run."""
        return self._experts is not None and self._experts.same_bits

    def _may_turn(self, resting: bool) -> bool:
        """Return whether experts may change sides now."""
        return resting or (bool(self._rules.swap_every) and self._within_requests)

    def _turn_due(self, resting: bool) -> bool:
        """Return whether `run` continues the round; while resting it may wait for copies."""
        if self._round is None:
            return False
        return resting or (
            self._may_turn(resting) and not self._round.turned and self._round.ready()
        )

    def _exchange_due(self, tokens: int, resting: bool) -> bool:
        """Return whether a new round begins."""
        if not self._exchanging or self._round is not None or not self._may_turn(resting):
            return False
        if resting:
            return self._unfinished or tokens != self._round_tokens
        return tokens - self._round_tokens >= (self._rules.swap_every or 0)

    def _save_in(self, tokens: int) -> float | None:
        """Return the seconds until the statistics are saved; None if nothing is new."""
        if not self._history.saves or tokens == self._saved_tokens:
            return None
        return max(0.0, self._saved_at + self._rules.save_every_s - time.monotonic())

    def _save(self) -> None:
        if self._history.saves:
            self.history()
            self._history.save()

    def _save_placement(self, *, ask: bool = True) -> None:
        path = self._rules.placement_path
        if path is None or (placement := self._placement(ask=ask)) is None:
            return
        save_placement(path, placement, self._model.identity)
        log.info("experts: placement saved to %s", path)

    def _begin_round(self, counts: ExpertCounts) -> None:
        """Plan a round by some counts, and start its first copies."""
        assert self._experts is not None
        experts = self._experts
        planned = plan_exchanges(
            experts.placement(),
            counts,
            experts.layers(),
            self._rules.policy,
            experts.speeds,
        )
        self._unfinished = bool(planned)
        if planned:
            self._round = ExchangeRound(experts, planned)
            self._note(self._round)

    def _turn(self, exchanges: ExchangeRound) -> None:
        self._count_hits()
        if (exchange := exchanges.turn()) is not None:
            self._hits.move(exchange.layer, exchange.promoted, exchange.demoted)

    def _count_done(self, exchanges: ExchangeRound, act: Callable[[], None]) -> None:
        """Call `act`, and count the exchanges that it ended."""
        before = len(exchanges.done)
        act()
        self._exchanged += len(exchanges.done) - before

    def _note(self, exchanges: ExchangeRound) -> None:
        """Log a round that is over; after a failure there are no more rounds."""
        if not exchanges.over:
            return
        self._round = None
        if exchanges.done:
            copied = sum(exchange.copied_bytes for exchange in exchanges.done)
            log.info(
                "exchanges: %d experts became hot, %s copied", len(exchanges.done), gib(copied)
            )
        if exchanges.error is not None and not isinstance(exchanges.error, WorkerLostError):
            assert self._experts is not None
            self._exchanging = False
            self._hits.set_placement(self._experts.placement())
            log.error("exchanges: one failed and there are no more", exc_info=exchanges.error)

    def _count_hits(self) -> torch.Tensor:
        """Count the choices so far as hits or misses, before experts move; return them."""
        self._counts, decode = self._routing.counts_with_decode()
        self._hits.count(self._counts, decode)
        if self._store is not None and self._store.is_cached:
            self._hits.set_placement(self._store.current_placement())
        return self._counts

    def _refuse_view(self) -> None:
        if self._asked is not None:
            self._asked.set_exception(CapacityError("The engine is shutting down."))

    def _view_now(self) -> ExpertView:
        counts = (self._count_hits() - self._start_counts).tolist()
        hot = self._hits.hot()
        rows = zip(self._model.layers, self._model.used, counts, hot, strict=True)
        return ExpertView(
            tuple(
                LayerView(used, tuple(picks[: layer.experts]), tuple(places[: layer.experts]))
                for layer, used, picks, places in rows
            ),
            self._hits.reading(self._meter, self._exchanged).since(self._start),
        )

    def _seen(self, counts: torch.Tensor) -> tuple[tuple[float, ...], ...]:
        """Return the choices of about the last SWAP_WINDOW tokens."""
        new = (counts - self._viewed).tolist()
        self._viewed = counts
        grown = [
            tuple(old + fresh for old, fresh in zip(row, added, strict=False))
            for row, added in zip(self._view, new, strict=True)
        ]
        self._view = recent(grown, self._model.used, SWAP_WINDOW)
        return self._view
