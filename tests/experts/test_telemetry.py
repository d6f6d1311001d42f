"""Figures of experts: hits go by the placement that was valid when they were counted."""

import torch

from headroom.experts.placement import ExpertPlacement
from headroom.experts.telemetry import (
    HIT_CAUSES,
    CacheTotals,
    ColdCosts,
    ColdFigures,
    ColdMeter,
    ColdPaces,
    DecodeCounts,
    HitCounter,
    cache_totals,
)
from headroom.kernels.cuda.expert_cache import COUNTERS

NONE = torch.zeros(1, 3, dtype=torch.int64)  # in steps of few rows


def placed(*hot: tuple[int, ...]) -> ExpertPlacement:
    return ExpertPlacement(hot, "even")


def test_without_a_placement_all_experts_are_hot() -> None:
    counter = HitCounter((2, 0), 3)
    counter.count(torch.tensor([[4, 2, 2], [0, 0, 0]]), NONE)
    found = counter.reading()
    assert (found.hit_rate, found.layer_hit_rates, found.cold_picks) == (1.0, (1.0, None), 0)
    assert found.tokens == 4


def test_hits_go_by_the_placement_of_their_time() -> None:
    counter = HitCounter((0, 1), 3)
    counter.set_placement(placed((), (0,)))
    counter.count(torch.tensor([[0, 0, 0], [3, 1, 0]]), NONE)
    counter.set_placement(placed((), (1,)))  # after an exchange
    counter.count(torch.tensor([[0, 0, 0], [5, 5, 0]]), NONE)
    found = counter.reading()
    assert (found.picks, found.hits) == ((0, 10), (0, 3 + 4))
    assert (found.layer_hit_rates, found.hit_rate, found.cold_picks) == ((None, 0.7), 0.7, 3)
    assert found.summary()["layer_hit_rates"] == [None, 0.7]
    assert found.tokens == 10


def test_before_the_first_choice_there_is_no_rate() -> None:
    found = HitCounter((2,), 3).reading()
    assert (found.hit_rate, found.tokens) == (None, 0)
    assert found.summary()["hit_rate"] is None


def test_the_figures_of_a_time_are_what_was_added_in_it() -> None:
    counts = [
        DecodeCounts(cpu_bytes=0, gpu_bytes=gpu, hot_s=0.5, cold_s=0.25, wait_s=wait)
        for gpu, wait in ((7, 1.0), (1007, 1.5))
    ]
    meter = ColdMeter(lambda: counts.pop(0))
    counter = HitCounter((1,), 3)
    counter.set_placement(placed((0,)))
    counter.count(torch.tensor([[6, 2, 0]]), NONE)
    earlier = counter.reading(meter, exchanges=1)
    counter.count(torch.tensor([[7, 5, 0]]), NONE)
    found = counter.reading(meter, exchanges=2).since(earlier)
    assert found.summary() == {
        "hit_rate": 0.25,
        "layer_hit_rates": [0.25],
        "cold_picks": 3,
        "cold_bytes_per_token": {"gpu": 250, "cpu": 0},
        "ms": {"hot": 0.0, "cold": 0.0, "wait": 500.0},
        "swaps": 1,
        "hits_by": {"pinned": 1, "cached": 0, "prefetched": 0},
        "misses_by": {"filled": 0, "in_place": 0, "cpu": 0},
    }


def test_the_meter_adds_up_all_who_compute_cold_experts() -> None:
    assert ColdMeter().figures() == ColdFigures({}, {})
    counts = DecodeCounts(cpu_bytes=5, gpu_bytes=6, hot_s=1.0, cold_s=2.0, wait_s=3.0)
    stream = ColdCosts(streamed_bytes=4, cpu_bytes=10, cpu_s=0.5)
    plain = ColdCosts(streamed_bytes=3, cpu_bytes=20, cpu_s=0.25)
    found = ColdMeter(lambda: counts, (stream, plain)).figures()
    assert found.read_bytes == {"gpu": 6, "cpu": 5, "stream": 7}
    assert found.seconds == {"hot": 1.0, "cold": 2.0, "wait": 3.0}
    # What the CPU does in prefill steps is added to what it does in decode steps.
    both = ColdMeter(lambda: counts, (stream, plain), cpu_costs=True).figures()
    assert both.read_bytes == {"gpu": 6, "cpu": 35, "stream": 7}
    assert both.seconds == {"hot": 1.0, "cold": 2.75, "wait": 3.0}
    assert ColdMeter(costs=(stream,)).figures() == ColdFigures({"stream": 4})
    alone = ColdMeter(costs=(stream,), cpu_costs=True, copies_s=lambda: 0.125).figures()
    assert alone == ColdFigures({"cpu": 10, "stream": 4}, {"cold": 0.5, "copies": 0.125})


