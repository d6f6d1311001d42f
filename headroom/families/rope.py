"""Rotary settings that several families have: by kind of layer, YaRN, stored divisors."""

import math
from array import array
from collections.abc import Mapping

from headroom.errors import ModelError
from headroom.families.config import RopeConfig
from headroom.families.dims import LayerKind
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import ROPE_KEYS, Metadata

_HF_KINDS = {"full": "full_attention", "window": "sliding_attention"}
_PLAIN_KEYS = ("rope.freq_base", "rope.dimension_count", "rope.scaling.partial_rotary_factor")
_YARN_KEYS = (
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.finetuned",
)  # fmt: skip


def rope_settings(header: ModelHeader, kind: LayerKind) -> Metadata:
    """Return the rotary settings of one kind of layer, by GGUF's keys for full layers."""
    metadata = header.metadata
    nested = metadata.values.get("hf.rope_parameters")
    if nested is None:
        return Metadata(_gguf_values(metadata, kind), metadata.path, metadata.tied)
    own = nested.get(_HF_KINDS[kind]) if isinstance(nested, Mapping) else None
    if not isinstance(own, Mapping):
        raise ModelError(f"{metadata.path}: rope_parameters has no {_HF_KINDS[kind]!r}.")
    values = {
        ROPE_KEYS.get(key, f"rope.scaling.{key}"): value
        for key, value in own.items()
        if value is not None
    }
    return Metadata(values, metadata.path, metadata.tied)


def _gguf_values(metadata: Metadata, kind: LayerKind) -> dict[str, object]:
    """Return the GGUF keys of one kind of layer without its ending; only full ones are scaled."""
    ours = [key for key in metadata.values if key.startswith("rope.")]
    if kind == "full":
        return {key: metadata.values[key] for key in ours if not key.endswith("_swa")}
    return {key.removesuffix("_swa"): metadata.values[key] for key in ours if key.endswith("_swa")}


def rotated_dims(settings: Metadata, head_dim: int) -> int:
    """Return how many values of a head are rotated."""
    share = settings.get_float("rope.scaling.partial_rotary_factor", 1.0)
    return settings.get_int("rope.dimension_count", int(head_dim * share))


def plain_rope(settings: Metadata, head_dim: int) -> RopeConfig:
    """Return a rotation without any scaling."""
    check_scaling(settings, "none")
    return RopeConfig(settings.get_float("rope.freq_base"), rotated_dims(settings, head_dim))


def yarn_rope(settings: Metadata, head_dim: int, *, may_blend_between: bool = False) -> RopeConfig:
    """Return YaRN's rotation: slow frequencies are divided by the factor, fast ones are kept.

    The indices between which frequencies are blended are rounded to whole numbers. With
    `may_blend_between` they are not if the setting `truncate` is false.
    """
    truncate = "rope.scaling.truncate"
    check_scaling(settings, "yarn", (*_YARN_KEYS, truncate) if may_blend_between else _YARN_KEYS)
    whole = settings.get_bool(truncate, True)
    theta, dims = settings.get_float("rope.freq_base"), rotated_dims(settings, head_dim)
    factor = settings.get_float("rope.scaling.factor")
    original = settings.get_float("rope.scaling.original_context_length")
    fast = settings.get_float("rope.scaling.yarn_beta_fast", 32.0)
    slow = settings.get_float("rope.scaling.yarn_beta_slow", 1.0)
    if not (1 < theta < math.inf and all(0 < x < math.inf for x in (factor, original, fast, slow))):
        raise ModelError(
            f"{settings.path}: rotary base {theta}, factor {factor}, original context {original} "
            f"and betas {fast} and {slow} make no rotation."
        )

    def index(turns: float) -> float:
        """Return the index of the frequency that turns so often in the original context."""
        # Logarithms are subtracted, since a quotient of odd numbers may be 0 or infinite.
        revolutions = math.log(original) - math.log(2 * math.pi) - math.log(turns)
        return dims * revolutions / (2 * math.log(theta))

    first, last = index(fast), index(slow)
    low = max(math.floor(first) if whole else first, 0)
    high = min(math.ceil(last) if whole else last, dims - 1)
    width = max(high - low, 0.001)
    ramps = [min(1.0, max(0.0, (i - low) / width)) for i in range(dims // 2)]
    divisors = tuple(1 / ((1 - ramp) + ramp / factor) for ramp in ramps)
    formula = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    scale = settings.get_float("rope.scaling.yarn_attn_factor", formula)
    return RopeConfig(theta, dims, divisors, scale)


def rope_kind(settings: Metadata) -> str:
    """Return the name of the scaling; "none" where there is none."""
    kind = settings.get_str("rope.scaling.type", "none")
    return "none" if kind == "default" else kind


def check_scaling(settings: Metadata, kind: str, more: tuple[str, ...] = ()) -> None:
    """Refuse a scaling other than `kind`, and settings that are neither plain nor in `more`."""
    if (found := rope_kind(settings)) != kind:
        raise ModelError(
            f"{settings.path}: rotary scaling {found!r} is not supported where {kind!r} is usual."
        )
    known = (*_PLAIN_KEYS, "rope.scaling.type", *more)
    if unknown := [key for key in settings.values if key not in known]:
        raise ModelError(
            f"{settings.path}: rotary setting {unknown[0].rpartition('.')[2]!r} is not supported."
        )


def stored_divisors(header: ModelHeader) -> tuple[float, ...] | None:
    """Return the divisors of rotary frequencies that a file stores; None where it has none."""
    stored = header.tensors.get("rope_freqs")
    if stored is None:
        return None
    return tuple(array("f", stored.data().tobytes()))
