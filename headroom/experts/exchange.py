"""Exchanges: a cold expert that is chosen often and a hot one that is not change places.

`plan_exchanges` finds the pairs that are worth their copies: the counts differ by more than chance
explains, and the exchange saves more time than it takes. An `ExchangeRound` carries the exchanges
out one after another while steps run, on the experts of a store (`StoreExchanges`) or of worker
processes (`split/worker_experts.py`). The options call an exchange a swap, and so do metric names
and keys of JSON.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, log, sqrt
from typing import TYPE_CHECKING, Protocol

from headroom.experts.placement import (
    ExpertCounts,
    ExpertPlacement,
    LayerExperts,
    check_counts,
    ranked,
)
from headroom.plan.cost_model import (
    ColdSpeeds,
    exchange_saves_seconds,
    exchange_takes_seconds,
)

if TYPE_CHECKING:  # imports torch, which `headroom plan` must not
    from headroom.experts.joined import ColdLayer, LocalStore
    from headroom.experts.layer_store import LayerStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePolicy:
    """When an exchange is worth its copies."""

    min_gain: float = 1.0  # the cold expert must have at least so many choices more
    # The gain must exceed this share of the hot expert's choices, or equals would alternate.
    hysteresis: float = 0.25
    # If all experts of the model are chosen equally often: the most that the chance of any exchange
    # in a round may be. 1: the counts need not prove anything.
    false_chance: float = 0.001
    per_layer: int = 1  # exchanges of one layer in a round
    most_bytes: int | None = None  # most bytes that a round sends over the link, both ways together


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two experts of one layer that will change places."""

    layer: int
    promoted: int  # cold before
    demoted: int  # hot before
    gain: float  # choices that become hot
    copied_bytes: int  # over the link, both ways


def plan_exchanges(
    placement: ExpertPlacement,
    counts: ExpertCounts,
    layers: Sequence[LayerExperts],
    policy: ExchangePolicy,
    speeds: ColdSpeeds | None = None,
) -> list[Exchange]:
    """Return the exchanges of one round: the largest gain first, the lower layer on ties.

    With `speeds`, an exchange must save more time than it takes. Without, it need not: experts that
    are left out while they are cold cost no time.
    """
    check_counts(layers, counts)
    pairs = sum(
        len(hot) * (layer.experts - len(hot))
        for hot, layer in zip(placement.hot, layers, strict=True)
    )
    errors = needed_errors(pairs, policy.false_chance)
    found = [
        exchange
        for index, layer in enumerate(layers)
        for exchange in _pair(index, placement.hot[index], counts[index], layer, policy)
        if _is_proved(exchange, counts[index], errors)
        and _pays(exchange, counts[index], layer, speeds)
    ]
    found.sort(key=lambda exchange: (-exchange.gain, exchange.layer))
    chosen: list[Exchange] = []
    left = policy.most_bytes
    for exchange in found:
        if left is not None:
            if exchange.copied_bytes > left:
                continue  # a smaller one may still fit
            left -= exchange.copied_bytes
        chosen.append(exchange)
    return chosen


def needed_errors(pairs: int, false_chance: float) -> float:
    """Return how many standard errors two counts must differ by before the difference is real.

    A round takes the best of all pairs of a hot and a cold expert. So that it is wrong with at most
    the chance `false_chance`, each pair may be wrong with the chance `false_chance / pairs`. If two
    experts are chosen equally often and have n choices together, the standard error of their
    difference is at most sqrt(n). By Hoeffding's inequality the difference exceeds z * sqrt(n) with
    a chance of at most exp(-z * z / 2), however few the choices are.
    """
    if false_chance >= 1:
        return 0.0
    return sqrt(2 * log(max(1, pairs) / false_chance)) if false_chance else inf


def _pair(
    index: int,
    hot: Sequence[int],
    counts: Sequence[float],
    layer: LayerExperts,
    policy: ExchangePolicy,
) -> list[Exchange]:
    """Pair the least chosen hot experts with the most chosen cold ones, as far as the policy says.

    Whether the counts prove a pair's gain, and whether it pays, is not asked here.
    """
    order = ranked(counts)
    resident = set(hot)
    weakest = [expert for expert in reversed(order) if expert in resident]
    strongest = [expert for expert in order if expert not in resident]
    exchanges = []
    for demoted, promoted in list(zip(weakest, strongest, strict=False))[: policy.per_layer]:
        gain = counts[promoted] - counts[demoted]
        if gain < policy.min_gain or gain <= policy.hysteresis * counts[demoted]:
            break
        exchanges.append(Exchange(index, promoted, demoted, gain, layer.exchange_bytes))
    return exchanges


def _is_proved(exchange: Exchange, counts: Sequence[float], errors: float) -> bool:
    """Return whether the two experts' counts differ by more than `errors` standard errors.

    Counts that were scaled down (`recent`) scatter less than the square root of their size, so that
    the test is stricter for them than it need be.
    """
    both = counts[exchange.promoted] + counts[exchange.demoted]
    return exchange.gain > errors * sqrt(both)


def _pays(
    exchange: Exchange, counts: Sequence[float], layer: LayerExperts, speeds: ColdSpeeds | None
) -> bool:
    """Return whether an exchange saves more time than it takes, if choices go on as counted."""
    if speeds is None:
        return True
    per_token = exchange.gain * layer.used / sum(counts)
    saved_s = exchange_saves_seconds(speeds, layer.expert_bytes, per_token)
    return saved_s > exchange_takes_seconds(speeds, exchange.copied_bytes)


