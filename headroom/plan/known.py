"""Shapes of known models, for plans before anything is downloaded."""

from collections.abc import Mapping
from dataclasses import replace

from headroom.errors import OptionError
from headroom.families.registry import KNOWN, find_family, is_known, split_mix
from headroom.formats.mixes import MIXES, find_mix
from headroom.plan.shape import ModelShape
from headroom.plan.shaping import shape_of


def known_shape(text: str, *, mtp: bool = False) -> ModelShape:
    """Return the shape of a model named like `qwen3.6-35b-a3b:q4_k_m`.

    Without a mix, a model is taken as q4_k_m and a draft as bf16. `mtp` asks for a file with a
    prediction head, if the model was published with one: not all files have it.
    """
    name, _, mix_name = text.lower().partition(":")
    dims = KNOWN.get(name)
    if dims is None:
        raise OptionError(f"{name!r} is no known model.", hint=f"Known: {', '.join(KNOWN)}.")
    mix_name = mix_name or ("bf16" if dims.taps else "q4_k_m")
    family = find_family(dims.architecture)
    taps = family.synthesis.recipe(name, dims).taps
    dims = replace(dims, mtp=mtp and family.has_mtp)
    shape = shape_of(f"{name}:{mix_name}", dims, find_mix(mix_name))
    return replace(shape, tap_layers=taps)


def smaller_mixes(text: str) -> Mapping[str, ModelShape]:
    """Return a known model in every mix that is smaller than the named one, largest first."""
    if not is_known(text):
        return {}
    base, mix_name = split_mix(text)
    size = known_shape(text).weight_bytes
    shapes = {f"{base}:{name}": known_shape(f"{base}:{name}") for name in MIXES if name != mix_name}
    smaller = [(key, shape) for key, shape in shapes.items() if shape.weight_bytes < size]
    return dict(sorted(smaller, key=lambda row: -row[1].weight_bytes))
