"""Made-up traces: their statistics are the published ones, and a seed gives the same file."""

from collections.abc import Sequence

import numpy as np
import pytest

from headroom.experts.cache import POLICIES, Policy, policies_for
from headroom.experts.traces.replay import ReplaySettings, replay_halves
from headroom.experts.traces.synth_trace import PRESETS, Drift, RoutingModel, synth_trace
from headroom.experts.traces.trace import RoutingTrace, TracedLayer, check_ids
from headroom.experts.traces.trace_stats import lru_hit_rates, top_cover, trace_stats

WITHIN = 0.03  # of what was published, as docs/routing-traces.md says


def drawn(
    preset: str, experts: int, used: int, tokens: int, sequences: int, layers: int = 2
) -> RoutingTrace:
    own = [TracedLayer(layer, experts, used) for layer in range(layers)]
    model = PRESETS[preset].model
    return synth_trace(own, model, tokens=tokens, sequences=sequences, seed=4)


def near(found: float, published: float, within: float = WITHIN) -> bool:
    return abs(found - published) <= within


def all_near(found: Sequence[float], published: Sequence[float], within: float = WITHIN) -> bool:
    return all(near(a, b, within) for a, b in zip(found, published, strict=True))


@pytest.fixture(scope="module")
def of_qwen3() -> RoutingTrace:
    return drawn("qwen3-30b-a3b", 128, 8, tokens=3072, sequences=8)


def test_a_trace_like_qwen3_30b_a3b_repeats_as_was_published(of_qwen3: RoutingTrace) -> None:
    stats = trace_stats(of_qwen3)
    assert near(stats.repeats[1], 0.45)
    assert near(stats.repeats[8], 0.80)
    assert stats.median_distance == 2


def test_its_cache_of_recent_experts_misses_a_quarter_of_what_a_static_set_misses(
    of_qwen3: RoutingTrace,
) -> None:
    recent = lru_hit_rates(of_qwen3, [0.4])[0]
    assert 0.90 <= recent <= 0.95
    static = top_cover(of_qwen3, 0.4)  # of other documents
    assert 4.0 <= (1 - static) / (1 - recent) <= 5.0


def test_a_trace_like_qwen38_flash_next_has_no_static_skew_and_hits_as_was_published() -> None:
    trace = drawn("qwen3.8-flash-next", 512, 10, tokens=2000, sequences=4)
    assert near(trace_stats(trace).top_cover, 0.10)
    assert all_near(lru_hit_rates(trace, [64 / 512, 128 / 512]), [0.67, 0.81])


def test_a_short_trace_like_qwen38_flash_next_hits_as_was_published() -> None:
    trace = drawn("qwen3.8-flash-next-short", 512, 10, tokens=300, sequences=1, layers=6)
    shares = [slots / 512 for slots in (93, 186, 279, 372, 512)]
    # Every layer was fitted at once; 0.04 is the largest distance.
    published = [0.435, 0.62, 0.72, 0.789, 0.85]
    assert all_near(lru_hit_rates(trace, shares), published, within=0.04)


def test_uniform_choices_have_neither_skew_nor_memory() -> None:
    trace = drawn("uniform", 64, 4, tokens=2000, sequences=2)
    assert near(trace_stats(trace).repeats[1], 4 / 64, 0.01)
    assert near(top_cover(trace, 0.5), 0.5, 0.02)


def test_skewed_choices_go_to_the_same_experts_in_every_document() -> None:
    trace = drawn("skewed", 256, 8, tokens=3000, sequences=4)
    assert near(top_cover(trace, 0.6), 0.90)


def hit_rates(preset: str, slots: int) -> dict[Policy, float]:
    """Return what each policy hits on text that no placement has seen."""
    native = PRESETS[preset]
    trace = drawn(preset, native.experts, native.used, tokens=2000, sequences=4)
    return {
        policy: replay_halves(trace, [slots] * 2, ReplaySettings(policy)).hit_rate
        for policy in POLICIES
    }


def test_eleven_slots_of_deepseek_v4_flash_thrash_where_a_list_hits_as_was_published() -> None:
    rates = hit_rates("deepseek-v4-flash", 11)
    assert near(rates["static"], 0.46)
    assert rates["static"] == max(rates.values())
    assert rates["lru"] == min(rates.values())
    assert rates["lru"] < 0.7 * rates["static"]
    # So few slots leave an engine no other policy.
    assert policies_for(11, PRESETS["deepseek-v4-flash"].used) == ("static",)


def test_sparing_slots_with_many_hits_beats_plain_lru_as_of_laguna_s_21() -> None:
    for slots in (40, 52):
        rates = hit_rates("laguna-s-2.1", slots)
        assert rates["spare"] > rates["lru"] + 0.01
        assert min(rates["spare"], rates["lru"]) > rates["static"]


@pytest.mark.parametrize("preset", ["qwen3-30b-a3b", "qwen3.8-flash-next"])
def test_a_preset_hits_alike_where_the_same_share_of_more_or_fewer_experts_has_slots(
    preset: str,
) -> None:
    native = PRESETS[preset]
    rates = [
        lru_hit_rates(drawn(preset, experts, used, tokens=2000, sequences=4), [0.25, 0.4])
        for experts, used in ((native.experts, native.used), (256, 8))
    ]
    assert all_near(rates[1], rates[0], within=0.06)


def test_equal_seeds_give_equal_traces_and_other_seeds_other_ones() -> None:
    layers = [TracedLayer(1, 16, 2), TracedLayer(2, 32, 4), TracedLayer(5, 16, 2)]
    model = RoutingModel(0.1, 0.2, (Drift(0.3, 9.0),))
    one, same, other = (
        synth_trace(layers, model, tokens=50, sequences=3, seed=seed) for seed in (0, 0, 1)
    )
    assert np.array_equal(one.ids, same.ids)
    assert not np.array_equal(one.ids, other.ids)
    assert one.layers == tuple(layers)
    assert one.starts == (0, 16, 33)
    assert not np.array_equal(one.of_layer(0), one.of_layer(2))  # layers are drawn apart
    check_ids(one)


def test_the_first_token_of_a_document_forgets_the_document_before() -> None:
    layers = [TracedLayer(layer, 64, 4) for layer in range(30)]
    kept = RoutingModel(document=1.0)  # all tokens of a document choose alike
    trace = synth_trace(layers, kept, tokens=40, sequences=2)
    assert (trace.ids[:20] == trace.ids[0]).all()
    assert (trace.ids[20:] == trace.ids[20]).all()
    both = [set(trace.of_layer(x)[0]) & set(trace.of_layer(x)[20]) for x in range(30)]
    assert np.mean([len(x) for x in both]) < 1  # 4 of 64 by chance: 0.25


def test_the_best_expert_comes_first() -> None:
    ids = synth_trace([TracedLayer(0, 32, 4)], RoutingModel(popular=0.95), tokens=300).ids
    # The one that is best in most tokens is the surest: fewer experts change places with it.
    found = [len(set(ids[:, rank].tolist())) for rank in range(4)]
    assert found[0] < found[1] < found[3]


def test_a_layer_whose_tokens_use_all_experts_has_all_of_them() -> None:
    ids = synth_trace([TracedLayer(0, 4, 4)], RoutingModel(), tokens=20).ids
    assert (np.sort(ids, axis=1) == np.arange(4)).all()
