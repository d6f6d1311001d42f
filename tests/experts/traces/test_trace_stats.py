"""Statistics of traces, against counting token by token."""

from collections import OrderedDict

import numpy as np
import pytest

from headroom.experts.traces.trace import RoutingTrace, TracedLayer
from headroom.experts.traces.trace_stats import DISTANCES, lru_hit_rates, top_cover, trace_stats
from tests.experts.traces.test_replay import drawn_trace

LAYERS = (TracedLayer(0, 24, 3), TracedLayer(2, 16, 2))


def counted_distances(trace: RoutingTrace) -> list[float]:
    """Return the distances of all choices but those of first tokens, one by one."""
    found: list[float] = []
    for index in range(len(trace.layers)):
        ids = trace.of_layer(index)
        for tokens in trace.sequences():
            last: dict[int, int] = {}
            for token in tokens:
                for expert in map(int, ids[token]):
                    if token != tokens.start:
                        found.append(token - last.get(expert, -(10**9)))
                for expert in map(int, ids[token]):
                    last[expert] = token
    return found


def test_repeats_are_those_of_counting_within_each_sequence() -> None:
    trace = drawn_trace(LAYERS, 90, seed=5)
    assert trace.starts == (0, 45)
    distances, stats = counted_distances(trace), trace_stats(trace)
    assert (stats.tokens, stats.sequences) == (90, 2)
    for most in DISTANCES:
        share = sum(x <= most for x in distances) / len(distances)
        assert stats.repeats[most] == pytest.approx(share)
    assert stats.median_distance == sorted(distances)[(len(distances) - 1) // 2]
    assert 0 < stats.repeats[1] < stats.repeats[8] < stats.repeats[32] <= 1


def test_a_trace_that_never_repeats_has_no_median() -> None:
    ids = np.arange(8, dtype=np.uint16)[:, None]
    stats = trace_stats(RoutingTrace("", "", (TracedLayer(0, 8, 1),), ids, (0, 4)))
    assert stats.median_distance is None
    assert set(stats.repeats.values()) == {0.0}
    assert stats.top_cover == 0.0


def test_the_cover_is_what_one_half_has_of_the_others_favourites() -> None:
    # The halves choose 0 0 1 and 0 1 1: their favourites are 0 and 1.
    ids = np.array([[0], [0], [1], [0], [1], [1]], np.uint16)
    trace = RoutingTrace("", "", (TracedLayer(0, 16, 1),), ids, (0, 3))
    assert top_cover(trace, 1 / 16) == pytest.approx((1 + 1) / 6)
    assert top_cover(trace, 2 / 16) == 1.0


def test_hit_rates_of_empty_lru_caches_are_those_of_a_plain_one() -> None:
    trace = drawn_trace((TracedLayer(0, 24, 1),), 200, seed=7)
    rates = lru_hit_rates(trace, [0.25, 0.5, 1.0])
    for rate, slots in zip(rates, (6, 12, 24), strict=True):
        cache: OrderedDict[int, None] = OrderedDict()
        hits = 0
        for expert in map(int, trace.of_layer(0)[:, 0]):
            hits += expert in cache
            cache[expert] = None
            cache.move_to_end(expert)
            if len(cache) > slots:
                cache.popitem(last=False)
        assert rate == pytest.approx(hits / 200)
    seen = len(set(map(int, trace.ids[:, 0])))
    assert rates[2] == pytest.approx(1 - seen / 200)  # all slots: only first uses miss
