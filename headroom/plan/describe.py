"""describe(): the family, configuration and shape of a checkpoint, without its weights."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as short

from headroom.errors import ModelError
from headroom.families.config import AttentionConfig, DeltaNetConfig, LayerConfig, ModelConfig
from headroom.families.family import ANY, USUAL, Family
from headroom.families.registry import FAMILIES, RUNNABLE, read_dims
from headroom.formats.checkpoint import Checkpoint
from headroom.plan.shape import ModelShape
from headroom.plan.sources import header_shape, layers_ahead

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A checkpoint that can run, with its configuration and its shape for the planner."""

    checkpoint: Checkpoint
    config: ModelConfig
    shape: ModelShape


def describe(checkpoint: Checkpoint) -> ModelDescription:
    """Read a checkpoint's settings and check its tensors against them."""
    family = FAMILIES.get(checkpoint.architecture)
    if family is not None and family.read_draft is not None:
        raise ModelError(
            f"{checkpoint.path} is a draft, which guesses for another model.",
            hint=f"Run that model with --draft {checkpoint.path}.",
        )
    if family is None or family.read_config is None:
        raise ModelError(
            f"{checkpoint.path} is a {checkpoint.architecture!r} model, which is not supported.",
            hint=f"Supported: {', '.join(RUNNABLE)}.",
        )
    refuse_unknown_settings(checkpoint, family)
    check_value_length(checkpoint)
    header = checkpoint.header
    dims = read_dims(header)
    shape = header_shape(header, dims=dims)
    config = family.read_config(header, dims)
    check_attention(checkpoint, config.layers)
    _check_states(checkpoint, config)
    if dims.mtp_refused:
        log.info("describe: the prediction head (MTP) is not used: %s", dims.mtp_refused)
    elif not dims.mtp and (extra := len(layers_ahead(checkpoint.tensors, dims.layers))):
        log.info("describe: %d layers that predict further ahead are not used", extra)
    return ModelDescription(checkpoint, config, shape)


def refuse_unknown_settings(checkpoint: Checkpoint, family: Family) -> None:
    """Refuse settings that change the arithmetic and that the family does not cover."""
    for key, allowed in {**USUAL, **family.fixed}.items():
        value = checkpoint.metadata.values.get(key)
        if value is None or allowed is ANY or value in allowed:
            continue
        words = ", ".join(map(repr, allowed)) or "a model without it"
        raise ModelError(
            f"{checkpoint.path}: {key} is {short(value)}, which is not supported for "
            f"{family.architecture}.",
            hint=f"Supported: {words}.",
        )


def check_value_length(checkpoint: Checkpoint) -> None:
    """Refuse heads whose values are not as long as their keys: no kernel supports them."""
    metadata = checkpoint.metadata
    for end in ("", "_swa"):
        key, value = (f"attention.{word}_length{end}" for word in ("key", "value"))
        if key in metadata and value in metadata:
            lengths = metadata.get_int(key), metadata.get_int(value)
            if lengths[0] != lengths[1]:
                raise ModelError(
                    f"{checkpoint.path}: {value} is {lengths[1]} and {key} is {lengths[0]}; "
                    "values as long as keys are supported."
                )


def check_attention(checkpoint: Checkpoint, layers: Sequence[LayerConfig]) -> None:
    """Refuse impossible sizes of heads and rotations before anything is allocated by them."""
    mixers = [layer.mixer for layer in layers]
    for attention in (mixer for mixer in mixers if isinstance(mixer, AttentionConfig)):
        if attention.heads % attention.kv_heads:
            raise ModelError(
                f"{checkpoint.path}: {attention.heads} query heads do not share "
                f"{attention.kv_heads} key heads evenly."
            )
        dims = attention.rope.dims
        if dims < 2 or dims % 2 or dims > attention.head_dim:
            raise ModelError(
                f"{checkpoint.path}: {dims} rotary dimensions do not fit heads of "
                f"{attention.head_dim}."
            )
        if attention.rope.divisors and len(attention.rope.divisors) != dims // 2:
            raise ModelError(
                f"{checkpoint.path}: {len(attention.rope.divisors)} rotary factors for "
                f"{dims // 2} frequencies."
            )


def _check_states(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Refuse recurrent layers whose value heads are no multiple of their key heads."""
    mixers = [layer.mixer for layer in config.layers]
    for state in (mixer for mixer in mixers if isinstance(mixer, DeltaNetConfig)):
        if state.value_heads % state.key_heads:
            raise ModelError(
                f"{checkpoint.path}: {state.value_heads} value heads do not share "
                f"{state.key_heads} key heads evenly."
            )
