"""SamplingDefaults: the sampling settings that a model's own files recommend."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headroom.errors import FormatError
from headroom.formats.metadata import Metadata

# The keys of the sampling settings in generation_config.json, and in GGUF files.
SAMPLING_KEYS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}  # fmt: skip
GGUF_KEYS = {
    "temperature": "general.sampling.temp", "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p", "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
    "penalty_window": "general.sampling.penalty_last_n",
}  # fmt: skip
WHOLE_NUMBERS = ("top_k", "penalty_window")
# Settings for models whose files recommend nothing. At the neutral setting, temperature 1 over the
# whole vocabulary, small models answer wrong or write nonsense; without a penalty they repeat
# themselves until the context is full. Simple questions to SmolLM2-135M (Q4_1) that were answered
# right, and answers that repeat themselves: 61 of 72 and 0 of 84 with SMALL_FALLBACK, 52 and 12
# without its penalty, 55 and 4 with FALLBACK, 38 and 1 at temperature 1
# (benchmarks/sampling_defaults.py, 2026-11-19).
FALLBACK = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
SMALL_FALLBACK = {"temperature": 0.2, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
SMALL_PARAMETERS = 1_000_000_000  # a model with fewer is small


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling settings by name, and where they come from."""

    settings: Mapping[str, float]
    source: str


def config_sampling(config: Mapping[str, Any], path: Path) -> SamplingDefaults | None:
    """Return the settings of a generation_config.json; None if it recommends nothing.

    "do_sample": false becomes temperature 0.
    """
    found = {
        name: config[key] for name, key in SAMPLING_KEYS.items() if config.get(key) is not None
    }
    if config.get("do_sample") is False:
        found = {**found, "temperature": 0}
    return _checked(found, path.name, path)


def gguf_sampling(metadata: Metadata, path: Path) -> SamplingDefaults | None:
    """Return the settings of a GGUF file's `general.sampling` keys; None if it has none."""
    found: dict[str, Any] = {}
    for name, key in GGUF_KEYS.items():
        if key in metadata:
            found[name] = metadata.get_float(key)
    return _checked(found, "the GGUF file's general.sampling keys", path)


def fallback_sampling(parameters: int) -> SamplingDefaults:
    """Return the settings for a model whose files recommend nothing, by its parameters."""
    if parameters < SMALL_PARAMETERS:
        return SamplingDefaults(SMALL_FALLBACK, "headroom's own for models below 1B parameters")
    return SamplingDefaults(FALLBACK, "headroom's own, since the model's files have none")


def _checked(found: Mapping[str, Any], source: str, path: Path) -> SamplingDefaults | None:
    """Return the settings that were found, all of which must be numbers; None if there are none."""
    if not found:
        return None
    for name, value in found.items():
        if not _is_finite(value):
            shown = repr(value)[:40]
            raise FormatError(f"{path}: the sampling setting {name} is {shown}, not a number.")
    # Some files write -1 for "no limit"; headroom writes 0.
    settings = {
        name: max(int(value), 0) if name in WHOLE_NUMBERS else float(value)
        for name, value in found.items()
    }
    return SamplingDefaults(settings, source)


def _is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