def test_picks_of_a_long_run_are_counted_to_the_last_one() -> None:
    many = (1 << 53) + 1  # float64 has no such number, and float32 none above 2 ** 24
    counter = HitCounter((1,), 3)
    counter.set_placement(placed((0,)))
    counter.count(torch.tensor([[many, 1, 0]]), torch.tensor([[0, many, 0]]))
    found = counter.reading(ColdMeter(pick_bytes=(1,)))
    assert (found.picks, found.hits) == ((many + 1,), (many,))
    assert found.cold_bytes == {"gpu": many}
    assert all(type(number) is int for number in (*found.picks, *found.hits))


def test_a_move_promotes_one_expert_and_demotes_another() -> None:
    counter = HitCounter((1, 1), 3)
    counter.set_placement(placed((0,), (0,)))
    counter.move(1, promoted=2, demoted=0)
    counts = torch.tensor([[1, 10, 100], [1, 10, 100]])
    counter.count(counts, counts)
    found = counter.reading(ColdMeter(pick_bytes=(1, 1000)))
    assert found.hits == (1, 100)
    assert found.cold_bytes == {"gpu": 110 + 11_000}


def counters(*rows: dict[str, int]) -> CacheTotals:
    """Return the totals of layers with these counters; others are 0."""
    counts = torch.tensor([[row.get(name, 0) for name in COUNTERS] for row in rows])
    return cache_totals(counts, COUNTERS)


def test_the_counters_of_a_cache_say_why_experts_were_hits() -> None:
    row = {"steps": 4, "picks": 30, "hits": 20, "linked": 7, "filled": 5}
    found = counters({}, row | {"pinned_hits": 11, "prefetched_hits": 3})
    assert (found.used, found.hits) == ((False, True), (0, 20))
    assert (found.linked, found.filled) == ((0, 7), (0, 5))
    assert found.causes[1] == {"pinned": 11, "cached": 6, "prefetched": 3}


def test_hits_and_misses_of_layers_with_and_without_a_cache_add_up() -> None:
    # The first layer has a cache and never asks the CPU; of the second the GPU reads all; the third
    # asks the CPU, and its reads are counted by the worker.
    row = {"steps": 6, "picks": 9, "hits": 7, "linked": 2, "filled": 1}
    cache = counters(row | {"pinned_hits": 2}, {}, {})
    work = DecodeCounts(
        cpu_bytes=500, gpu_bytes=300, hot_s=0.0, cold_s=0.0, wait_s=0.0, linked=3, by_cpu=5
    )
    meter = ColdMeter(
        lambda: work, pick_bytes=(0, 10, 0), cache=lambda: cache, cache_bytes=(7, 0, 0)
    )
    counter = HitCounter((1, 1, 1), 3)
    counter.set_placement(placed((0,), (0,), (0,)))
    decode = torch.tensor([[4, 4, 1], [5, 2, 2], [9, 0, 0]])
    counter.count(decode + torch.tensor([[3, 0, 1]]), decode)
    found = counter.reading(meter)
    assert found.picks == (13, 13, 13)
    # 3 hits of prompts in each, and of decode steps those of the cache, or of the placement.
    assert found.hits == (3 + 7, 3 + 5, 3 + 9)
    assert found.causes == {"pinned": 2 + 8 + 12, "cached": 3 + 5, "prefetched": 0}
    assert sum(found.causes.values()) == sum(found.hits)
    assert list(found.causes) == list(HIT_CAUSES)
    assert found.misses == {"filled": 1, "in_place": 2 - 1 + 4 + 3, "cpu": 5}
    assert found.cold_bytes == {"gpu": 300 + 4 * 10 + 2 * 7, "cpu": 500}


def test_how_cold_experts_are_shared_is_told_as_it_is_now() -> None:
    paces = [ColdPaces(0.6, 1.0, 1.0, 1.0), ColdPaces(0.25, 0.5, 1 / 3, 0.9)]
    meter = ColdMeter(paces=lambda: paces.pop(0))
    counter = HitCounter((1,), 3)
    earlier = counter.reading(meter)
    told = counter.reading(meter).since(earlier).summary()
    assert {name: told[name] for name in ("cpu_share", "cpu_pace", "link_pace")} == {
        "cpu_share": 0.25,
        "cpu_pace": 0.5,
        "link_pace": 0.9,
    }
    assert told["cpu_pace_in_prompts"] == 0.3333
    assert "cpu_share" not in counter.reading().summary()
