"""Recipes of synthesised models: by a named size, or from a config.json."""

from dataclasses import replace
from pathlib import Path

from headroom.errors import OptionError
from headroom.families.dims import Dims
from headroom.families.family import Family, Recipe
from headroom.families.registry import FAMILIES, NAMINGS, find_family, read_dims
from headroom.formats.read_header import safetensors_header
from headroom.formats.safetensors import read_json


def chosen_family(name: str) -> Family:
    """Return the family that a user names, or refuse the name with a list of all families."""
    if name not in FAMILIES:
        raise OptionError(
            f"{name!r} is no model family.",
            hint=f"Families: {', '.join(FAMILIES)}.",
            param="family",
        )
    return FAMILIES[name]


def find_recipe(family: str, size: str, layers: int = 0) -> Recipe:
    """Return the recipe of a named size, cut to its first layers where a number is given."""
    found = chosen_family(family)
    sizes = {**found.synthesis.tiny, **found.known}
    name = size.lower()
    if name not in sizes:
        raise OptionError(
            f"{size!r} is no size of {family}.", hint=f"Sizes: {', '.join(sizes)}.", param="size"
        )
    return found.synthesis.recipe(name, cut(sizes[name], layers))


def read_recipe(family: str, config: Path, layers: int = 0) -> Recipe:
    """Return the recipe of a config.json as transformers writes it."""
    synthesis = chosen_family(family).synthesis
    name = config.absolute().parent.name
    header = safetensors_header(read_json(config), config, (), name, NAMINGS)
    if header.architecture != family:
        raise OptionError(
            f"{config} describes a {header.architecture!r} model, not {family!r}.", param="config"
        )
    metadata = header.metadata
    recipe = synthesis.recipe(header.name, cut(read_dims(header), layers))
    share = metadata.get_float("rope.scaling.partial_rotary_factor", 0)
    recipe = replace(
        recipe,
        eps=metadata.get_float("attention.layer_norm_rms_epsilon", recipe.eps),
        theta=metadata.get_float("rope.freq_base", recipe.theta),
        rope_dims=int(share * recipe.dims.head_dim) if share else recipe.rope_dims,
    )
    return synthesis.from_config(recipe, metadata)


def with_mtp(recipe: Recipe) -> Recipe:
    """Return the recipe of the model with a layer that predicts further ahead."""
    return replace(recipe, dims=replace(recipe.dims, mtp=True))


def cut(dims: Dims, layers: int) -> Dims:
    """Return a model's first layers; 0 means all.

    The pattern of kinds stays, and a layer that reads another's cache keeps one to read from.
    """
    if not layers or layers == dims.layers:
        return dims
    if not 1 <= layers < dims.layers:
        raise OptionError(
            f"--layers is {layers}; the model has {dims.layers} layers.",
            hint=f"Choose 1 to {dims.layers}.",
            param="layers",
        )
    kinds = dims.kinds[:layers]
    if find_family(dims.architecture).synthesis.last_layer_is_full:
        kinds = (*kinds[:-1], "full")
    period = dims.kinds.index("full") + 1 if "full" in dims.kinds else dims.layers
    shared = max(0, min(dims.shared_kv_layers, layers - period))
    widths = dims.ffn_by_layer
    if widths:
        widths = (min(widths),) * (layers - shared) + (max(widths),) * shared
    return replace(dims, layers=layers, kinds=kinds, shared_kv_layers=shared, ffn_by_layer=widths)
