"""The sampler: order of its parts, ties, and random numbers that depend on their place alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.engine import sampler
from headroom.engine.request import SamplingParams
from headroom.engine.sampler import _filtered, sample, token_logprobs
from headroom.errors import ModelError, RequestError
from headroom.kernels.cuda.sampler import sample as device_sample
from headroom.kernels.philox import uniform
from tests.sampler_cases import tables_of


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def shares(logits: np.ndarray, params: dict, draws: int = 4000) -> np.ndarray:
    """How often each token is drawn over many seeds."""
    counts = np.zeros(len(logits))
    for seed in range(draws):
        counts[sample(logits, [0], SamplingParams(seed=seed, **params))] += 1
    return counts / draws


def test_temperature_zero_takes_the_lowest_id_among_equals() -> None:
    assert sample(row(1, 3, 3, 0), [9], SamplingParams(temperature=0)) == 1


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits = row(2, 1, 0, -1)
    for temperature in (0.5, 1.0, 2.0):
        expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        assert np.abs(shares(logits, {"temperature": temperature}) - expected).max() < 0.03


def test_huge_logits_do_not_overflow() -> None:
    for shift in (3e4, -3e4):
        drawn = shares(row(shift + 1, shift, shift - 8), {"top_p": 0.99})
        assert np.abs(drawn - [0.731, 0.269, 0]).max() < 0.03


def test_top_k_keeps_exactly_k_tokens_the_lower_ids_on_ties() -> None:
    drawn = shares(row(1, 2, 2, 2, 0), {"top_k": 2})
    assert set(np.flatnonzero(drawn)) == {1, 2}


def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it() -> None:
    logits = np.log(row(0.5, 0.3, 0.15, 0.05))
    assert set(np.flatnonzero(shares(logits, {"top_p": 0.75}))) == {0, 1}
    assert set(np.flatnonzero(shares(logits, {"top_p": 0.85}))) == {0, 1, 2}
    assert set(np.flatnonzero(shares(logits, {"top_p": 0.0}))) == {0}


def test_top_p_looks_at_what_top_k_left() -> None:
    logits = np.log(row(0.4, 0.3, 0.2, 0.1))
    # Of the two kept, the first has 4/7 of the weight, which reaches 0.5 alone.
    assert set(np.flatnonzero(shares(logits, {"top_k": 2, "top_p": 0.5}))) == {0}


def test_min_p_is_a_share_of_the_likeliest_token_after_temperature() -> None:
    logits = np.log(row(0.5, 0.26, 0.2, 0.04))
    assert set(np.flatnonzero(shares(logits, {"min_p": 0.5}))) == {0, 1}
    assert set(np.flatnonzero(shares(logits, {"min_p": 0.5, "temperature": 2.0}))) == {0, 1, 2}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert sample(row(3, 2, -1), [0, 0, 0], params) == 1  # 1.5, 2, -1
    assert sample(row(-1, -1.5, -3), [0], params) == 1  # -2, -1.5, -3


def test_frequency_counts_and_presence_does_not() -> None:
    logits = row(5, 4, 0)
    assert sample(logits, [0, 0, 0], SamplingParams(temperature=0, frequency_penalty=0.3)) == 0
    assert sample(logits, [0, 0, 0, 0], SamplingParams(temperature=0, frequency_penalty=0.3)) == 1
    assert sample(logits, [0] * 9, SamplingParams(temperature=0, presence_penalty=0.9)) == 0
    assert sample(logits, [0], SamplingParams(temperature=0, presence_penalty=1.1)) == 1


def test_penalties_come_after_the_bias_and_see_only_the_window() -> None:
    biased = SamplingParams(temperature=0, logit_bias={0: 4.0}, repetition_penalty=2.0)
    assert sample(row(-2, 0.5, 0), [0], biased) == 0  # (-2 + 4) / 2 = 1
    windowed = SamplingParams(temperature=0, presence_penalty=5, penalty_window=2)
    assert sample(row(3, 2, 0), [0, 2, 2], windowed) == 0
    assert (
        sample(
            row(3, 2, 0),
            [0, 2, 2],
            SamplingParams(temperature=0, presence_penalty=5, penalty_window=0),
        )
        == 1
    )


def test_penalties_come_before_the_temperature() -> None:
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        drawn = shares(row(2, 1, 0), {"temperature": 2.0, **penalty})  # (2 - 2, 1, 0) / 2
        expected = np.exp([0, 0.5, 0]) / np.exp([0, 0.5, 0]).sum()
        assert np.abs(drawn - expected).max() < 0.03


def test_a_bias_comes_before_the_temperature() -> None:
    drawn = shares(row(0, 1, 0), {"temperature": 2.0, "logit_bias": {2: 2.0}})
    expected = np.exp([0, 0.5, 1]) / np.exp([0, 0.5, 1]).sum()
    assert np.abs(drawn - expected).max() < 0.03


def test_top_p_that_is_reached_exactly_needs_no_further_token() -> None:
    equal = row(0, 0, 0, 0)  # a quarter each, in numbers without rounding
    assert set(np.flatnonzero(shares(equal, {"top_p": 0.5}, 400))) == {0, 1}
    assert set(np.flatnonzero(shares(equal, {"top_p": 0.25}, 400))) == {0}
    assert set(np.flatnonzero(shares(equal, {"top_p": 0.5000001}, 400))) == {0, 1, 2}


def test_min_p_keeps_a_token_that_reaches_it_exactly() -> None:
    assert set(np.flatnonzero(shares(row(1, 1, 0.99), {"min_p": 1.0}, 400))) == {0, 1}


def test_min_p_comes_after_top_p() -> None:
    logits = np.log(row(0.4, 0.3, 0.2, 0.1))
    # Of all four, 0.75 takes the first three. Of the three that min_p leaves, it would take two.
    assert set(np.flatnonzero(shares(logits, {"top_p": 0.75, "min_p": 0.3}, 1000))) == {0, 1, 2}


def test_each_position_has_a_random_number_of_its_own() -> None:
    logits, params = row(*[0.0] * 1000), SamplingParams(seed=5)
    for history in ([1], [1, 2], [1, 2, 3]):
        expected = int(uniform(5, len(history), 0) * 1000)
        assert sample(logits, history, params) == expected


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])  # the ends of what `uniform` returns
def test_the_ends_of_the_random_numbers_draw_the_first_and_the_last_token_with_a_chance(
    monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, position, draw: number)
    dice = np.random.default_rng(5)
    for tokens in range(1, 300):
        logits = dice.normal(size=tokens).astype(np.float32)
        impossible = np.full(3, -np.inf, dtype=np.float32)
        padded = np.concatenate((impossible, logits, impossible))
        assert sample(padded, [], SamplingParams()) == (3 if number == 0 else tokens + 2)


def test_sampling_leaves_the_logits_alone() -> None:
    logits = row(1, 2, 3)
    sample(logits, [2], SamplingParams(logit_bias={0: 9}, repetition_penalty=2, top_k=1))
    assert logits.tolist() == [1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=40),
    st.floats(0.01, 3),
    st.integers(0, 50),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_a_drawn_token_passes_every_filter(values, temperature, top_k, top_p, min_p, seed) -> None:
    logits = np.array(values, dtype=np.float32)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    token = sample(logits, [1, 2], params)
    assert 0 <= token < len(logits)
    better = int((logits > logits[token]).sum())
    assert not top_k or better < top_k
    scaled = logits.astype(np.float64) / temperature
    assert np.exp(scaled[token] - scaled.max()) >= min_p * (1 - 1e-9)


def test_logprobs_are_those_of_the_model_before_any_setting() -> None:
    logits = np.log(row(0.5, 0.25, 0.125, 0.125))
    found = token_logprobs(logits, 1, 3)
    assert found.logprob == pytest.approx(np.log(0.25), abs=1e-6)
    assert [token for token, _ in found.top] == [0, 1, 2]
    assert [logprob for _, logprob in found.top] == pytest.approx(np.log([0.5, 0.25, 0.125]))
    assert token_logprobs(logits, 3, 0).top == ()
    rising = token_logprobs(row(0, 1, 2, 1), 0, 3)
    assert [token for token, _ in rising.top] == [2, 1, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 1.1), ("min_p", -1),
        ("top_k", -1), ("max_tokens", 0), ("repetition_penalty", 0), ("logprobs", 21),
        ("frequency_penalty", float("inf")), ("seed", 2**63), ("logit_bias", {3: 101.0}),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize("allowed", [[5], [3, 40, 41], list(range(0, 64, 2)), list(range(64))])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=4, top_p=0.8, min_p=0.05),
        SamplingParams(seed=3, repetition_penalty=1.5, logit_bias={5: 9.0, 7: 50.0}),
    ],
)
def test_a_mask_leaves_only_the_tokens_that_it_allows(
    allowed: list[int], params: SamplingParams
) -> None:
    draw = np.random.default_rng(0)
    mask = np.zeros(2, dtype=np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    for _ in range(50):
        logits = draw.standard_normal(64).astype(np.float32) * 3
        history = draw.integers(0, 64, 20).tolist()
        # The same as if the model found all others impossible.
        impossible = np.setdiff1d(np.arange(64), allowed)
        plain = logits.copy()
        plain[impossible] = -np.inf
        found = sample(logits, history, params, mask)
        assert found in allowed
        assert found == sample(plain, history, params)


def test_rows_beyond_a_mask_are_never_drawn() -> None:
    logits = np.array([0.0] * 32 + [50.0] * 8, dtype=np.float32)
    mask = np.full(1, 0xFFFFFFFF, dtype=np.uint32)
    found = {sample(logits, [0] * at, SamplingParams(seed=1), mask) for at in range(200)}
    assert max(found) < 32
    assert len(found) > 20


def sorting_oracle(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The probabilities that are left, with every step on a sorted vocabulary."""
    values = logits.astype(np.float64) / params.temperature
    left = np.exp(values - values.max())
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        left[order[params.top_k :]] = 0
    goal = params.top_p * (left[np.sort(order[: params.top_k])] if params.top_k else left).sum()
    if params.top_p < 1:
        before = np.concatenate(([-1.0], np.cumsum(left[order])[:-1]))
        left[order[before >= goal]] = 0
    left[left < params.min_p * left.max()] = 0
    return left


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 2, 5, 1023, 1024, 1025, 3000, 20_000]),
    levels=st.sampled_from([1, 2, 7, 100, 2**31 - 1]),  # of logits: few give many ties
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    top_p=st.sampled_from([0.0, 1e-9, 0.25, 0.5, 0.9, 0.999999, 1 - 2**-53, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 1024, 5000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_selecting_keeps_exactly_what_sorting_the_vocabulary_keeps(
    seed: int, size: int, levels: int, spread: float, top_p: float, top_k: int, min_p: float
) -> None:
    drawn = np.random.default_rng(seed)
    logits = (drawn.integers(0, levels, size) / levels * spread).astype(np.float32)
    params = SamplingParams(top_p=top_p, top_k=min(top_k, size), min_p=min_p, temperature=0.7)
    expected = sorting_oracle(logits, params)
    left = _filtered(logits, params)
    found = np.zeros(size)
    found[slice(None) if left.ids is None else left.ids] = left.probabilities
    assert np.array_equal(found, expected)


@given(
    st.lists(st.sampled_from([-np.inf, -3.0, 0.0, 0.5, 0.5000001, 9.0]), min_size=1, max_size=30),
    st.integers(0, 20),
)
def test_the_likeliest_tokens_are_those_of_a_stable_sort(values: list[float], top: int) -> None:
    logits = row(*values, 1.0)
    found = token_logprobs(logits, len(values), top)
    assert [token for token, _ in found.top] == np.argsort(-logits, kind="stable")[:top].tolist()
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    assert found.logprob == pytest.approx(exact[-1])
    assert [value for _, value in found.top] == pytest.approx(
        [exact[token] for token, _ in found.top]
    )


@given(
    st.sampled_from([5e-324, 1e-310, 1e-200, 1e-40, 1e-6, 1e-5, 1.1e-5, 1e-3, 99.0]),
    st.sampled_from([1e-30, 1.0, 3e4, 3e38]),
    st.integers(0, 2**32 - 1),
)
def test_host_and_device_draw_the_same_token_at_any_temperature_and_scale(
    temperature: float, scale: float, seed: int
) -> None:
    logits = np.random.default_rng(seed).uniform(-1, 1, 50).astype(np.float32) * np.float32(scale)
    params = SamplingParams(temperature=temperature, seed=seed, top_p=0.9)
    found = sample(logits, [0, 1, 2], params)
    tables = tables_of([params], [0, 1, 2])
    assert device_sample(torch.from_numpy(logits)[None], tables).item() == found
    if temperature < 1e-5:
        assert found == logits.argmax()


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error_and_never_a_token(broken: float) -> None:
    logits = row(1, broken, 3)
    for params in (SamplingParams(temperature=0), SamplingParams(top_p=0.5)):
        with pytest.raises(ModelError, match="not finite: the largest is"):
            sample(logits, [0], params)
    with pytest.raises(ModelError, match="not finite"):
        token_logprobs(logits, 0, 1)
    with pytest.raises(ModelError, match="not finite"):
        sample(row(-np.inf, -np.inf), [0], SamplingParams())
