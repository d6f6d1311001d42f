"""describe(): the family, configuration and shape of a checkpoint, without its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from headroom.errors import ModelError
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.tensor import TensorInfo
from headroom.memory.shape import LayerShape, ModelShape
from headroom.models.config import LayerConfig, ModelConfig
from headroom.models.family import Family
from headroom.models.llama import LLAMA

FAMILIES: dict[str, Family] = {family.architecture: family for family in (LLAMA,)}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A checkpoint that was found fit to run."""

    checkpoint: Checkpoint
    config: ModelConfig
    shape: ModelShape


def describe(checkpoint: Checkpoint) -> ModelDescription:
    """Read a checkpoint's settings and check its tensors against them."""
    family = FAMILIES.get(checkpoint.architecture)
    if family is None:
        raise ModelError(
            f"{checkpoint.path} is a {checkpoint.architecture!r} model, which is not supported.",
            hint=f"Supported: {', '.join(FAMILIES)}.",
        )
    _refuse_unknown_settings(checkpoint, family)
    config = family.read_config(checkpoint)
    _check_sizes(checkpoint, config)
    _check_tensors(checkpoint, config)
    return ModelDescription(checkpoint, config, _shape(config, checkpoint.tensors))


def _refuse_unknown_settings(checkpoint: Checkpoint, family: Family) -> None:
    for key, allowed in family.fixed.items():
        value = checkpoint.metadata.values.get(key)
        if value is not None and value not in allowed:
            raise ModelError(
                f"{checkpoint.path}: {key} is {value!r}, which is not supported for "
                f"{family.architecture}.",
                hint=f"Supported: {', '.join(map(repr, allowed))}.",
            )


def _check_sizes(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Refuse settings that no model has, before anything is sized by them."""
    sizes = {"embedding_length": config.hidden, "vocab_size": config.vocab}
    sizes |= {"context_length": config.context_limit, "block_count": len(config.layers)}
    for layer in config.layers[:1]:
        attention = layer.attention
        sizes |= {
            "attention.head_count": attention.heads,
            "attention.key_length": attention.head_dim,
        }
        sizes |= {"attention.head_count_kv": attention.kv_heads}
        sizes |= {
            "rope.dimension_count": attention.rope.dims,
            "feed_forward_length": layer.ffn.width,
        }
    for key, value in sizes.items():
        if value < 1:
            raise ModelError(f"{checkpoint.path}: {key} is {value}; it must be at least 1.")
    for attention in (layer.attention for layer in config.layers):
        if attention.heads % attention.kv_heads:
            raise ModelError(
                f"{checkpoint.path}: {attention.heads} query heads do not share "
                f"{attention.kv_heads} key heads evenly."
            )
        dims = attention.rope.dims
        if dims % 2 or dims > attention.head_dim:
            raise ModelError(
                f"{checkpoint.path}: {dims} rotary dimensions do not fit heads of "
                f"{attention.head_dim}."
            )
        if attention.rope.divisors and len(attention.rope.divisors) != dims // 2:
            raise ModelError(
                f"{checkpoint.path}: {len(attention.rope.divisors)} rotary factors for "
                f"{dims // 2} frequencies."
            )


def _check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    tensors, path = checkpoint.tensors, checkpoint.path
    needed = {"rope_freqs"}
    for name, shape in config.shapes():
        needed.add(name)
        info = tensors.get(name)
        if info is None:
            raise ModelError(f"{path} has no tensor {name!r}, which this model needs.")
        if info.shape != shape:
            raise ModelError(f"{path}: {info.name} is {list(info.shape)}, not {list(shape)}.")
        if not info.quant.runs:
            raise ModelError(f"{path}: {info.name} has type {info.quant}, which is no weight type.")
    for name in tensors:
        # A tensor that the arithmetic would leave out changes the model: a bias, say.
        if name not in needed and not (config.tied and name == "head") and "inv_freq" not in name:
            raise ModelError(f"{path} has a tensor {name!r}, which this family does not use.")


def _shape(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> ModelShape:
    head = None if config.tied else tensors["head"]
    return ModelShape(
        name=config.name,
        architecture=config.architecture,
        hidden=config.hidden,
        vocab=config.vocab,
        context_limit=config.context_limit,
        layers=tuple(
            _layer_shape(layer, config, index, tensors) for index, layer in enumerate(config.layers)
        ),
        embed_bytes=tensors["embed"].nbytes,
        embed_values=prod(tensors["embed"].shape),
        head_bytes=head.nbytes if head else 0,
        head_values=prod(head.shape) if head else 0,
        norm_bytes=4 * config.hidden,  # vectors are kept as f32
        norm_values=config.hidden,
        ffn_width=max(layer.ffn.width for layer in config.layers),
    )


def _layer_shape(
    layer: LayerConfig, config: ModelConfig, index: int, tensors: Mapping[str, TensorInfo]
) -> LayerShape:
    shapes = layer.shapes(config.hidden)
    vectors = sum(prod(shape) for shape in shapes.values() if len(shape) == 1)
    matrices = [
        tensors[f"layers.{index}.{name}"] for name, shape in shapes.items() if len(shape) > 1
    ]
    attention = layer.attention
    return LayerShape(
        kind="window" if attention.window else "full",
        core_bytes=sum(info.nbytes for info in matrices) + 4 * vectors,
        core_values=sum(prod(info.shape) for info in matrices) + vectors,
        float_values=vectors,
        query_heads=attention.heads,
        kv_heads=attention.kv_heads,
        key_dim=attention.head_dim,
        value_dim=attention.head_dim,
        window=attention.window,
        ffn_width=layer.ffn.width,
    )
