"""Swaps: plan_swaps() finds cold experts that should be hot; Swappable lets them change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headroom.experts.placement import Counts, ExpertPlacement, LayerExperts, check_counts, ranked


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


class Swappable(Protocol):
    """Experts that can change places, two at a time; called by the engine's thread alone."""

    @property
    def same_bits(self) -> bool: ...  # hot and cold give the same results, bit by bit

    def placement(self) -> ExpertPlacement: ...  # as it is now

    def layers(self) -> Sequence[LayerExperts]: ...  # of the whole model

    def begin(self, layer: int, promoted: int, demoted: int) -> None:
        """Ask for the copies of two experts; steps may run, and until `turn` nothing changes."""

    def ready(self) -> bool:
        """Tell whether the copies are there that were asked for last."""

    def wait(self) -> None:
        """Wait for them."""

    def turn(self) -> None:
        """Let the two change sides and ask for copies to their places; no step may run."""

    def end(self) -> None:
        """Let them be at their places; steps may run."""


def recent(counts: Counts, used: Sequence[int], tokens: int) -> tuple[tuple[float, ...], ...]:
    """Return counts that are worth at most so many tokens, so that new choices soon matter."""
    scaled = []
    for row, each in zip(counts, used, strict=True):
        total = sum(row)
        share = min(1.0, tokens * each / total) if total else 1.0
        scaled.append(tuple(count * share for count in row))
    return tuple(scaled)
