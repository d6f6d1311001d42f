"""Sampling settings are checked where they are made."""

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.engine.request import (
    LEAST_TEMPERATURE,
    MAX_COUNT,
    MAX_SEED,
    SamplingParams,
    new_seed,
    user_settings,
    with_defaults,
)
from headroom.errors import RequestError
from headroom.layers.draws import DeviceSampler, Draw


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 101.0),
        ("presence_penalty", float("inf")),
        ("penalty_window", -1),
        ("seed", MAX_SEED + 1),
        ("draw", -1),
        ("logprobs", 21),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", [3]),
        ("top_k", 2**63),
        pytest.param("top_k", 10**5000, id="top_k-of 5000 digits"),
        ("top_k", 3.0),
        ("top_k", True),
        ("draw", 2**63),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", None),
        ("repetition_penalty", 1e-310),
        ("stop", ""),
        ("stop", "one text"),
        ("stop", ("",)),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_users_give_every_setting_that_says_what_it_is_for() -> None:
    names = [declared.name for declared in user_settings()]
    assert names[:2] == ["max_tokens", "temperature"]
    assert {"stop", "seed", "logit_bias"} < set(names)
    assert not {"draw", "logprobs", "prompt_logprobs"} & set(names)


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("max_tokens", 1, MAX_COUNT),
        ("temperature", 0, 100),
        ("top_k", 0, MAX_COUNT),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("repetition_penalty", 0.01, 100),
        ("frequency_penalty", -100, 100),
        ("presence_penalty", -100, 100),
        ("penalty_window", 0, MAX_COUNT),
        ("seed", -MAX_SEED - 1, MAX_SEED),
        ("draw", 0, MAX_COUNT),
        ("logprobs", 0, 20),
    ],
)
def test_a_setting_takes_its_limits_and_nothing_beyond(
    name: str, lowest: float, highest: float
) -> None:
    for limit, beyond in ((lowest, -1), (highest, 1)):
        assert getattr(SamplingParams(**{name: limit}), name) == limit
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: limit + beyond})
        assert caught.value.param == name
        assert str(limit) in str(caught.value)


def test_temperatures_that_would_overflow_and_negative_zero_are_zero() -> None:
    for temperature in (1e-310, 5e-324, LEAST_TEMPERATURE * 0.999, -0.0, 0, np.float32(1e-30)):
        made = SamplingParams(temperature=temperature).temperature
        assert made == 0
        assert math.copysign(1, made) == 1
    assert SamplingParams(temperature=LEAST_TEMPERATURE).temperature == LEAST_TEMPERATURE
    with pytest.raises(RequestError, match="temperature is -1e-310; it must be from 0 to 100"):
        SamplingParams(temperature=-1e-310)


def test_numbers_of_numpy_are_checked_and_become_plain_ones() -> None:
    made = SamplingParams(top_k=np.int64(7), top_p=np.float32(0.5))  # type: ignore[arg-type]
    assert (type(made.top_k), type(made.top_p)) == (int, float)
    with pytest.raises(RequestError, match="top_p"):
        SamplingParams(top_p=np.float32("nan"))  # type: ignore[arg-type]


NUMBERS = [
    declared.name
    for declared in fields(SamplingParams)
    if declared.metadata["min"] is not None and declared.name != "logit_bias"
]
ANY_NUMBER = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0.0, 1.0, 1, 2, 100])


@given(st.dictionaries(st.sampled_from(NUMBERS), ANY_NUMBER))
def test_whatever_is_accepted_fits_the_tables_of_a_device(given_settings: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**given_settings)
    except RequestError:
        return
    sampler = DeviceSampler.allocate(1, 8, "cpu")
    sampler.fill([(0, Draw(params, [1, 2, 3]))])
    for name in ("temperature", "top_k", "draw", "seed"):
        assert getattr(sampler.tables, name)[0].item() == getattr(params, name)
    assert sampler.tables.repetition_penalty[0] > 0


def test_what_is_given_goes_before_defaults_and_greedy_has_none() -> None:
    defaults = {"temperature": 0.6, "repetition_penalty": 1.1}
    assert with_defaults(defaults, {"seed": 1}) == {**defaults, "seed": 1}
    assert with_defaults(defaults, {"temperature": 0.9})["temperature"] == 0.9
    assert with_defaults(defaults, {"temperature": 0, "seed": 1}) == {"temperature": 0, "seed": 1}
    assert with_defaults(defaults, {"temperature": 1e-310}) == {"temperature": 1e-310}
    assert with_defaults(defaults, {"temperature": "hot"})["repetition_penalty"] == 1.1


@pytest.mark.parametrize("bits", [1, 20, 53, 63])
def test_random_seeds_use_all_their_bits_and_no_more(bits: int) -> None:
    seeds = [new_seed(bits) for _ in range(200)]  # no bit is alike in all: a chance of 2**-200
    assert min(seeds) >= 0
    used, always = 0, (1 << bits) - 1
    for seed in seeds:
        used, always = used | seed, always & seed
    assert used == (1 << bits) - 1
    assert always == 0
