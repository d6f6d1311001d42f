"""The cost model: who computes cold experts, by the seconds that each way takes."""

from dataclasses import replace
from itertools import pairwise
from math import exp, log

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headroom.kernels.native.measure import EXPERTS, HIDDEN, WIDTH, expert_bytes
from headroom.kernels.native.module import MODULE
from headroom.machine.calibration import Speeds, with_speeds
from headroom.machine.devices import DeviceSpec
from headroom.plan import cost_model
from headroom.plan.cost_model import (
    CALIBRATED_VALUE_BYTES,
    EXCHANGE_HORIZON_TOKENS,
    HOT_KERNELS_S,
    PREFILL_HANDOVER_S,
    ColdLayer,
    ColdSpeeds,
    DecodeChoice,
    ExpertSize,
    best_in_place,
    choose_decode,
    cold_speeds_of,
    compute_rate,
    decode_seconds,
    decode_speeds,
    exchange_saves_seconds,
    exchange_speeds,
    exchange_takes_seconds,
    expected_counts,
    expert_operations,
    layer_read_seconds,
    left_to_cpu,
    link_shares,
    memory_rate,
    most_counted_rows,
    pays_to_count,
    prefill_speeds,
    row_seconds,
    token_operations,
)
from headroom.plan.shape import LayerShape
from tests.plan.shapes import cpu, gpu, host, settings

SPEEDS = ColdSpeeds(gpu=1e12, link=4e10, cpu=6e10, handover_s=1e-5, copy=5e10)


FULL = LayerShape(
    kind="full", core_bytes=1000, core_values=2000, query_heads=8, kv_heads=2, key_dim=32,
    value_dim=32,
)  # fmt: skip
TOKEN = 2 * (32 + 32) * 2  # bytes of one token's keys and values in FULL, in f16
HALF = 4096  # tokens of a context of 8192 that is half full
RECURRENT = LayerShape(
    kind="recurrent", core_bytes=500, core_values=600, state_values=100, conv_values=20
)
ROUTED = replace(FULL, experts=8, experts_used=2, expert_bytes=64, expert_values=100)
PLAIN_CPU, NATIVE_CPU = cpu(8), replace(cpu(8), native=True)


@pytest.mark.parametrize(
    ("layer", "device", "changes", "moved"),
    [
        (FULL, gpu(8), {}, 1000 + HALF * TOKEN),
        (FULL, gpu(8), {"k_type": "q8_0"}, 1000 + HALF * 2 * (34 + 64)),
        (replace(FULL, kind="window", window=100), gpu(8), {}, 1000 + 100 * TOKEN),
        # The cache of another layer is read as well.
        (replace(FULL, owns_kv=False), gpu(8), {}, 1000 + HALF * TOKEN),
        (RECURRENT, gpu(8), {}, 500 + 2 * 120 * 4),
        (RECURRENT, NATIVE_CPU, {"kernels": "native"}, 500 + 2 * 120 * 4),
        # Reference kernels write unpacked values and read them again.
        (RECURRENT, PLAIN_CPU, {}, 500 + 2 * 120 * 4 + 2 * 600 * 4),
        (RECURRENT, NATIVE_CPU, {"kernels": "reference"}, 500 + 2 * 120 * 4 + 2 * 600 * 4),
        (RECURRENT, PLAIN_CPU, {"weights": "unpacked"}, 600 * 4 + 2 * 120 * 4),
        (ROUTED, gpu(8), {}, 1000 + HALF * TOKEN + 2 * 64),
    ],
)
def test_a_token_reads_weights_half_a_context_and_states_at_the_speed_of_memory(
    layer: LayerShape, device: DeviceSpec, changes: dict[str, object], moved: int
) -> None:
    asked = settings(kernels="cuda") if device.kind == "cuda" else settings()
    asked = replace(asked, **changes)  # type: ignore[arg-type]
    rate = device.bandwidth
    assert layer_read_seconds(layer, replace(device, measured=True), asked) == moved / rate
    assert layer_read_seconds(layer, device, asked) == pytest.approx(moved / rate / 0.7)


