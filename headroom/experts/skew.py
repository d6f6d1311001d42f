"""Skew: how unevenly a layer's experts are chosen."""

from collections.abc import Sequence
from dataclasses import dataclass

SHARES = (0.1, 0.3, 0.6)  # of a layer's experts, the most chosen ones


@dataclass(frozen=True, slots=True)
class LayerSkew:
    """The choices of one layer."""

    layer: int
    experts: int
    choices: float
    top: tuple[float, ...]  # share of choices that the most chosen SHARES of experts get


def top_experts(experts: int, share: float) -> int:
    """Return how many experts a share of them is: at least one."""
    return max(1, round(share * experts))


def measure_skew(counts: Sequence[Sequence[float]]) -> list[LayerSkew]:
    """Return the skew of every layer that chose anything."""
    found = []
    for layer, row in enumerate(counts):
        total, ordered = sum(row), sorted(row, reverse=True)
        if total:
            top = tuple(sum(ordered[: top_experts(len(row), x)]) / total for x in SHARES)
            found.append(LayerSkew(layer, len(row), total, top))
    return found
