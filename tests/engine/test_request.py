"""Sampling settings are checked where they are made."""

from typing import Any

import pytest

from headroom.engine.request import MAX_SEED, SamplingParams, user_settings
from headroom.errors import RequestError


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
        ("max_tokens", 1, None),
        ("temperature", 0, 100),
        ("top_k", 0, None),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("repetition_penalty", None, 100),
        ("frequency_penalty", -100, 100),
        ("presence_penalty", -100, 100),
        ("penalty_window", 0, None),
        ("seed", -MAX_SEED - 1, MAX_SEED),
        ("draw", 0, None),
        ("logprobs", 0, 20),
    ],
)
def test_a_setting_takes_its_limits_and_nothing_beyond(
    name: str, lowest: int | None, highest: int | None
) -> None:
    for limit, beyond in ((lowest, -1), (highest, 1)):
        if limit is None:
            continue
        assert getattr(SamplingParams(**{name: limit}), name) == limit
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: limit + beyond})
        assert caught.value.param == name
        assert str(limit) in str(caught.value)


def test_a_repetition_penalty_is_above_zero() -> None:
    assert SamplingParams(repetition_penalty=1e-9).repetition_penalty == 1e-9
    with pytest.raises(RequestError, match=r"0; it must be in \(0, 100\]"):
        SamplingParams(repetition_penalty=0)
