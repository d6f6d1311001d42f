"""Figures of experts: hits go by the placement that was valid when they were counted."""

import torch

from headroom.experts.placement import ExpertPlacement
from headroom.experts.telemetry import ColdCosts, ColdFigures, ColdMeter, DecodeCounts, HitCounter

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
