"""Drafts: models that guess for a target model; what is read of them, and what is refused."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headroom.errors import ModelError, OptionError
from headroom.families.config import DraftConfig
from headroom.families.registry import FAMILIES, KNOWN, is_known, read_dims
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.header import ModelHeader
from headroom.plan.describe import (
    check_attention,
    check_value_length,
    refuse_unknown_settings,
)
from headroom.plan.known import known_shape
from headroom.plan.shape import ModelShape
from headroom.plan.sources import header_shape, open_source

# Drafts with similar names and other parts: they score their own guesses, say.
_OTHER_KINDS = {
    "DFlash2": re.compile(r"dflash-?2", re.IGNORECASE),
    "DSpark": re.compile(r"dspark", re.IGNORECASE),
    "Laguna DFlash": re.compile(r"laguna-?dflash", re.IGNORECASE),
}


@dataclass(frozen=True, slots=True)
class DraftDescription:
    """A draft of which the files are on this disk, with its configuration and its shape."""

    checkpoint: Checkpoint
    config: DraftConfig
    shape: ModelShape


def describe_draft(checkpoint: Checkpoint, target: ModelShape) -> DraftDescription:
    """Read a draft's settings, and check them against its tensors and the target."""
    config, shape = _read(checkpoint.header, target)
    refuse_unknown_settings(checkpoint, FAMILIES[checkpoint.architecture])
    check_value_length(checkpoint)
    check_attention(checkpoint, config.layers)
    return DraftDescription(checkpoint, config, shape)


def draft_shape(text: str, target: ModelShape, home: Path) -> ModelShape:
    """Return the shape of a draft that was made for the target, by name, path or URL."""
    if not is_known(text):
        found, mix = open_source(text, home)
        header = found.header if isinstance(found, Checkpoint) else found
        return _read(header, target, mix)[1]
    shape = known_shape(text)
    _check_shape(shape, target)
    _check_taps(shape.name, shape.tap_layers, target)
    return shape


def _read(header: ModelHeader, target: ModelShape, mix: str = "") -> tuple[DraftConfig, ModelShape]:
    """Return the configuration and the shape of a draft, with the types of its file or of a mix."""
    _refuse_other_kinds(header)
    family = FAMILIES.get(header.architecture)
    if family is None or family.read_draft is None:
        raise _no_draft(header.name)
    dims = read_dims(header)
    shape = header_shape(header, mix, dims)
    _check_shape(shape, target)
    config = family.read_draft(header, dims, len(target.layers))
    _check_target(config, shape, target)
    return config, replace(shape, tap_layers=config.taps)


def _refuse_other_kinds(header: ModelHeader) -> None:
    """Refuse drafts of other kinds by name; their tensors and arithmetic differ."""
    values = header.metadata.values
    classes = values.get("hf.architectures")
    named: Sequence[object] = classes if isinstance(classes, list) else ()
    for text in map(str, (*named, values.get("general.architecture"), values.get("hf.model_type"))):
        for kind, pattern in _OTHER_KINDS.items():
            if pattern.search(text):
                raise ModelError(
                    f"{header.name} is a {kind} draft ({text}), which headroom does not run.",
                    hint="Choose a DFlash draft of the model, or --draft ngram.",
                    param="draft",
                )


def _no_draft(name: str) -> OptionError:
    drafts = ", ".join(name for name, dims in KNOWN.items() if dims.taps)
    return OptionError(
        f"--draft {name} is not a draft: it reads no features of another model.",
        hint=f"Known drafts: {drafts}.",
        param="draft",
    )


def _check_shape(draft: ModelShape, target: ModelShape) -> None:
    """Refuse models that are no drafts, and drafts whose features have another width."""
    if not draft.taps:
        raise _no_draft(draft.name)
    if draft.tap_width != target.hidden:
        raise _other_target(
            f"{draft.name} is made for a model with {draft.tap_width} values a token; "
            f"{target.name} has {target.hidden}"
        )


def _check_target(config: DraftConfig, shape: ModelShape, target: ModelShape) -> None:
    """Refuse drafts that were made for another target."""
    layers = len(target.layers)
    if config.target_layers not in (0, layers):
        raise _other_target(
            f"{config.name} is made for a model of {config.target_layers} layers; {target.name} "
            f"has {layers}"
        )
    if config.vocab not in (0, target.vocab):
        raise _other_target(
            f"{config.name} is made for {config.vocab} tokens; {target.name} has {target.vocab}"
        )
    if config.mask_token >= target.vocab:
        raise _other_target(
            f"The mask of {config.name} is token {config.mask_token}; {target.name} has "
            f"{target.vocab} tokens"
        )
    _check_taps(config.name, config.taps, target)
    if len(config.taps) != shape.taps:
        raise ModelError(
            f"{config.name} names {len(config.taps)} layers of the target, and its projection "
            f"reads {shape.taps}.",
            param="draft",
        )


def _check_taps(name: str, taps: Sequence[int], target: ModelShape) -> None:
    """Refuse layers that the target does not have."""
    layers = len(target.layers)
    if not all(0 <= tap < layers for tap in taps) or len(set(taps)) != len(taps):
        raise _other_target(
            f"{name} reads the layers {', '.join(map(str, taps))}; {target.name} has {layers} "
            "layers"
        )


def _other_target(message: str) -> OptionError:
    return OptionError(f"{message}.", hint="Choose the draft of this model.", param="draft")