def test_a_cpu_takes_the_longer_of_reading_packed_weights_and_of_making_them_floats() -> None:
    # 600 values in 500 bytes; the calibrated experts have 498 bytes for 768 values.
    asked, states = settings(kernels="native"), 2 * 120 * 4
    cpu = replace(NATIVE_CPU, measured=True, bandwidth=1e9)
    for experts, read_s in ((1e9, 500e-9), (1e8, 600 * 498 / 768 * 1e-8), (0.0, 500e-9)):
        device = replace(cpu, experts=experts)
        found = layer_read_seconds(RECURRENT, device, asked)
        assert found == pytest.approx(read_s + states * 1e-9)
    slow = replace(cpu, experts=1e8)
    for other in ({"compute_type": "int8"}, {"weights": "unpacked"}, {"kernels": "reference"}):
        changed = replace(asked, **other)  # type: ignore[arg-type]
        fast = layer_read_seconds(RECURRENT, cpu, changed)
        assert layer_read_seconds(RECURRENT, slow, changed) == fast
    plain = replace(RECURRENT, core_bytes=1200)  # 16 bits
    assert layer_read_seconds(plain, slow, asked) == pytest.approx((1200 + states) * 1e-9)


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_the_experts_that_are_calibrated_have_the_bytes_that_the_cost_model_knows() -> None:
    values = 3 * EXPERTS * WIDTH * HIDDEN
    assert expert_bytes() / values == pytest.approx(CALIBRATED_VALUE_BYTES)


def test_a_listed_speed_is_reached_in_part_and_a_measured_one_whole() -> None:
    listed = replace(gpu(8), bandwidth=1e12, flops=2e14)
    assert memory_rate(listed) == pytest.approx(0.7e12)
    assert compute_rate(listed) == pytest.approx(1.4e14)
    measured = replace(listed, measured=True)
    assert (memory_rate(measured), compute_rate(measured)) == (1e12, 2e14)


def test_cold_experts_are_not_read_from_the_devices_memory() -> None:
    device, asked = replace(gpu(8), measured=True), settings(kernels="cuda")
    hot, half, none = (layer_read_seconds(ROUTED, device, asked, x) for x in (1.0, 0.5, 0.0))
    assert none == layer_read_seconds(FULL, device, asked)
    assert half - none == pytest.approx(64 / 936e9)
    assert hot - none == pytest.approx(2 * 64 / 936e9)


def test_a_token_multiplies_every_value_that_it_visits() -> None:
    assert token_operations([FULL, ROUTED]) == 2 * (2000 + 2000 + 2 * 100)


@pytest.mark.parametrize(
    ("cold", "pinned", "link", "cpu"),
    [
        ("auto", True, 4e10, 6e10),
        ("auto", False, 0.0, 6e10),
        ("gpu", True, 4e10, 0.0),
        ("gpu", False, 5e10, 0.0),  # not read in place: copied
        ("cpu", True, 0.0, 6e10),
    ],
)
def test_only_paths_that_may_compute_cold_experts_have_a_speed(
    cold: str, pinned: bool, link: float, cpu: float
) -> None:
    found = decode_speeds(SPEEDS, cold, pinned)
    assert (found.link, found.cpu) == (link, cpu)
    assert replace(found, link=4e10, cpu=6e10) == SPEEDS


@pytest.mark.parametrize(
    ("cold", "asked"), [("auto", True), ("cpu", True), ("gpu", False), ("drop", False)]
)
def test_prompts_ask_the_cpu_unless_the_user_wants_nothing_of_it(cold: str, asked: bool) -> None:
    assert prefill_speeds(replace(SPEEDS, cpu_flops=1e12), cold).cpu_takes_prefill == asked


H200 = ColdSpeeds(gpu=4.0e12, link=48e9, cpu=120e9, handover_s=8e-6)
EXPERT = 1_900_000

ANY_SPEEDS = st.builds(
    ColdSpeeds,
    gpu=st.floats(1e11, 1e13),
    link=st.floats(1e9, 1e11),
    cpu=st.floats(1e9, 1e12),
    handover_s=st.floats(1e-6, 1e-3),
)


def test_the_gpu_takes_a_few_of_many_cold_picks() -> None:
    assert best_in_place(H200, EXPERT, 8) == (0, 0, 0, 1, 1, 1, 1, 2, 2)


