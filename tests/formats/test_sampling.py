"""SamplingDefaults: what a model's files recommend, and what holds where they say nothing."""

from pathlib import Path
from typing import Any

import pytest

from headroom.errors import FormatError
from headroom.formats.metadata import Metadata
from headroom.formats.sampling import (
    FALLBACK,
    SMALL_FALLBACK,
    SamplingDefaults,
    config_sampling,
    fallback_sampling,
    gguf_sampling,
)

FILE = Path("generation_config.json")


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (
            {"temperature": 1, "top_k": 20, "top_p": 0.95, "eos_token_id": 5},
            {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
        ),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True, "min_p": 0.1, "top_k": None}, {"min_p": 0.1}),
        ({"repetition_penalty": 1.1, "top_k": -1}, {"repetition_penalty": 1.1, "top_k": 0}),
    ],
)
def test_a_generation_config_recommends_sampling(
    config: dict[str, Any], settings: dict[str, float]
) -> None:
    assert config_sampling(config, FILE) == SamplingDefaults(settings, "generation_config.json")


@pytest.mark.parametrize("config", [{}, {"eos_token_id": 5, "do_sample": True}])
def test_a_file_may_recommend_nothing(config: dict[str, Any]) -> None:
    assert config_sampling(config, FILE) is None


def test_small_models_are_drawn_from_more_carefully() -> None:
    assert fallback_sampling(999_999_999).settings == SMALL_FALLBACK
    assert fallback_sampling(1_000_000_000).settings == FALLBACK


@pytest.mark.parametrize("value", ["hot", True, [0.5], float("nan"), 1e999, 10**400])
def test_a_setting_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(FormatError, match="temperature is"):
        config_sampling({"temperature": value}, FILE)


def test_gguf_keys_recommend_sampling() -> None:
    metadata = Metadata(
        {
            "general.sampling.temp": 0.6,
            "general.sampling.top_k": 20,
            "general.sampling.penalty_repeat": 1.05,
            "general.sampling.penalty_last_n": -1,
        },
        FILE,
        tied=False,
    )
    found = gguf_sampling(metadata, Path("model.gguf"))
    assert found is not None
    assert found.settings == {
        "temperature": 0.6,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "penalty_window": 0,
    }
    assert "general.sampling" in found.source
    assert gguf_sampling(Metadata({}, FILE, tied=False), Path("model.gguf")) is None
