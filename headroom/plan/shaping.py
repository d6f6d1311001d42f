"""Shaping: from dimensions and tensor types to the bytes and work that the planner counts."""

from math import prod

from headroom.families.dims import Dims, LayerDims
from headroom.families.family import Family
from headroom.families.registry import find_family
from headroom.families.tables import Types, tensor_types
from headroom.families.tensors import inner_name
from headroom.formats.mixes import Mix, kept_in_f32
from headroom.formats.quants import F32, QuantType
from headroom.kernels.types import PRODUCT_TYPES
from headroom.plan.padding import (
    expert_panel_padding,
    expert_tile_padding,
    panel_padding,
    table_tile_padding,
    tile_padding,
)
from headroom.plan.shape import LayerPadding, LayerShape, ModelShape, OuterPadding

# Tensors that a layer does not load if it reads the cache of another layer.
UNUSED_WHERE_SHARED = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")


def shape_of(name: str, dims: Dims, mix: Mix) -> ModelShape:
    """Return the shape of a model whose tensors have the types of a mix."""
    return shape_from(name, dims, tensor_types(dims, mix))


def shape_from(name: str, dims: Dims, types: Types) -> ModelShape:
    """Return the shape of a model whose tensors have these types."""
    outer = {key: value for key, value in types.items() if not key.startswith("blk.")}

    def size(*keys: str) -> tuple[int, int]:
        held = [(key, *outer.pop(key)) for key in keys if key in outer]
        return sum(_held(*x) for x in held), sum(prod(shape) for _, shape, _ in held)

    family = find_family(dims.architecture)
    panels, tiles = _outer_padding(dims, family, outer)
    embed, head = size("token_embd.weight"), size("output.weight")
    lookup = size(*family.lookup_tables)
    outer.pop("rope_freqs.weight", None)  # becomes a setting
    wide = sum(prod(shape) for key, (shape, _) in outer.items() if not kept_in_f32(key, shape))
    rest = size(*list(outer))
    layers = [family.layer(dims, index) for index in range(dims.layers)]
    mtp = None
    if dims.mtp:
        mtp = _layer_shape(dims, family.layer(dims, dims.layers), dims.layers, types)
    return ModelShape(
        name=name,
        architecture=dims.architecture,
        hidden=dims.hidden,
        vocab=dims.vocab,
        context_limit=dims.context,
        context_end=dims.context_end,
        layers=tuple(_layer_shape(dims, layer, i, types) for i, layer in enumerate(layers)),
        embed_bytes=embed[0],
        embed_values=embed[1],
        head_bytes=head[0],
        head_values=head[1],
        lookup_bytes=lookup[0],
        lookup_values=lookup[1],
        norm_bytes=rest[0],
        norm_values=rest[1],
        norm_matrix_values=wide,
        ffn_width=max(layer.ffn for layer in layers),
        staging_buffers=3 if family.keeps_embedding else 2,
        mtp=mtp,
        mtp_refused=dims.mtp_refused,
        side_values=dims.layers * dims.per_layer_width,
        taps=dims.taps,
        tap_width=dims.hidden if dims.taps else 0,
        block=dims.block,
        panels=panels,
        tiles=tiles,
        cpu_only=family.cpu_only,
        packed=any(len(shape) > 1 and quant.block > 1 for shape, quant in types.values()),
        unread_types=_unread(types, experts=False),
        unread_expert_types=_unread(types, experts=True),
    )


def _unread(types: Types, *, experts: bool) -> tuple[str, ...]:
    """Return the types of matrices, or of routed experts, that no product reads as they are."""
    found = {
        quant.name
        for name, (shape, quant) in types.items()
        if len(shape) > 1 and ("_exps." in name) == experts and quant not in PRODUCT_TYPES
    }
    return tuple(sorted(found))


def _outer_padding(dims: Dims, family: Family, outer: Types) -> tuple[OuterPadding, OuterPadding]:
    """Return the bytes that panels and tiles add to weights outside the layers."""
    named = {"embed": "token_embd.weight", "head": "output.weight"}
    unread = {*named.values(), *family.lookup_tables, "rope_freqs.weight"}
    parts = {part: {key: outer[key]} for part, key in named.items() if key in outer}
    if not dims.tied:
        parts.pop("embed", None)  # it is looked up by row, and not multiplied
    parts["norm"] = {key: value for key, value in outer.items() if key not in unread}
    return (
        OuterPadding(**{part: panel_padding(own) for part, own in parts.items()}),
        OuterPadding(**{part: table_tile_padding(own) for part, own in parts.items()}),
    )


def _layer_shape(
    dims: Dims,
    layer: LayerDims,
    index: int,
    types: Types,
) -> LayerShape:
    own = {name: types[key] for name in layer.tensors if (key := f"blk.{index}.{name}") in types}
    if not layer.owns_kv:  # files have these tensors, but they are not loaded
        own = {name: value for name, value in own.items() if name not in UNUSED_WHERE_SHARED}
    stacks = [(name, *own.pop(name)) for name in list(own) if name.endswith("_exps.weight")]
    by_name = {name: (shape, quant) for name, shape, quant in stacks}
    experts = dims.experts if stacks else 0
    recurrent = layer.kind == "recurrent"
    channels, inner = dims.conv_channels, dims.state_width
    return LayerShape(
        kind=layer.kind,
        core_bytes=sum(_held(name, *tensor) for name, tensor in own.items()),
        core_values=sum(prod(shape) for shape, _ in own.values()),
        float_values=sum(prod(x) for name, (x, _) in own.items() if kept_in_f32(name, x)),
        query_heads=layer.heads,
        kv_heads=layer.kv_heads,
        key_dim=layer.head_dim,
        value_dim=layer.head_dim,
        window=dims.window if layer.kind == "window" else 0,
        owns_kv=layer.owns_kv,
        ffn_width=layer.ffn,
        experts=experts,
        experts_used=dims.experts_used if stacks else 0,
        expert_width=dims.expert_ffn if stacks else 0,
        expert_bytes=sum(_held(*x) for x in stacks) // experts if stacks else 0,
        expert_values=sum(prod(shape) for _, shape, _ in stacks) // experts if stacks else 0,
        state_values=inner * dims.state_dim if recurrent else 0,
        conv_values=channels * (dims.conv - 1) if recurrent else 0,
        mixer_width=2 * channels + 2 * inner if recurrent else 0,
        verify_values=channels + 2 * layer.state_heads if recurrent else 0,
        gate_width=layer.gate_width,
        gate_in_queries=layer.gate_in_queries,
        keys_are_values=layer.owns_kv and layer.keys_are_values,
        shared_gate=layer.shared_gate,
        side_width=layer.per_layer_width,
        state_heads=layer.state_heads,
        post_norms=layer.post_norms,
        panels=LayerPadding(panel_padding(own), expert_panel_padding(by_name)),
        tiles=LayerPadding(tile_padding(own), expert_tile_padding(by_name)),
    )


def _held(name: str, shape: tuple[int, ...], quant: QuantType) -> int:
    """Return the bytes of a loaded tensor: vectors become f32, whatever type the file has."""
    return (F32 if kept_in_f32(inner_name(name), shape) else quant).bytes_for(prod(shape))