def test_time_is_that_of_the_slower_side() -> None:
    assert row_seconds(H200, EXPERT, 8, 0, 0) == pytest.approx(HOT_KERNELS_S + 8 * EXPERT / 4e12)
    assert row_seconds(H200, EXPERT, 5, 3, 0) == pytest.approx(8e-6 + 3 * EXPERT / 120e9)
    assert row_seconds(H200, EXPERT, 0, 3, 3) == pytest.approx(HOT_KERNELS_S + 3 * EXPERT / 48e9)


def test_a_machine_with_a_slow_cpu_reads_over_the_link() -> None:
    found = choose_decode(ColdSpeeds(4e12, 48e9, 10e9, 20e-6), EXPERT, 8, 0.9)
    assert found.path == "gpu"
    assert found.in_place == tuple(range(9))


def test_memory_that_a_gpu_cannot_read_is_left_to_the_cpu() -> None:
    found = choose_decode(ColdSpeeds(4e12, 0.0, 10e9, 20e-6), EXPERT, 8, 0.6)
    assert (found.path, found.in_place) == ("cpu", (0,) * 9)


def test_no_kernels_of_the_cpu_leave_all_to_the_gpu() -> None:
    assert choose_decode(ColdSpeeds(4e12, 48e9, 0.0, 20e-6), EXPERT, 8, 0.6).path == "gpu"


def test_a_layer_that_is_seldom_cold_is_not_worth_two_kernels() -> None:
    assert choose_decode(H200, EXPERT, 8, 0.999).path == "gpu"
    assert choose_decode(H200, EXPERT, 8, 0.6).path == "cpu"


def test_a_layer_that_a_text_may_make_cold_can_ask_the_cpu_from_the_start() -> None:
    seldom = choose_decode(H200, EXPERT, 8, 0.999, even_rate=0.6)
    assert seldom == choose_decode(H200, EXPERT, 8, 0.6)
    assert seldom.path == "cpu"
    # A CPU that could not save time with even routing either is left out of the step.
    slow = ColdSpeeds(gpu=4e12, link=48e9, cpu=2e9, handover_s=20e-6)
    assert choose_decode(slow, EXPERT, 8, 0.9, even_rate=0.0).path == "gpu"
    assert choose_decode(H200, EXPERT, 8, 0.999, even_rate=0.998).path == "gpu"
    for cold in ("gpu", "cpu", "drop"):
        assert choose_decode(H200, EXPERT, 8, 0.9, cold, even_rate=0.0).path == cold


def test_a_path_that_was_asked_for_is_taken() -> None:
    for path, in_place in (("gpu", (0, 1, 2)), ("cpu", (0, 0, 0)), ("drop", (0, 0, 0))):
        assert choose_decode(H200, EXPERT, 2, 0.5, path) == DecodeChoice(path, in_place)


@given(ANY_SPEEDS, st.integers(10_000, 100_000_000), st.integers(1, 10), st.floats(0, 1))
def test_the_choice_is_never_slower_than_either_path(
    speeds: ColdSpeeds, size: int, used: int, hit_rate: float
) -> None:
    found = choose_decode(speeds, size, used, hit_rate)
    assert all(0 <= left <= cold for cold, left in enumerate(found.in_place))

    seconds = decode_seconds(speeds, size, hit_rate, found)
    for path in ("gpu", "cpu"):
        asked_for = choose_decode(speeds, size, used, hit_rate, path)
        assert seconds <= decode_seconds(speeds, size, hit_rate, asked_for) * (1 + 1e-9)


