"""Small synthesised models of every family, written without any package but headroom's own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from headroom.families.synth.recipe import Recipe, cut, find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf


def _recipe(family: str, size: str = "tiny", **dims: int) -> Recipe:
    recipe = find_recipe(family, size)
    changed = replace(recipe, dims=replace(recipe.dims, **dims))
    return replace(changed, rope_dims=dims.get("full_head_dim", recipe.rope_dims))


# "wide" ones have the head sizes of published models, for which fused kernels are written.
MODELS: Mapping[str, Recipe] = MappingProxyType(
    {
        "llama": _recipe("llama"),
        "qwen3": _recipe("qwen3"),
        "qwen3moe": _recipe("qwen3moe"),
        "qwen35": _recipe("qwen35"),
        "qwen35-wide": _recipe("qwen35", state_dim=128),
        "qwen35moe": _recipe("qwen35moe"),
        "qwen35moe-wide": _recipe("qwen35moe", state_dim=128),
        "laguna": _recipe("laguna"),
        "laguna-value-gate": _recipe("laguna", "tiny-value-gate"),
        "gemma4": _recipe("gemma4"),
        "gemma4-wide": _recipe("gemma4", head_dim=256, full_head_dim=512),
        "gemma4-moe": _recipe("gemma4", "tiny-moe"),
        "gemma4-e4b": _recipe("gemma4", "tiny-e4b"),
        "gemma4-e2b": _recipe("gemma4", "tiny-e2b"),
    }
)


# One of each sort of layer: what the whole models repeat.
FEW_LAYERS: Mapping[str, int] = MappingProxyType(
    {"llama": 2, "qwen3": 2, "qwen3moe": 3, "qwen35": 4, "qwen35moe": 4, "laguna": 5}
    | {"gemma4": 6, "gemma4-e4b": 8, "gemma4-e2b": 7}
)


def write_model(name: str, mix: str, folder: Path, *, few_layers: bool = False) -> Path:
    """Write one of the models with its matrices in a mix of types, whole or with few layers."""
    path, recipe = folder / f"{name}-{mix}.gguf", MODELS[name]
    if few_layers:
        family = recipe.dims.architecture
        layers = FEW_LAYERS.get(name, FEW_LAYERS[family])
        recipe = replace(recipe, dims=cut(recipe.dims, layers))
    write_gguf(Source(recipe, seed=3), path, mix)
    return path