def recent(counts: ExpertCounts, used: Sequence[int], tokens: int) -> tuple[tuple[float, ...], ...]:
    """Return counts scaled down to at most so many tokens, so that new choices soon matter.

    `used` has the experts that a token visits, by layer.
    """
    scaled = []
    for row, each in zip(counts, used, strict=True):
        total = sum(row)
        share = min(1.0, tokens * each / total) if total else 1.0
        scaled.append(tuple(count * share for count in row))
    return tuple(scaled)


class Exchanges(Protocol):
    """The experts of a model, of which two at a time change places, here or in other processes.

    Only the engine's thread calls this, in the order begin, turn, end. Copies run in between.
    """

    @property
    def same_bits(self) -> bool:
        """Whether hot and cold experts give the same results, bit by bit."""

    @property
    def speeds(self) -> ColdSpeeds | None:
        """Speeds of decode steps; None: cold experts cost no time."""

    def placement(self) -> ExpertPlacement:
        """Return which experts are hot now."""

    def layers(self) -> Sequence[LayerExperts]:
        """Return all layers of the model, with the bytes that their experts have in memory."""

    def begin(self, layer: int, promoted: int, demoted: int) -> None:
        """Start copies of two experts to the spare buffers; steps may run and see no change."""

    def ready(self) -> bool:
        """Return whether the copies that were started last are done; waits for nothing."""

    def wait(self) -> None:
        """Wait for the copies that were started last."""

    def turn(self) -> None:
        """Let the two change sides, and start copies to their new places; no step may run."""

    def end(self) -> None:
        """Let kernels find the two at their new places; steps may run."""


def with_store_bytes(
    layers: Sequence[LayerExperts], stored: "Sequence[ColdLayer | None]"
) -> tuple[LayerExperts, ...]:
    """Return all layers of a model, with the bytes that their experts have in a store."""
    return tuple(
        layer
        if one is None
        else replace(layer, expert_bytes=one.expert_bytes, link_copies=one.link_copies)
        for layer, one in zip(layers, stored, strict=True)
    )


class StoreExchanges:
    """Exchanges of a store in this process."""

    def __init__(
        self,
        store: "LocalStore",
        layers: Sequence[LayerExperts],
        *,
        same_bits: bool,  # hot and cold experts give the same results, bit by bit
        speeds: ColdSpeeds | None = None,  # of decode steps; None: cold experts cost no time
    ) -> None:
        self._store, self.same_bits, self.speeds = store, same_bits, speeds
        self._changing: LayerStore | None = None  # the layer of the exchange that was begun last
        self._layers = with_store_bytes(layers, store.layers)

    def placement(self) -> ExpertPlacement:
        """Return which experts are hot now."""
        return self._store.current_placement()

    def layers(self) -> Sequence[LayerExperts]:
        """Return all layers of the model, with the bytes that their experts have in the store."""
        return self._layers

    def begin(self, layer: int, promoted: int, demoted: int) -> None:
        """Start copies of two experts to the spare buffers; steps may run and see no change."""
        self._changing = self._store.layers[layer]
        self._layer.begin_exchange(promoted, demoted)

    def ready(self) -> bool:
        """Return whether the copies that were started last are done."""
        return self._layer.exchange_mark.query()

    def wait(self) -> None:
        """Wait for the copies that were started last."""
        self._layer.exchange_mark.synchronize()

    def turn(self) -> None:
        """Let the two change sides, and start copies to their new places; no step may run."""
        self._layer.turn_exchange()

    def end(self) -> None:
        """Let kernels find the two at their new places; steps may run."""
        self._layer.end_exchange()

    @property
    def _layer(self) -> "LayerStore":
        assert self._changing is not None, "only layers with cold experts change"
        return self._changing


class ExchangeRound:
    """Carries out planned exchanges one after another.

    Each takes three calls: `__init__` or the `end` before it begins it, `turn`, `end`. Copies and
    steps run in between. A failure ends the round: earlier exchanges stay done, and the one that
    failed leaves every expert where its layer finds it.
    """

    def __init__(self, experts: Exchanges, exchanges: Sequence[Exchange]) -> None:
        self._experts = experts
        self._left = deque(exchanges)
        self._now: Exchange | None = None
        self.turned = False  # the exchange under way has changed sides
        self.done: list[Exchange] = []
        self.error: Exception | None = None  # that ended the round
        self._next()

    @property
    def over(self) -> bool:
        """Whether no exchange is under way."""
        return self._now is None

    def ready(self) -> bool:
        """Return whether the next call has no copies to wait for; True if they failed."""
        try:
            return self._experts.ready()
        except Exception:
            return True  # the next call raises the failure, which ends the round

    def turn(self) -> Exchange | None:
        """Let two experts change sides; return the exchange, None if it failed. No step may run."""
        assert not self.turned
        exchange = self._now
        self.turned = self._try(self._experts.turn)
        return exchange if self.turned else None

    def end(self) -> None:
        """End the exchange that has turned, and begin the next one; steps may run."""
        assert self.turned
        exchange = self._now
        if self._try(self._experts.end):
            assert exchange is not None
            self.done.append(exchange)
            self._next()

    def give_way(self) -> None:
        """Drop all exchanges but one that has turned: its experts are not at their places yet."""
        self._left.clear()
        if not self.turned:
            self._now = None

    def stop(self) -> None:
        """Drop all exchanges but one that has turned, and wait until no copy runs."""
        if self._now is None:
            return
        self._try(self._experts.wait)
        self.give_way()
        if self._now is not None:
            self.end()

    def _next(self) -> None:
        self.turned, self._now = False, None
        if self._left:
            exchange = self._now = self._left.popleft()
            self._try(
                lambda: self._experts.begin(exchange.layer, exchange.promoted, exchange.demoted)
            )

    def _try(self, act: Callable[[], None]) -> bool:
        """Return whether a call succeeded; a failure ends the round."""
        try:
            act()
        except Exception as error:
            self.error, self._now = error, None
            return False
        return True