def test_what_was_measured_comes_before_what_is_listed() -> None:
    card = gpu(80)
    cpu = replace(host(64), native=True, bandwidth=100e9, flops=1e12)
    guessed = cold_speeds_of(card, cpu)
    assert guessed.link == guessed.copy == pytest.approx(card.link * 0.7)
    assert guessed.cpu == pytest.approx(70e9)
    assert guessed.gpu == pytest.approx(card.bandwidth * 0.7)
    assert guessed.cpu_flops == pytest.approx(0.2 * 0.7e12)
    assert guessed.measured is False
    rows = {
        card.name: Speeds(
            1.0, 52e9, 3.0, "", link_read=48e9, handover_s=7e-6, total_bytes=card.total_bytes
        ),
        "cpu": Speeds(1.0, 0.0, 2e12, "", experts=110e9, expert_flops=9e11),
    }
    card, cpu = with_speeds([card, cpu], rows)
    found = cold_speeds_of(card, cpu)
    assert (found.link, found.cpu, found.handover_s) == (48e9, 110e9, 7e-6)
    assert (found.copy, found.cpu_flops, found.gpu) == (52e9, 9e11, 1.0)
    assert found.measured is True
    assert cold_speeds_of(card, replace(cpu, experts=0.0)).measured is False
    assert cold_speeds_of(card, replace(cpu, native=False)).cpu == 0.0


# An expert of Qwen3.5-35B-A3B on an H200's host.
SIZE = ExpertSize(1_900_000, expert_operations(512, 2048))
FAST_CPU = ColdSpeeds(gpu=4e12, link=48e9, cpu=150e9, handover_s=1e-5, copy=55e9, cpu_flops=1.5e12)
MEASURED = ColdSpeeds(gpu=4e12, link=48e9, cpu=77e9, handover_s=1e-5, copy=55e9, cpu_flops=725e9)


def slower_s(counts: dict[int, int], left: frozenset[int], speeds: ColdSpeeds) -> float:
    """When both sides are done."""
    link = sum(SIZE.bytes / speeds.copy for e, n in counts.items() if n and e not in left)
    read = SIZE.bytes / cost_model.CPU_READ_SHARE / speeds.cpu
    pick = SIZE.operations / cost_model.CPU_FLOPS_SHARE / speeds.cpu_flops
    cpu = PREFILL_HANDOVER_S + sum(max(read, counts[e] * pick) for e in left)
    return max(link, cpu if left else 0.0)


def test_without_a_cpu_nothing_is_left_to_it() -> None:
    counts = dict.fromkeys(range(200), 1)
    assert left_to_cpu(counts, SIZE, FAST_CPU)
    assert left_to_cpu(counts, SIZE, FAST_CPU.without_cpu) == frozenset()


def test_a_few_copies_are_done_before_the_cpu_has_its_rows() -> None:
    assert left_to_cpu(dict.fromkeys(range(8), 1), SIZE, FAST_CPU) == frozenset()


def test_the_cpu_takes_those_with_the_fewest_picks() -> None:
    counts = {expert: 1 if expert % 2 else 4000 for expert in range(200)}
    left = left_to_cpu(counts, SIZE, FAST_CPU)
    assert 50 < len(left) <= 100
    assert all(counts[expert] == 1 for expert in left)


def test_experts_with_many_picks_are_streamed() -> None:
    slow = ColdSpeeds(gpu=4e12, link=48e9, cpu=150e9, handover_s=1e-5, copy=55e9, cpu_flops=1e10)
    assert left_to_cpu(dict.fromkeys(range(200), 64), SIZE, slow) == frozenset()


@given(
    counts=st.dictionaries(st.integers(0, 255), st.integers(0, 300), max_size=200),
    link=st.floats(1e9, 1e11),
    bandwidth=st.floats(1e9, 5e11),
    flops=st.floats(1e10, 1e13),
)
def test_what_the_cpu_takes_was_chosen_and_saves_time(
    counts: dict[int, int], link: float, bandwidth: float, flops: float
) -> None:
    speeds = ColdSpeeds(
        gpu=4e12, link=48e9, cpu=bandwidth, handover_s=1e-5, copy=link, cpu_flops=flops
    )
    left = left_to_cpu(counts, SIZE, speeds)
    assert all(counts[expert] for expert in left)
    none = frozenset[int]()
    assert slower_s(counts, left, speeds) <= slower_s(counts, none, speeds) * (1 + 1e-9)
    if left:
        most = max(counts[expert] for expert in left)
        assert all(n >= most for e, n in counts.items() if n and e not in left)


def cold_layer(hits: float, experts: int = 102) -> ColdLayer:
    """A layer of Qwen3.5-35B-A3B of which 102 experts are cold."""
    return ColdLayer(SIZE, experts, 8 * (1 - hits), 2 * 35 * SIZE.bytes)


