"""ExpertUpkeep: what is done for a model's experts between steps: count, save, swap, measure."""

import contextlib
import logging
import time
from collections.abc import Callable

import torch

from headroom.experts.exchange import ExchangeRound, StoreExchanges, plan_exchanges, recent
from headroom.experts.placement import ExpertPlacement, save_placement
from headroom.experts.stats import HistoryKeeper, RoutingHistory
from headroom.experts.telemetry import ExpertTelemetry, HitCounter
from headroom.split.expert_records import ExpertRecords
from headroom.split.pipeline import Pipeline
from headroom.units import gib

__all__ = ["ExpertTelemetry", "ExpertUpkeep", "open_upkeep"]  # the figures are moe's own

log = logging.getLogger(__name__)

WINDOW = 8192  # tokens that swaps look back, about


def open_upkeep(pipeline: Pipeline, records: ExpertRecords) -> "ExpertUpkeep | None":
    """Return the upkeep of a loaded model; None where it has no experts."""
    return None if pipeline.routing is None else ExpertUpkeep(pipeline, records)


class ExpertUpkeep:
    """Called by the engine's thread alone, between steps; other threads may look at `latest`."""

    def __init__(self, pipeline: Pipeline, records: ExpertRecords) -> None:
        assert pipeline.routing is not None
        self._routing, self._meter, self._lost = pipeline.routing, pipeline.meter, pipeline.lost
        model, file, rules = records.model, records.file, records.rules
        self._model, self._rules = model, rules
        self._history = HistoryKeeper(file, model.identity)
        self._view = recent(file.history.counts, model.used, WINDOW)  # what swaps go by
        self._counts = self._viewed = self._routing.counts()  # as they were when last asked for
        self._hits = HitCounter(model.used, self._counts.shape[1])
        self._experts: StoreExchanges | None = pipeline.experts
        self._store = pipeline.store
        self._swapping = self._experts is not None and rules.swap_every is not None
        self._round: ExchangeRound | None = None  # that is under way
        if (placement := self._placement()) is not None:
            self._hits.place(placement)
        self._some_cold = placement is not None
        # On a GPU whose experts are all hot, a look at the counts is not worth waiting for.
        self._watched = self._some_cold or pipeline.device == "cpu"
        self._swaps, self._unfinished = 0, False
        self._round_tokens = self._saved_tokens = 0
        self._saved_at = time.monotonic()
        # What warming up has cost: its choices are forgotten, too.
        self._start = self._hits.reading(self._meter)
        self.latest: ExpertTelemetry | None = self.read() if self._watched else None
        self._tell_when()

    def due(self, tokens: int, resting: bool) -> bool:
        """Whether `run` has anything to do after so many tokens; `resting`: no request runs."""
        swapping = self._turn_due(resting) or self._swap_due(tokens, resting)
        return swapping or self._save_in(tokens) == 0.0

    def idle_s(self, tokens: int) -> float | None:
        """Return how long an engine without requests may sleep; None: until one comes."""
        swapping = self._turn_due(True) or self._swap_due(tokens, True)
        return 0.0 if swapping else self._save_in(tokens)

    def go_on(self, resting: bool) -> None:
        """Do what is due about swaps while steps may run; without any under way, nothing.

        Where swaps may be seen, one that has not turned gives way to requests.
        """
        if self._round is None:
            return
        if not self._may_turn(resting):
            self._round.give_way()
        if self._round.turned and self._round.ready():
            self._count_done(self._round, self._round.end)
        self._note(self._round)

    def run(self, tokens: int, resting: bool) -> None:
        """Exchange and save as is due; no step may be running.

        While requests run, this waits for no copy. If none does, it waits for those of one swap:
        so every pause brings one, and a request that comes is not held up by more.
        """
        if self._swap_due(tokens, resting):
            self._begin_round()
            self._round_tokens = tokens
        if self._round is not None and self._turn_due(resting):
            if self._round.turned:
                self._count_done(self._round, self._round.end)
            if not self._round.over:
                self._turn_swap(self._round)
            self._note(self._round)
        if self._save_in(tokens) == 0.0:
            self._save()
            self._saved_tokens, self._saved_at = tokens, time.monotonic()

    def read(self) -> ExpertTelemetry:
        """Return all totals so far; waits for steps that run."""
        self._count_hits()
        self.latest = self._hits.reading(self._meter, self._swaps).since(self._start)
        return self.latest

    def history(self) -> RoutingHistory:
        """Return all choices, those of earlier days included."""
        self._counts = self._routing.counts()
        return self._known_history()

    @property
    def tells_requests(self) -> bool:
        """Whether a request's end is told what its cold experts cost: where some are cold."""
        return self._some_cold

    def begin_request(self) -> ExpertTelemetry | None:
        """Return what the end of a request is compared with; None where all experts are hot."""
        return self.read() if self.tells_requests else None

    def end_request(self, began: ExpertTelemetry | None) -> dict[str, object] | None:
        """Return what cold experts cost while a request ran, other requests' share included."""
        if not self._watched:
            return None
        now = self.read()
        return now.since(began).summary() if began is not None else None

    def close(self) -> None:
        """Save what is to be saved; a failure is told and nothing more."""
        if self._round is not None:
            self._count_done(self._round, self._round.stop)
            self._note(self._round)
        try:
            self._save()
            self._save_placement()
        except Exception as error:
            log.warning("experts: not saved: %s", error)

    def close_after_error(self) -> None:
        """Save what the host knows, since a broken engine closes nothing; raises no error.

        Swaps under way are left alone, and a GPU that is lost is not asked for its counts.
        """
        with contextlib.suppress(Exception):  # those that were seen last are good enough
            if not self._lost():
                self._counts = self._routing.counts()
        try:
            self._known_history()
            self._history.save()
            self._save_placement()
        except Exception as error:
            log.warning("experts: not saved: %s", error)

    def _known_history(self) -> RoutingHistory:
        """All choices that the host has seen."""
        return self._history.take(self._counts.tolist(), time.time())

    def _placement(self) -> ExpertPlacement | None:
        """Which experts are hot now; None where all are."""
        if self._experts is not None:
            return self._experts.placement()
        return None if self._store is None else self._store.current_placement()

    def _tell_when(self) -> None:
        if self._rules.placement_path is not None and not self._some_cold:
            log.warning(
                "experts: all are hot, so that no placement will be saved to %s; on a GPU, try a "
                "smaller --expert-budget or --device-memory",
                self._rules.placement_path,
            )
        if self._some_cold and self._experts is None and self._rules.swap_every is not None:
            log.info(
                "swaps: none, since cold experts are left out and held nowhere; with "
                "--keep-host-copy they are held, and may become hot"
            )
        if self._swapping and self._rules.swap_every and not self._within_requests:
            log.info(
                "swaps: hot and cold experts differ in their last bits here, so that swaps wait "
                "for the ends of requests"
            )
        limit = self._rules.policy.most_bytes
        if not self._swapping or self._experts is None or limit is None:
            return
        sizes = [layer.exchange_bytes for layer in self._experts.layers() if layer.experts]
        if large := [size for size in sizes if size > limit]:
            log.warning(
                "swaps: none in %d of %d layers, where one copies %s and --swap-bytes is %s",
                len(large),
                len(sizes),
                gib(max(large)),
                gib(limit),
            )

    @property
    def _within_requests(self) -> bool:
        """Whether a swap is invisible to a request that runs."""
        return self._experts is not None and self._experts.same_bits

    def _may_turn(self, resting: bool) -> bool:
        """Whether experts may change sides now."""
        return resting or (bool(self._rules.swap_every) and self._within_requests)

    def _turn_due(self, resting: bool) -> bool:
        """Whether a round goes on with no step running; one that rests may as well wait for it."""
        if self._round is None:
            return False
        return resting or (
            self._may_turn(resting) and not self._round.turned and self._round.ready()
        )

    def _swap_due(self, tokens: int, resting: bool) -> bool:
        """Whether a new round begins."""
        if not self._swapping or self._round is not None or not self._may_turn(resting):
            return False
        if resting:
            return self._unfinished or tokens != self._round_tokens
        return tokens - self._round_tokens >= (self._rules.swap_every or 0)

    def _save_in(self, tokens: int) -> float | None:
        """Return the seconds until the statistics are saved; None where nothing is new."""
        if not self._history.saves or tokens == self._saved_tokens:
            return None
        return max(0.0, self._saved_at + self._rules.save_every_s - time.monotonic())

    def _save(self) -> None:
        if self._history.saves:
            self.history()
            self._history.save()

    def _save_placement(self) -> None:
        path, placement = self._rules.placement_path, self._placement()
        if path is None or placement is None:
            return
        save_placement(path, placement, self._model.identity)
        log.info("experts: placement saved to %s", path)

    def _begin_round(self) -> None:
        """Plan a round, and ask for its first copies."""
        assert self._experts is not None
        counts = self._count_hits()
        experts = self._experts
        swaps = plan_exchanges(
            experts.placement(), self._seen(counts), experts.layers(), self._rules.policy
        )
        self._unfinished = bool(swaps)
        if swaps:
            self._round = ExchangeRound(experts, swaps)
            self._note(self._round)

    def _turn_swap(self, swaps: ExchangeRound) -> None:
        self._count_hits()
        if (swap := swaps.turn()) is not None:
            self._hits.move(swap.layer, swap.promoted, swap.demoted)

    def _count_done(self, swaps: ExchangeRound, act: Callable[[], None]) -> None:
        """Do what may bring a swap to its end, and count it then."""
        before = len(swaps.done)
        act()
        self._swaps += len(swaps.done) - before

    def _note(self, swaps: ExchangeRound) -> None:
        """Tell of a round that is over; after a failure there are no more."""
        if not swaps.over:
            return
        self._round = None
        if swaps.done:
            copied = sum(swap.copied_bytes for swap in swaps.done)
            log.info("swaps: %d experts became hot, %s copied", len(swaps.done), gib(copied))
        if swaps.error is not None:
            assert self._experts is not None
            self._swapping = False
            self._hits.place(self._experts.placement())
            log.error("swaps: one failed and there are no more", exc_info=swaps.error)

    def _count_hits(self) -> torch.Tensor:
        """Count the choices so far as hits or not, before experts move; return them."""
        self._counts, decode = self._routing.counts_with_decode()
        self._hits.count(self._counts, decode)
        return self._counts

    def _seen(self, counts: torch.Tensor) -> tuple[tuple[float, ...], ...]:
        """Return the choices of late, the new ones included."""
        new = (counts - self._viewed).tolist()
        self._viewed = counts
        grown = [
            tuple(old + fresh for old, fresh in zip(row, added, strict=False))
            for row, added in zip(self._view, new, strict=True)
        ]
        self._view = recent(grown, self._model.used, WINDOW)
        return self._view
