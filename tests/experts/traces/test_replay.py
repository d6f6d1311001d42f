"""Replays of traces: on arrays, every layer's cache does what CacheModel says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.experts.cache import POLICIES, CacheModel, Policy
from headroom.experts.traces.replay import (
    LayerCaches,
    ReplaySettings,
    most_chosen,
    replay,
    replay_halves,
    split_halves,
    step_picks,
)
from headroom.experts.traces.trace import RoutingTrace, TracedLayer


@st.composite
def traces(draw: st.DrawFn) -> RoutingTrace:
    """Up to three layers with different numbers of experts, and up to 40 tokens."""
    layers = []
    for number in range(draw(st.integers(1, 3))):
        experts = draw(st.integers(1, 10))
        layers.append(TracedLayer(2 * number, experts, draw(st.integers(1, min(4, experts)))))
    seeds, tokens = draw(st.integers(0, 2**32 - 1)), draw(st.integers(2, 40))
    return drawn_trace(tuple(layers), tokens, seeds)


def drawn_trace(layers: tuple[TracedLayer, ...], tokens: int, seed: int) -> RoutingTrace:
    """Return a trace whose tokens repeat about half of their picks."""
    rng = np.random.default_rng(seed)
    liking = [rng.normal(size=layer.experts) for layer in layers]
    rows = []
    for _ in range(tokens):
        row: list[int] = []
        for layer, like in zip(layers, liking, strict=True):
            order = np.argsort(-(like + rng.normal(size=layer.experts)))
            row += order[: layer.used].tolist()
        rows.append(row)
    ids = np.array(rows, np.uint16)
    return RoutingTrace("", "drawn", layers, ids, (0, tokens // 2) if tokens > 3 else (0,))


def steps_of(trace: RoutingTrace, index: int, sequences: int) -> list[list[list[int]]]:
    """Return the picks `[steps][rows][used]` of one layer, token by token."""
    steps = trace.tokens // sequences
    ids = trace.of_layer(index).tolist()
    return [[ids[row * steps + step] for row in range(sequences)] for step in range(steps)]


@st.composite
def links(draw: st.DrawFn) -> tuple[int, ...] | None:
    most = draw(st.integers(0, 6))
    table = st.tuples(*(st.integers(0, n) for n in range(most + 1)))
    return draw(st.none() | table)


@given(traces(), st.sampled_from(POLICIES), st.integers(1, 5), links(), st.data())
def test_every_layer_does_what_the_model_of_a_cache_does(
    trace: RoutingTrace,
    policy: Policy,
    sequences: int,
    link: tuple[int, ...] | None,
    data: st.DataObject,
) -> None:
    sequences = min(sequences, trace.tokens)
    residents, pinned = [], []
    for layer in trace.layers:
        everyone = range(layer.experts)
        residents.append(sorted(data.draw(st.sets(st.sampled_from(everyone)))))
        some = st.sets(st.sampled_from(residents[-1])) if residents[-1] else st.just(set())
        pinned.append(sorted(data.draw(some)))
    caches = LayerCaches(policy, trace.layers, residents, pinned)
    models = [
        CacheModel.start(policy, layer.experts, own, fixed)
        for layer, own, fixed in zip(trace.layers, residents, pinned, strict=True)
    ]
    rows = [steps_of(trace, index, sequences) for index in range(len(trace.layers))]
    number = 0
    for block in step_picks(trace, sequences):
        for step in block:
            caches.resolve(step, link)
            for model, own in zip(models, rows, strict=True):
                model.resolve(own[number], link)
            number += 1
            assert caches.residents() == [sorted(model.slots) for model in models]
    assert number == trace.tokens // sequences
    assert list(caches.counts()) == [model.counts for model in models]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_replay_of_a_true_size_equals_the_model_of_a_cache(policy: Policy) -> None:
    layers = (TracedLayer(0, 256, 8), TracedLayer(1, 128, 8))
    trace, link = drawn_trace(layers, 300, seed=3), (0, 1, 1, 2, 2, 3, 3)
    residents = most_chosen(trace, [100, 30])
    for sequences, table in ((1, None), (4, link)):
        found = replay(trace, residents, ReplaySettings(policy, sequences, table))
        for index, layer in enumerate(layers):
            model = CacheModel.start(policy, layer.experts, residents[index])
            for picks in steps_of(trace, index, sequences):
                model.resolve(picks, table)
            assert found.counts[index] == model.counts
    assert found.slots == (100, 30)
    assert found.tokens == 300


def test_figures_of_a_replay_are_sums_over_layers_and_tokens() -> None:
    # Two tokens: the first misses expert 2 in layer 0; the second finds it, and misses 1 and 3.
    layers = (TracedLayer(0, 4, 2), TracedLayer(3, 4, 1))
    ids = np.array([[0, 2, 0], [2, 1, 3]], np.uint16)
    trace = RoutingTrace("", "", layers, ids, (0,))
    found = replay(trace, [[0, 1], [0]], ReplaySettings("lru", link=(0, 1)))
    assert [one.hits for one in found.counts] == [2, 1]
    assert found.hit_rate == pytest.approx(3 / 6)
    assert found.layer_hit_rates == (0.5, 0.5)
    assert found.misses == found.linked == found.filled == pytest.approx(3 / 4)
    assert found.bytes_per_token([10, 100]) == {"link": (2 * 10 + 100) / 2, "cpu": 0.0}
    by_cpu = replay(trace, [[0, 1], [0]], ReplaySettings("static", link=(0, 0)))
    assert by_cpu.bytes_per_token([10, 100]) == {"link": 0.0, "cpu": (2 * 10 + 100) / 2}
    assert (by_cpu.linked, by_cpu.filled) == (0.0, 0.0)


def test_a_trace_is_cut_where_a_sequence_begins_near_its_middle() -> None:
    layers = (TracedLayer(0, 4, 1),)
    ids = np.arange(10, dtype=np.uint16)[:, None] % 4
    for starts, cut in (((0, 6), 6), ((0, 1), 5), ((0,), 5), ((0, 4, 9), 4)):
        one, other = split_halves(RoutingTrace("m", "s", layers, ids, starts))
        assert (one.tokens, other.tokens) == (cut, 10 - cut)
        assert np.array_equal(np.concatenate([one.ids, other.ids]), ids)
        assert one.starts[0] == other.starts[0] == 0
    assert (one.starts, other.starts) == ((0,), (0, 5))


def test_each_half_starts_with_what_the_other_half_chose() -> None:
    layers = (TracedLayer(0, 6, 1),)
    ids = np.array([[0], [0], [1], [3], [3], [3], [1], [4]], np.uint16)
    trace = RoutingTrace("", "", layers, ids, (0, 4))
    # The first half chose 0, 1 (before 3, which is as frequent); the second one 3, 1.
    assert most_chosen(split_halves(trace)[0], [2]) == ((0, 1),)
    assert most_chosen(split_halves(trace)[1], [2]) == ((1, 3),)
    found = replay_halves(trace, [2], ReplaySettings("static"))
    assert found.counts[0].hits == 2 + 1  # 1 and 3 of the first half, 1 of the second one
    assert (found.tokens, found.counts[0].steps, found.counts[0].picks) == (8, 8, 8)