@pytest.mark.parametrize(
    ("rows", "hits", "with_cpu", "counted"),
    [
        (16, 0.6, False, True),
        (40, 0.6, False, False),
        (128, 0.95, False, True),
        (128, 0.9, False, False),
        (40, 0.6, True, True),
        (128, 0.6, True, False),
        (128, 0.9, True, True),
        (256, 0.9, True, False),
        (256, 0.95, True, True),
        (2048, 0.95, True, False),
    ],
)
def test_steps_wait_for_the_numbers_of_picks_where_cold_experts_have_few(
    rows: int, hits: float, with_cpu: bool, counted: bool
) -> None:
    speeds = MEASURED if with_cpu else MEASURED.without_cpu
    assert pays_to_count(rows, cold_layer(hits), speeds) == counted


@pytest.mark.parametrize(
    ("rows", "cold", "picks", "counted"),
    [
        # In comments: ms a layer, counted and with all experts copied.
        (512, 102, 34 / 40, False),  # 6.2 and 3.65
        (512, 256, 8.0, False),  # 16.1 and 8.9
        (512, 102, 3.2, False),
        (256, 102, 34 / 40, False),  # 4.5 and 4.1
        (256, 102, 3.2, False),  # 6.0 and 4.0
        (256, 256, 8.0, False),  # 11.3 and 9.9
        (128, 102, 3.2, False),  # 4.4 and 4.0
        (32, 102, 34 / 40, True),  # 2.2 and 4.0
        (32, 102, 3.2, True),  # 3.4 and 4.0
        (32, 256, 8.0, True),  # 5.7 and 9.8
        (128, 256, 8.0, True),  # 8.1 and 9.7
    ],
)
def test_prompts_that_counting_made_slower_are_not_counted_and_small_ones_are(
    rows: int, cold: int, picks: float, counted: bool
) -> None:
    layer = ColdLayer(ExpertSize(1_904_000, SIZE.operations), cold, picks, 2 * 35 * 1_904_000)
    # What calibrate said before and after, on an H200 with 16 cores, 2026-11-16.
    for bandwidth, flops in ((77e9, 725e9), (88e9, 793e9)):
        speeds = ColdSpeeds(
            gpu=4e12, link=48e9, cpu=bandwidth, handover_s=1e-5, copy=55e9, cpu_flops=flops
        )
        assert pays_to_count(rows, layer, speeds) == counted


speeds_drawn = st.builds(
    ColdSpeeds,
    gpu=st.just(4e12),
    link=st.just(48e9),
    cpu=st.floats(1e9, 5e11),
    handover_s=st.just(1e-5),
    copy=st.floats(1e9, 1e11),
    cpu_flops=st.floats(1e10, 1e13),
)
rows_drawn, hits_drawn, experts_drawn = st.integers(33, 4096), st.floats(0, 1), st.integers(1, 256)


@given(
    rows=rows_drawn,
    hits=st.tuples(hits_drawn, hits_drawn),
    experts=experts_drawn,
    speeds=speeds_drawn,
)
def test_better_statistics_and_a_cpu_never_make_counting_worth_less(
    rows: int, hits: tuple[float, float], experts: int, speeds: ColdSpeeds
) -> None:
    worse, better = (cold_layer(share, experts) for share in sorted(hits))
    for one in (speeds, speeds.without_cpu):
        assert pays_to_count(rows, better, one) >= pays_to_count(rows, worse, one)
    for layer in (worse, better):
        alone = pays_to_count(rows, layer, speeds.without_cpu)
        assert pays_to_count(rows, layer, speeds) >= alone


@given(rows=rows_drawn, hits=hits_drawn, experts=experts_drawn, speeds=speeds_drawn)
def test_counting_that_pays_saves_more_than_what_it_costs(
    rows: int, hits: float, experts: int, speeds: ColdSpeeds
) -> None:
    layer = cold_layer(hits, experts)
    counts = expected_counts(rows * layer.picks, experts)
    saved = experts * SIZE.bytes / speeds.copy - slower_s(
        counts, left_to_cpu(counts, SIZE, speeds), speeds
    )
    lost = min(rows * cost_model.OTHER_PARTS_ROW_S, layer.ahead_bytes / speeds.copy)
    if pays_to_count(rows, layer, speeds):
        assert saved > cost_model.READ_BACK_S + cost_model.ENQUEUE_S + lost


