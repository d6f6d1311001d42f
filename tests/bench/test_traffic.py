"""The bytes of a step: by hand for small cases, and what must hold for all."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.bench.traffic import step_traffic, visited_experts
from headroom.plan.settings import PlanSettings
from headroom.plan.shape import LayerPadding, LayerShape, ModelShape, Padding

SETTINGS = PlanSettings(
    context=4096, parallel=16, chunk=512, cache_tokens=65536, k_type="f16", v_type="f16",
    compute_type="f32", weights="packed", threads=1,
)  # fmt: skip
FULL = LayerShape(
    kind="full", core_bytes=1000, core_values=2000, query_heads=8, kv_heads=2, key_dim=32,
    value_dim=32,
)  # fmt: skip
WINDOW = replace(FULL, kind="window", window=10)
SHARING = replace(FULL, owns_kv=False)
RECURRENT = LayerShape(
    kind="recurrent", core_bytes=500, core_values=600, state_values=100, conv_values=20
)
EXPERTS = replace(FULL, experts=8, experts_used=2, expert_bytes=64, expert_values=100)
TOKEN = 2 * (32 + 32) * 2  # bytes of one token's keys and values in FULL


def model(*layers: LayerShape, **changes: int) -> ModelShape:
    return ModelShape(
        name="m", architecture="llama", hidden=64, vocab=100, context_limit=4096, layers=layers,
        embed_bytes=6400, embed_values=6400, **{"norm_bytes": 7, **changes},
    )  # fmt: skip


def test_a_dense_step_reads_its_weights_once_and_each_cache() -> None:
    one = step_traffic(model(FULL, FULL), SETTINGS, [9])
    assert one.weights == 2000 + 7 + 6400  # the head is the token table
    assert one.rows == 64
    assert one.cache == 2 * (10 * TOKEN + TOKEN)  # ten are read, the new one among them
    assert (one.experts, one.state) == (0, 0)
    assert one.total == 2000 + 7 + 6400 + 64 + 22 * TOKEN
    two = step_traffic(model(FULL, FULL), SETTINGS, [9, 19])
    assert two.weights == one.weights
    assert two.cache == 2 * (10 + 20 + 2) * TOKEN


def test_a_head_of_its_own_replaces_the_table() -> None:
    found = step_traffic(model(FULL, head_bytes=900, head_values=900), SETTINGS, [0])
    assert found.weights == 1000 + 7 + 900


def test_windows_states_and_shared_caches_are_counted_as_they_are_read() -> None:
    assert step_traffic(model(WINDOW), SETTINGS, [500]).cache == 11 * TOKEN
    assert step_traffic(model(FULL, SHARING), SETTINGS, [9]).cache == 21 * TOKEN
    found = step_traffic(model(RECURRENT), SETTINGS, [500, 500])
    assert found.cache == 0
    assert found.state == 2 * 2 * 120 * 4  # of two sequences, read and written, f32


def test_kernels_that_pad_weights_read_the_padding() -> None:
    panels, tiles = (LayerPadding(Padding(bytes=size), expert_bytes=size) for size in (24, 40))
    padded = replace(EXPERTS, panels=panels, tiles=tiles)
    assert step_traffic(model(padded), SETTINGS, [0]).weights == 1000 + 7 + 6400
    for kernels, dtype, added in (
        ("native", "f32", 24),
        ("cuda", "bf16", 40),
        ("cuda", "f32", 0),  # weights as files have them
        ("triton", "bf16", 0),
    ):
        running = replace(SETTINGS, kernels=kernels, compute_type=dtype)
        found = step_traffic(model(padded), running, [0])
        assert found.weights == 1000 + added + 7 + 6400
        assert found.experts == pytest.approx(2 * (64 + added))


def test_one_token_visits_as_many_experts_as_the_model_uses() -> None:
    assert step_traffic(model(EXPERTS), SETTINGS, [0]).experts == pytest.approx(2 * 64)
    assert visited_experts(FULL, 4) == 0
    assert visited_experts(EXPERTS, 2) == pytest.approx(8 * (1 - 0.75**2))


def test_experts_that_all_tokens_visit_are_read_once() -> None:
    chances = [1.0, 1.0] + [0.0] * 6
    for rows in (1, 2, 16):
        assert visited_experts(EXPERTS, rows, chances) == 2
    found = step_traffic(model(FULL, EXPERTS), SETTINGS, [0] * 4, [[0.0] * 8, chances])
    assert found.experts == 2 * 64


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 40))
def test_expected_visits_lie_between_one_row_and_all(experts: int, used: int, rows: int) -> None:
    used = min(used, experts)
    layer = replace(EXPERTS, experts=experts, experts_used=used)
    found = visited_experts(layer, rows)
    assert used - 1e-9 <= found <= min(experts, rows * used) + 1e-9
    assert found <= visited_experts(layer, rows + 1) + 1e-9


@given(st.lists(st.floats(0, 1), min_size=8, max_size=8), st.integers(1, 40))
def test_uneven_choices_visit_no_more_experts_than_even_ones(
    weights: list[float], rows: int
) -> None:
    mean = sum(weights) / 8
    layer = replace(EXPERTS, experts_used=1)
    even = visited_experts(layer, rows, [mean] * 8)
    assert visited_experts(layer, rows, weights) <= even + 1e-9


def test_expected_visits_are_what_random_choices_visit() -> None:
    layer = replace(EXPERTS, experts=32, experts_used=4)
    chance, rounds, rows = random.Random(0), 3000, 6
    seen = sum(
        len({expert for _ in range(rows) for expert in chance.sample(range(32), 4)})
        for _ in range(rounds)
    )
    assert seen / rounds == pytest.approx(visited_experts(layer, rows), rel=0.01)


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=16))
def test_sequences_share_weights_and_nothing_else(contexts: list[int]) -> None:
    shape = model(FULL, WINDOW, SHARING, RECURRENT)
    together = step_traffic(shape, SETTINGS, contexts)
    alone = [step_traffic(shape, SETTINGS, [context]) for context in contexts]
    assert together.weights == alone[0].weights
    for name in ("rows", "cache", "state"):
        total = sum(getattr(one, name) for one in alone)
        assert getattr(together, name) == pytest.approx(total)
