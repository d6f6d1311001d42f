"""Statistics of a routing trace: when experts are chosen again, and how evenly they are chosen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headroom.experts.traces.replay import LayerCaches, most_chosen, split_halves, step_picks
from headroom.experts.traces.trace import RoutingTrace

DISTANCES = (1, 2, 4, 8, 16, 32)  # tokens
TOP_SHARE = 1 / 16  # of the experts: the list that shows whether some are popular everywhere


@dataclass(frozen=True, slots=True)
class TraceStats:
    """What a trace's layers do on average; the first token of a sequence is left out."""

    tokens: int
    sequences: int
    # Share of choices of which the same sequence has made use at most so many tokens before.
    repeats: dict[int, float]  # by the distance
    median_distance: int | None  # tokens between two uses; None if most choices are first ones
    # Share of one half's choices that go to the experts that the other half chose most often, as
    # many as TOP_SHARE of a layer.
    top_cover: float

    def summary(self) -> str:
        """Return the main figures in one line."""
        return (
            f"{100 * self.repeats[1]:.0f} % of a token's experts were chosen by the token before, "
            f"{100 * self.repeats[8]:.0f} % within eight tokens; the top 1/16 of one half takes "
            f"{100 * self.top_cover:.0f} % of the other"
        )


def trace_stats(trace: RoutingTrace) -> TraceStats:
    """Measure a trace."""
    far = trace.tokens + 1
    counts = np.zeros(far + 1, np.int64)  # of choices, by the distance to the use before
    for index in range(len(trace.layers)):
        counts += np.bincount(_distances(trace, index), minlength=far + 1)
    counts[0] = 0
    total = max(1, int(counts.sum()))
    within = np.cumsum(counts) / total
    median = int(np.searchsorted(within, 0.5))
    return TraceStats(
        tokens=trace.tokens,
        sequences=len(trace.starts),
        repeats={x: float(within[min(x, far - 1)]) for x in DISTANCES},
        median_distance=None if median >= far else median,
        top_cover=top_cover(trace, TOP_SHARE),
    )


def top_cover(trace: RoutingTrace, share: float) -> float:
    """Return how much of each half goes to the other half's most frequent `share` of experts."""
    slots = [max(1, round(share * layer.experts)) for layer in trace.layers]
    halves, covered, picks = split_halves(trace), 0, 0
    for own, other in (halves, (halves[1], halves[0])):
        for index, chosen in enumerate(most_chosen(other, slots)):
            ids = own.of_layer(index)
            covered += int(np.isin(ids, chosen).sum())
            picks += ids.size
    return covered / picks


def lru_hit_rates(trace: RoutingTrace, shares: Sequence[float]) -> list[float]:
    """Return the hit rates of LRU caches that begin empty, for shares of experts with slots."""
    layers, residents, picked = [], [], []
    for share in shares:
        for index, layer in enumerate(trace.layers):
            # Slots begin with experts that nobody chooses.
            slots = round(share * layer.experts)
            layers.append(replace(layer, experts=layer.experts + slots))
            residents.append(range(layer.experts, layer.experts + slots))
            picked.append(trace.of_layer(index))
    wide = replace(trace, layers=tuple(layers), ids=np.concatenate(picked, axis=1))
    caches = LayerCaches("lru", wide.layers, residents)
    for block in step_picks(wide, 1):
        for step in block:
            caches.resolve(step)
    counts, each = caches.counts(), len(trace.layers)
    parts = [counts[begin : begin + each] for begin in range(0, len(counts), each)]
    return [sum(x.hits for x in part) / sum(x.picks for x in part) for part in parts]


def _distances(trace: RoutingTrace, index: int) -> npt.NDArray[np.int64]:
    """Return, for each choice of a layer, the tokens since its sequence's last use of the expert.

    `tokens + 1` stands for a first use, and 0 for a choice of the first token of a sequence.
    """
    ids = trace.of_layer(index).astype(np.int64)
    tokens = np.arange(trace.tokens)
    sequence = np.searchsorted(trace.starts, tokens, side="right") - 1
    # Uses of one expert by one sequence stand together, in the order of tokens.
    keys = (sequence[:, None] * trace.layers[index].experts + ids).ravel()
    order = np.argsort(keys, kind="stable")
    at = np.repeat(tokens, ids.shape[1])[order]
    same = keys[order][1:] == keys[order][:-1]
    ordered = np.full(len(at), trace.tokens + 1, np.int64)
    ordered[1:][same] = (at[1:] - at[:-1])[same]
    distances = np.empty_like(ordered)
    distances[order] = ordered
    distances.reshape(ids.shape)[list(trace.starts)] = 0
    return distances
