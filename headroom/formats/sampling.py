"""SamplingDefaults: the sampling settings that a model's own files recommend."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headroom.errors import FormatError
from headroom.formats.metadata import Metadata

# The names of sampling settings, and how generation_config.json and GGUF files call them.
CONFIG_KEYS = {
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
# For files that recommend nothing. Temperature 1 over the whole vocabulary, the neutral setting,
# makes small models talk nonsense; these are close to what other programs use for them.
FALLBACK = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling settings by name, and where they come from."""

    settings: Mapping[str, float] = field(default_factory=lambda: dict(FALLBACK))
    source: str = "headroom's own, since the model's files have none"


def config_sampling(config: Mapping[str, Any], path: Path) -> SamplingDefaults:
    """Return the settings of a generation_config.json; greedy where it turns sampling off."""
    found = {name: config[key] for name, key in CONFIG_KEYS.items() if config.get(key) is not None}
    if config.get("do_sample") is False:
        found = {**found, "temperature": 0}
    return _checked(found, path.name, path)


def gguf_sampling(metadata: Metadata, path: Path) -> SamplingDefaults:
    """Return the settings of a GGUF file's `general.sampling` keys."""
    found: dict[str, Any] = {}
    for name, key in GGUF_KEYS.items():
        if key in metadata:
            found[name] = metadata.get_float(key)
    return _checked(found, "the GGUF file's general.sampling keys", path)


def _checked(found: Mapping[str, Any], source: str, path: Path) -> SamplingDefaults:
    """Return settings that are numbers; the fallback if there are none."""
    if not found:
        return SamplingDefaults()
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(f"{path}: the sampling setting {name} is {value!r}, not a number.")
    # Some files write -1 for "no limit", which is 0 here.
    settings = {
        name: max(int(value), 0) if name in WHOLE_NUMBERS else float(value)
        for name, value in found.items()
    }
    return SamplingDefaults(settings, source)