@given(rows=rows_drawn, hits=hits_drawn, experts=experts_drawn, speeds=speeds_drawn)
def test_a_step_waits_up_to_so_many_rows_and_no_longer(
    rows: int, hits: float, experts: int, speeds: ColdSpeeds
) -> None:
    layer = cold_layer(hits, experts)
    assert pays_to_count(rows, layer, speeds) == (rows <= most_counted_rows(layer, speeds))


def test_a_step_without_cold_experts_never_waits_for_its_picks() -> None:
    assert most_counted_rows(cold_layer(1.0, 0), MEASURED) == 0


@given(picks=st.floats(0, 60_000), experts=st.integers(1, 256))
@example(picks=0.625, experts=1)
def test_expected_picks_add_up_to_about_all_and_some_experts_have_none(
    picks: float, experts: int
) -> None:
    counts = expected_counts(picks, experts)
    assert list(counts) == list(range(experts))
    assert list(counts.values()) == sorted(counts.values())
    mean = min(picks / experts, cost_model.MOST_MEAN_PICKS)
    # One expert has the median, which is at most ln 2 from the mean; several come nearer to it.
    assert abs(sum(counts.values()) / experts - mean) <= log(2)
    unused = sum(count == 0 for count in counts.values())
    assert abs(unused - experts * exp(-mean)) <= 1


def test_exchanges_must_pay_by_the_speeds_of_the_paths_that_may_be_used() -> None:
    speeds = ColdSpeeds(gpu=1e12, link=5e10, cpu=7e10, handover_s=1e-5, copy=6e10)
    assert exchange_speeds(None, "auto", True) is None
    assert exchange_speeds(speeds, "drop", True) is None
    assert exchange_speeds(speeds, "auto", True) == speeds
    assert exchange_speeds(speeds, "gpu", True) == replace(speeds, cpu=0.0)
    assert exchange_speeds(speeds, "auto", False) == replace(speeds, link=0.0)


def test_an_exchange_saves_the_difference_of_cold_and_hot_picks() -> None:
    speeds = ColdSpeeds(gpu=1e12, link=5e10, cpu=5e10, handover_s=1e-5, copy=2e10)
    pick_s = 1e6 / 1e11 - 1e6 / 1e12
    saved_s = exchange_saves_seconds(speeds, 1_000_000, 0.5)
    assert saved_s == pytest.approx(EXCHANGE_HORIZON_TOKENS * 0.5 * pick_s)
    assert exchange_takes_seconds(speeds, 3_000_000) == 3e6 / 2e10
    assert exchange_takes_seconds(replace(speeds, copy=0.0), 3_000_000) == 3e6 / 5e10


def test_shares_of_the_link_are_the_best_of_all() -> None:
    for rate, delay_s in ((7e10, 1e-5), (1e10, 2e-4), (1e9, 1e-5), (2e11, 1e-6)):
        speeds = ColdSpeeds(gpu=3e12, link=5e10, cpu=rate, handover_s=delay_s)
        shares = link_shares(speeds, 1_800_000, used=8, most=24)
        assert len(shares) == 25
        for misses, share in enumerate(shares):
            hot = max(0, 8 - misses)
            times = [row_seconds(speeds, 1_800_000, hot, misses, n) for n in range(misses + 1)]
            assert times[share] == min(times)


def test_the_first_miss_crosses_the_link_where_that_fills_a_slot() -> None:
    slow_link = ColdSpeeds(gpu=3e12, link=1e10, cpu=7e10, handover_s=1e-5)
    assert link_shares(slow_link, 1_800_000, 8, 6)[:3] == (0, 0, 0)
    filled = link_shares(slow_link, 1_800_000, 8, 6, fills=True)
    assert filled[:3] == (0, 1, 1)
    assert all(b - a in (0, 1) for a, b in pairwise(filled))
    assert link_shares(slow_link, 1_800_000, 8, 0, fills=True) == (0,)
