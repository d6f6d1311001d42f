"""Experts of several stages look like those of one model."""

import pytest
import torch

from headroom.experts.joined import join_meters, join_routing, join_stores
from headroom.experts.stats import RoutingStats
from headroom.experts.telemetry import (
    HIT_CAUSES,
    CacheTotals,
    ColdCosts,
    ColdMeter,
    ColdPaces,
    DecodeCounts,
    PolicyState,
)
from tests.experts.stores import blob_layout, small_store


def test_one_stage_is_not_joined_and_none_is_none() -> None:
    routing, meter = RoutingStats(2, 4, "cpu"), ColdMeter()
    store = small_store([blob_layout(4)], [(0,)])
    assert join_routing([routing]) is routing
    assert join_stores([store]) is store
    assert join_meters([meter]) is meter
    assert join_routing([]) is join_stores([]) is join_meters([]) is None


def test_the_counts_of_all_stages_are_those_of_the_model() -> None:
    parts = [RoutingStats(3, 4, "cpu") for _ in range(2)]
    parts[0].of_layer(0).decode[1] += 5
    parts[1].of_layer(2).decode[3] += 7
    parts[1].of_layer(2).prefill[0] += 2
    routing = join_routing(parts)
    assert routing is not None
    every, decode = routing.counts_with_decode()
    assert every.tolist() == [[0, 5, 0, 0], [0] * 4, [2, 0, 0, 7]]
    assert decode.tolist() == [[0, 5, 0, 0], [0] * 4, [0, 0, 0, 7]]
    assert torch.equal(routing.counts(), every)


def test_each_layer_is_in_the_store_of_its_stage() -> None:
    layout = blob_layout(4)
    first = small_store([layout, None, None], [(1, 2), (), ()])
    second = small_store([None, None, layout], [(), (), (3,)])
    store = join_stores([first, second])
    assert store is not None
    assert store.layers == (first.layers[0], None, second.layers[2])
    assert store.current_placement().hot == ((1, 2), (), (3,))
    assert store.cold_bytes == first.cold_bytes + second.cold_bytes > 0
    assert store.source == "drawn"
    assert not store.is_cached


def test_the_costs_of_all_stages_are_added() -> None:
    counts = DecodeCounts(
        cpu_bytes=100, gpu_bytes=10, hot_s=1.0, wait_s=2.0, cold_s=3.0, linked=4, by_cpu=5
    )
    asking = ColdMeter(
        worker=lambda: counts,
        costs=(ColdCosts(streamed_bytes=7, cpu_bytes=1, cpu_s=0.5),),
        cpu_costs=True,
        copies_s=lambda: 0.25,
        paces=lambda: ColdPaces(cpu_share=0.5, cpu=1.0, cpu_prompts=0.8, link=1.0),
    )
    reading = ColdMeter(
        pick_bytes=(0, 80),
        copies_s=lambda: 0.5,
        paces=lambda: ColdPaces(cpu_share=0.25, cpu=0.5, cpu_prompts=0.4, link=0.5),
    )
    meter = join_meters([asking, asking, reading])
    assert meter is not None
    one, whole = asking.figures(), meter.read()
    both = whole.figures
    assert both.read_bytes == {name: 2 * size for name, size in one.read_bytes.items()}
    assert both.seconds["cold"] == 2 * one.seconds["cold"]
    assert both.seconds["copies"] == pytest.approx(1.0)
    assert (both.linked, both.by_cpu) == (8, 10)
    assert whole.pick_bytes == (0, 80)
    assert whole.paces is not None
    assert whole.paces.cpu_share == pytest.approx((0.5 + 0.5 + 0.25) / 3)


def test_a_meter_that_counts_nothing_has_no_figures() -> None:
    meter = join_meters([ColdMeter(), ColdMeter()])
    assert meter is not None
    assert meter.read() == ColdMeter().read()


def test_the_caches_of_all_stages_are_those_of_the_model() -> None:
    def totals(*layers: int) -> CacheTotals:
        """Each number is what one layer counts; a layer without a cache has 0."""
        return CacheTotals(
            used=tuple(bool(count) for count in layers),
            hits=layers,
            causes=tuple(dict.fromkeys(HIT_CAUSES, count) for count in layers),
            linked=tuple(2 * count for count in layers),
            filled=tuple(3 * count for count in layers),
        )

    first, second = totals(5, 0), totals(0, 7)
    meter = join_meters([ColdMeter(cache=lambda: first), ColdMeter(cache=lambda: second)])
    assert meter is not None
    assert meter.read().cache == totals(5, 7)


def test_policies_that_differ_are_all_told() -> None:
    def meter(policy: str, **rates: float) -> ColdMeter:
        return ColdMeter(policy=lambda: PolicyState(policy, rates))  # type: ignore[arg-type]

    def joined(*parts: ColdMeter) -> PolicyState:
        whole = join_meters(parts)
        assert whole is not None
        policy = whole.read().policy
        assert policy is not None
        return policy

    one, other = meter("lru", lru=0.9, static=0.5), meter("static", lru=0.6, static=0.7)
    assert joined(one, other).policy == "lru, static"
    assert joined(one, other).hit_rates == pytest.approx({"lru": 0.75, "static": 0.6})
    assert joined(one, one).policy == "lru"
    assert joined(one, meter("counts")).hit_rates == {"lru": 0.9, "static": 0.5}
    assert joined(meter("lru"), meter("lru")) == PolicyState("lru", {})
