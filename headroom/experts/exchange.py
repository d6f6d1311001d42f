"""Swaps: plan_swaps() finds cold experts that should be hot; StoreSwaps lets them change."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headroom.experts.placement import Counts, ExpertPlacement, LayerExperts, check_counts, ranked

if TYPE_CHECKING:  # imports torch, which `headroom plan` must not
    from headroom.experts.store import ExpertStore, LayerStore


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPolicy:
    """When an exchange is worth its copies."""

    min_gain: float = 1.0  # choices that the cold expert must have more, at least
    hysteresis: float = 0.25  # and by this share of the hot one's, so that equals do not alternate
    per_layer: int = 1  # exchanges of one layer in a round
    most_bytes: int | None = None  # that a round may send over the link, both ways together


@dataclass(frozen=True, slots=True)
class Swap:
    """Two experts of one layer that change places."""

    layer: int
    promoted: int  # cold until now
    demoted: int  # hot until now
    gain: float  # choices that become hot
    copied_bytes: int  # over the link, both ways


def plan_swaps(
    placement: ExpertPlacement,
    counts: Counts,
    layers: Sequence[LayerExperts],
    policy: SwapPolicy,
) -> list[Swap]:
    """Return the exchanges of one round, the most gained first, the lower layer on ties."""
    check_counts(layers, counts)
    found = [
        swap
        for index, layer in enumerate(layers)
        for swap in _of_layer(index, placement.hot[index], counts[index], layer, policy)
    ]
    found.sort(key=lambda swap: (-swap.gain, swap.layer))
    chosen: list[Swap] = []
    left = policy.most_bytes
    for swap in found:
        if left is not None:
            if swap.copied_bytes > left:
                continue  # a smaller one may still fit
            left -= swap.copied_bytes
        chosen.append(swap)
    return chosen


def _of_layer(
    index: int,
    hot: Sequence[int],
    counts: Sequence[float],
    layer: LayerExperts,
    policy: SwapPolicy,
) -> list[Swap]:
    """Pair the weakest hot experts with the strongest cold ones, as long as it pays."""
    order = ranked(counts)
    resident = set(hot)
    weakest = [expert for expert in reversed(order) if expert in resident]
    strongest = [expert for expert in order if expert not in resident]
    swaps = []
    for demoted, promoted in list(zip(weakest, strongest, strict=False))[: policy.per_layer]:
        gain = counts[promoted] - counts[demoted]
        if gain < policy.min_gain or gain <= policy.hysteresis * counts[demoted]:
            break
        swaps.append(Swap(index, promoted, demoted, gain, layer.swap_bytes))
    return swaps


def recent(counts: Counts, used: Sequence[int], tokens: int) -> tuple[tuple[float, ...], ...]:
    """Return counts that are worth at most so many tokens, so that new choices soon matter."""
    scaled = []
    for row, each in zip(counts, used, strict=True):
        total = sum(row)
        share = min(1.0, tokens * each / total) if total else 1.0
        scaled.append(tuple(count * share for count in row))
    return tuple(scaled)


class SwapRound:
    """Each swap takes three calls: it is begun, it turns, it ends and the next one is begun.

    Between them copies run, and steps. A failure ends the round: swaps before it stay done, and
    the one that failed leaves every expert where its layer finds it.
    """

    def __init__(self, experts: "StoreSwaps", swaps: Sequence[Swap]) -> None:
        self._experts = experts
        self._left = deque(swaps)
        self._now: Swap | None = None
        self.turned = False  # the swap under way has changed sides
        self.done: list[Swap] = []
        self.error: Exception | None = None  # that ended the round
        self._next()

    @property
    def over(self) -> bool:
        """Whether nothing is under way any more."""
        return self._now is None

    def ready(self) -> bool:
        """Tell whether the next call has no copies to wait for; it tells of those that failed."""
        try:
            return self._experts.ready()
        except Exception:
            return True

    def turn(self) -> Swap | None:
        """Let two experts change sides, and return the swap unless it failed; no step may run."""
        assert not self.turned
        swap = self._now
        self.turned = self._try(self._experts.turn)
        return swap if self.turned else None

    def end(self) -> None:
        """Bring a swap that has turned to its end, and begin the next one; steps may run."""
        assert self.turned
        swap = self._now
        if self._try(self._experts.end):
            assert swap is not None
            self.done.append(swap)
            self._next()

    def give_way(self) -> None:
        """Forget all swaps but one that has turned: its experts are not at their places yet."""
        self._left.clear()
        if not self.turned:
            self._now = None

    def stop(self) -> None:
        """Give way, and wait until no copy runs."""
        if self._now is None:
            return
        self._try(self._experts.wait)
        self.give_way()
        if self._now is not None:
            self.end()

    def _next(self) -> None:
        self.turned, self._now = False, None
        if self._left:
            swap = self._now = self._left.popleft()
            self._try(lambda: self._experts.begin(swap.layer, swap.promoted, swap.demoted))

    def _try(self, act: Callable[[], None]) -> bool:
        """Tell whether it went well; if not, the round is over."""
        try:
            act()
        except Exception as error:
            self.error, self._now = error, None
            return False
        return True


class StoreSwaps:
    """The experts of a store, which change places two at a time; for the engine's thread alone."""

    def __init__(
        self,
        store: "ExpertStore",
        layers: Sequence[LayerExperts],
        *,
        same_bits: bool,  # whether hot and cold experts give the same
    ) -> None:
        self._store, self.same_bits = store, same_bits
        self._changing: LayerStore | None = None  # the layer of the exchange that was begun last
        self._layers = tuple(
            layer if stored is None else _as_stored(layer, stored)
            for layer, stored in zip(layers, store.layers, strict=True)
        )

    def placement(self) -> ExpertPlacement:
        """Return which experts are hot now."""
        return self._store.residence()

    def layers(self) -> Sequence[LayerExperts]:
        """Return all layers with the bytes that their experts have in the store."""
        return self._layers

    def begin(self, layer: int, promoted: int, demoted: int) -> None:
        """Ask for the copies of two experts of a layer."""
        self._changing = self._store.layers[layer]
        self._layer.begin_exchange(promoted, demoted)

    def ready(self) -> bool:
        """Tell whether the copies are there that were asked for last."""
        return self._layer.exchange_mark.query()

    def wait(self) -> None:
        """Wait for them."""
        self._layer.exchange_mark.synchronize()

    def turn(self) -> None:
        """Let the two change sides and ask for copies to their places."""
        self._layer.turn_exchange()

    def end(self) -> None:
        """Let them be at their places."""
        self._layer.end_exchange()

    @property
    def _layer(self) -> "LayerStore":
        assert self._changing is not None, "only layers with cold experts change"
        return self._changing


def _as_stored(layer: LayerExperts, stored: "LayerStore") -> LayerExperts:
    return replace(layer, expert_bytes=stored.expert_bytes, swap_copies=stored.link_copies)
