"""The sampler: order of its parts, ties, and random numbers that depend on their place alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.engine.request import SamplingParams
from headroom.engine.sampler import sample, token_logprobs
from headroom.errors import RequestError
from headroom.kernels.philox import philox, uniform


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def shares(logits: np.ndarray, params: dict, draws: int = 4000) -> np.ndarray:
    """How often each token is drawn over many seeds."""
    counts = np.zeros(len(logits))
    for seed in range(draws):
        counts[sample(logits, [0], SamplingParams(seed=seed, **params))] += 1
    return counts / draws


def test_philox_gives_the_published_vectors() -> None:
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)) == (
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    )


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**33))
def test_uniform_is_in_range_and_depends_on_all_three(seed: int, position: int, draw: int) -> None:
    value = uniform(seed, position, draw)
    assert 0 <= value < 1
    others = {uniform(seed ^ 1, position, draw), uniform(seed, position + 1, draw)}
    others |= {uniform(seed, position, draw + 1)}
    assert value not in others


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
