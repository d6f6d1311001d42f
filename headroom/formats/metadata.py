"""Metadata: the settings of both formats by GGUF's keys, without the architecture's prefix."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any

from headroom.errors import FormatError
from headroom.formats.names import Namings

# The GGUF keys that a key of config.json becomes; a key without a row becomes "hf.<key>".
CONFIG_KEYS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("block_count",),
    "hidden_size": ("embedding_length",),
    "intermediate_size": ("feed_forward_length",),
    "max_position_embeddings": ("context_length",),
    "vocab_size": ("vocab_size",),
    "num_attention_heads": ("attention.head_count",),
    "num_key_value_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length", "attention.value_length"),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon",),
    "sliding_window": ("attention.sliding_window",),
    "rope_theta": ("rope.freq_base",),
    "num_experts": ("expert_count",),
    "num_local_experts": ("expert_count",),
    "n_routed_experts": ("expert_count",),
    "num_experts_per_tok": ("expert_used_count",),
    "n_shared_experts": ("expert_shared_count",),
    "first_k_dense_replace": ("leading_dense_block_count",),
    "routed_scaling_factor": ("expert_weights_scale",),
    "moe_intermediate_size": ("expert_feed_forward_length",),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length",),
}

# GGUF keys for keys inside rope_parameters and rope_scaling; other keys become
# "rope.scaling.<key>".
ROPE_KEYS = {
    "rope_theta": "rope.freq_base",
    "rope_type": "rope.scaling.type",
    "type": "rope.scaling.type",  # the older spelling
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mrope_section": "rope.dimension_sections",
}


@dataclass(frozen=True, slots=True)
class Metadata:
    """A checkpoint's settings by key. A missing key or a value of another type is an error."""

    values: Mapping[str, object] = field(repr=False)
    path: Path
    tied: bool  # the head is the embedding

    def keys(self) -> Collection[str]:
        """Return all keys."""
        return self.values.keys()

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get_int(self, key: str, default: int | None = None) -> int:
        """Return a whole number; without a default, the key must be set."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, value, "a whole number")
        return value

    def get_float(self, key: str, default: float | None = None) -> float:
        """Return a number; without a default, the key must be set."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, "a number")
        return float(value)

    def get_str(self, key: str, default: str | None = None) -> str:
        """Return a text; without a default, the key must be set."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        """Return true or false; without a default, the key must be set."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def get_ints(
        self, key: str, default: Sequence[int] | None = None, *, count: int | None = None
    ) -> tuple[int, ...]:
        """Return a list of whole numbers; a single number is repeated `count` times."""
        value = self._get(key, default)
        if isinstance(value, int):
            value = [value] * (1 if count is None else count)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self._wrong(key, value, "a list of whole numbers")
        numbers = tuple(value)
        if not all(isinstance(number, int) for number in numbers):
            raise self._wrong(key, value, "a list of whole numbers")
        if count is not None and len(numbers) != count:
            raise FormatError(f"{self.path}: {key} has {len(numbers)} numbers, not {count}.")
        return numbers

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key, default)
        if value is None:
            raise FormatError(f"{self.path} has no key {key!r}, which this model needs.")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> FormatError:
        return FormatError(f"{self.path}: {key} is {short(value)}, not {wanted}.")


def config_values(config: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of a config.json by GGUF's keys; other keys begin with "hf."."""
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, Mapping) else dict(config)
    merged.pop("text_config", None)
    values: dict[str, object] = {}
    for key, value in merged.items():
        if value is None or key in ("rope_parameters", "rope_scaling"):
            continue
        for ours in CONFIG_KEYS.get(key, (f"hf.{key}",)):
            values[ours] = value
    for key in ("rope_scaling", "rope_parameters"):
        values.update(_rope_values(key, merged.get(key)))
    return values


def config_architecture(config: Mapping[str, Any], path: Path, namings: Namings) -> str:
    """Return GGUF's name of the architecture that a config.json describes.

    A model_type that no naming lists is returned as it is.
    """
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    name = config.get("model_type", inner)
    if not isinstance(name, str):
        raise FormatError(f"{path} has no model_type.", hint="It is not a model's config.json.")
    classes = config.get("architectures")
    named = classes if isinstance(classes, list) else []
    for naming in namings.values():
        if any(kind in naming.classes for kind in named):
            return naming.architecture
    for naming in namings.values():
        if name in naming.model_types:
            return naming.architecture
    return name


def _rope_values(key: str, rope: object) -> dict[str, object]:
    if not isinstance(rope, Mapping):
        return {} if rope is None else {f"hf.{key}": rope}
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {f"hf.{key}": rope}  # one table per kind of layer, for families that have kinds
    plain = rope.get("rope_type", rope.get("type")) in (None, "default")
    values = {ROPE_KEYS.get(name, f"rope.scaling.{name}"): value for name, value in rope.items()}
    if plain:
        values.pop("rope.scaling.type", None)
    return {name: value for name, value in values.items() if value is not None}
