"""Tensor tables: the weights of a model family, named and shaped as in its GGUF file."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from headroom.formats.mixes import Mix, gets_better, tensor_type
from headroom.formats.quants import QuantType

LayerKind = Literal["full", "window", "recurrent"]
Types = dict[str, tuple[tuple[int, ...], QuantType]]  # a file's tensors by GGUF's names
Tensors = dict[str, tuple[int, ...]]  # name without "blk.N." and its shape, rows first


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """The dimensions of one model; a family reads those it knows."""

    architecture: str
    layers: int
    hidden: int
    vocab: int
    context: int
    tied: bool = False
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    ffn_by_layer: tuple[int, ...] = ()  # where layers differ
    experts: int = 0
    experts_used: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0  # first layers without experts
    fused_experts: bool = False  # gate and up of all experts lie in one tensor
    kinds: tuple[LayerKind, ...] = ()  # of every layer; empty: all see the whole context
    window: int = 0
    window_heads: int = 0  # query heads of window layers, where they differ
    full_kv_heads: int = 0  # heads of full layers, where they differ
    full_head_dim: int = 0
    shared_kv_layers: int = 0  # last layers that read the cache of others
    keys_are_values: bool = False  # full layers have no value projection
    gate_each_value: bool = False  # output gates are one a value, not one a head
    side_width: int = 0  # per-layer inputs: values of each layer
    state_heads: int = 0  # value heads of recurrent layers
    state_key_heads: int = 16
    state_dim: int = 128  # of their keys and values
    conv: int = 4  # tokens that their convolution sees
    taps: int = 0  # of a draft

    def kind(self, index: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.kinds[index] if self.kinds else "full"

    def ffn_width(self, index: int) -> int:
        """Return the width of a layer's dense feed-forward part."""
        return self.ffn_by_layer[index] if self.ffn_by_layer else self.ffn

    @property
    def state_width(self) -> int:
        """Values of all value heads of a recurrent layer."""
        return self.state_heads * self.state_dim

    @property
    def conv_channels(self) -> int:
        """Channels of a recurrent layer's convolution: queries, keys and values."""
        return 2 * self.state_key_heads * self.state_dim + self.state_width


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDims:
    """One layer: its weights and what the planner must know of its mixer."""

    tensors: Tensors
    kind: LayerKind = "full"
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    owns_kv: bool = True
    ffn: int = 0
    state_heads: int = 0


def pattern(layers: int, every: int, other: LayerKind, offset: int = 1) -> tuple[LayerKind, ...]:
    """Return the kinds of layers of which one of `every` is full, the last of each run or so."""
    return tuple("full" if (index + offset) % every == 0 else other for index in range(layers))


def llama_layer(dims: Dims, index: int) -> LayerDims:
    """Grouped attention and a gated feed-forward part."""
    tensors = _norms(dims, "attn_norm", "ffn_norm") | _attention(
        dims.hidden, dims.heads, dims.kv_heads, dims.head_dim
    )
    return LayerDims(
        tensors=tensors | _ffn(dims.hidden, dims.ffn_width(index)),
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        ffn=dims.ffn_width(index),
    )


def qwen3_layer(dims: Dims, index: int) -> LayerDims:
    """Llama with normed queries and keys; experts instead of the dense part where there are any."""
    plain = llama_layer(dims, index)
    tensors = plain.tensors | _head_norms(dims.head_dim)
    if dims.experts:
        tensors = {name: shape for name, shape in tensors.items() if "ffn_" not in name}
        tensors |= _norms(dims, "ffn_norm") | _experts(dims)
    return LayerDims(
        tensors=tensors,
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        ffn=0 if dims.experts else dims.ffn,
    )


def qwen35_layer(dims: Dims, index: int) -> LayerDims:
    """Gated attention in every fourth layer, gated linear attention in the others."""
    hidden = dims.hidden
    tensors = _norms(dims, "attn_norm", "post_attention_norm")
    if dims.experts:
        tensors |= _experts(dims) | _shared_expert(dims)
        tensors["ffn_gate_inp_shexp.weight"] = (hidden,)
    else:
        tensors |= _ffn(hidden, dims.ffn)
    ffn = dims.shared_ffn or dims.ffn
    if dims.kind(index) == "full":
        tensors |= _attention(hidden, dims.heads, dims.kv_heads, dims.head_dim)
        tensors["attn_q.weight"] = (2 * dims.heads * dims.head_dim, hidden)  # with output gates
        return LayerDims(
            tensors=tensors | _head_norms(dims.head_dim),
            heads=dims.heads,
            kv_heads=dims.kv_heads,
            head_dim=dims.head_dim,
            ffn=ffn,
        )
    inner, channels = dims.state_width, dims.conv_channels
    tensors |= {
        "attn_qkv.weight": (channels, hidden),
        "attn_gate.weight": (inner, hidden),
        "ssm_beta.weight": (dims.state_heads, hidden),
        "ssm_alpha.weight": (dims.state_heads, hidden),
        "ssm_conv1d.weight": (channels, dims.conv),
        "ssm_a": (dims.state_heads,),
        "ssm_dt.bias": (dims.state_heads,),
        "ssm_norm.weight": (dims.state_dim,),
        "ssm_out.weight": (hidden, inner),
    }
    return LayerDims(tensors=tensors, kind="recurrent", ffn=ffn, state_heads=dims.state_heads)


def laguna_layer(dims: Dims, index: int) -> LayerDims:
    """Full layers and layers with a window have other heads; the first are dense."""
    full, dense = dims.kind(index) == "full", index < dims.dense_layers
    heads = dims.heads if full else dims.window_heads
    tensors = _norms(dims, "attn_norm", "ffn_norm") | _head_norms(dims.head_dim)
    tensors |= _attention(dims.hidden, heads, dims.kv_heads, dims.head_dim)
    gates = heads * dims.head_dim if dims.gate_each_value else heads
    tensors["attn_gate.weight"] = (gates, dims.hidden)
    if dense:
        tensors |= _ffn(dims.hidden, dims.ffn)
    else:
        tensors |= _experts(dims) | _shared_expert(dims) | {"exp_probs_b.bias": (dims.experts,)}
    return LayerDims(
        tensors=tensors,
        kind="full" if full else "window",
        heads=heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        ffn=dims.ffn if dense else dims.shared_ffn,
    )


def gemma4_layer(dims: Dims, index: int) -> LayerDims:
    """Full layers have other heads than those with a window; experts beside a dense part."""
    full, ffn = dims.kind(index) == "full", dims.ffn_width(index)
    kv_heads = dims.full_kv_heads if full else dims.kv_heads
    head_dim = dims.full_head_dim if full else dims.head_dim
    tensors = _norms(dims, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    tensors |= _attention(dims.hidden, dims.heads, kv_heads, head_dim) | _head_norms(head_dim)
    if full and dims.keys_are_values:
        del tensors["attn_v.weight"]
    tensors |= _ffn(dims.hidden, ffn) | {"layer_output_scale.weight": (1,)}
    if dims.experts:
        tensors |= _norms(dims, "post_ffw_norm_1", "post_ffw_norm_2", "pre_ffw_norm_2")
        tensors |= {
            "ffn_gate_inp.weight": (dims.experts, dims.hidden),
            "ffn_gate_inp.scale": (dims.hidden,),
            "ffn_down_exps.scale": (dims.experts,),
            **_expert_stacks(dims),
        }
    if dims.side_width:
        tensors |= _norms(dims, "post_norm")
        tensors["inp_gate.weight"] = (dims.side_width, dims.hidden)
        tensors["proj.weight"] = (dims.hidden, dims.side_width)
    return LayerDims(
        tensors=tensors,
        kind="full" if full else "window",
        heads=dims.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        owns_kv=index < dims.layers - dims.shared_kv_layers,
        ffn=ffn,
    )


def dflash_layer(dims: Dims, index: int) -> LayerDims:
    """A Qwen3 layer of a draft, with a window in some layers."""
    return replace(qwen3_layer(dims, index), kind=dims.kind(index))


LAYERS: dict[str, Callable[[Dims, int], LayerDims]] = {
    "llama": llama_layer,
    "qwen3": qwen3_layer,
    "qwen3moe": qwen3_layer,
    "qwen35": qwen35_layer,
    "qwen35moe": qwen35_layer,
    "laguna": laguna_layer,
    "gemma4": gemma4_layer,
    "dflash": dflash_layer,
}


def outer_tensors(dims: Dims) -> Tensors:
    """Return the tensors that belong to no layer."""
    tensors: Tensors = {"output_norm.weight": (dims.hidden,)}
    if dims.taps:
        tensors["fc.weight"] = (dims.hidden, dims.taps * dims.hidden)
        tensors["enc.output_norm.weight"] = (dims.hidden,)
        return tensors  # embedding and head are the target's
    tensors["token_embd.weight"] = (dims.vocab, dims.hidden)
    if not dims.tied:
        tensors["output.weight"] = (dims.vocab, dims.hidden)
    if dims.architecture == "gemma4":
        tensors["rope_freqs.weight"] = (dims.full_head_dim // 2,)
    if dims.side_width:
        width = dims.layers * dims.side_width
        tensors["per_layer_token_embd.weight"] = (dims.vocab, width)
        tensors["per_layer_model_proj.weight"] = (width, dims.hidden)
        tensors["per_layer_proj_norm.weight"] = (dims.side_width,)
    return tensors


def _norms(dims: Dims, *names: str) -> Tensors:
    return {f"{name}.weight": (dims.hidden,) for name in names}


def _head_norms(head_dim: int) -> Tensors:
    return {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}


def _attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> Tensors:
    return {
        "attn_q.weight": (heads * head_dim, hidden),
        "attn_k.weight": (kv_heads * head_dim, hidden),
        "attn_v.weight": (kv_heads * head_dim, hidden),
        "attn_output.weight": (hidden, heads * head_dim),
    }


def _ffn(hidden: int, width: int) -> Tensors:
    return {
        "ffn_gate.weight": (width, hidden),
        "ffn_up.weight": (width, hidden),
        "ffn_down.weight": (hidden, width),
    }


def _experts(dims: Dims) -> Tensors:
    return {"ffn_gate_inp.weight": (dims.experts, dims.hidden), **_expert_stacks(dims)}


def _expert_stacks(dims: Dims) -> Tensors:
    experts, width, hidden = dims.experts, dims.expert_ffn, dims.hidden
    down: Tensors = {"ffn_down_exps.weight": (experts, hidden, width)}
    if dims.fused_experts:
        return {"ffn_gate_up_exps.weight": (experts, 2 * width, hidden)} | down
    return {
        "ffn_gate_exps.weight": (experts, width, hidden),
        "ffn_up_exps.weight": (experts, width, hidden),
    } | down


def _shared_expert(dims: Dims) -> Tensors:
    return {
        "ffn_gate_shexp.weight": (dims.shared_ffn, dims.hidden),
        "ffn_up_shexp.weight": (dims.shared_ffn, dims.hidden),
        "ffn_down_shexp.weight": (dims.hidden, dims.shared_ffn),
    }


def tensor_table(dims: Dims) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model's file by its name."""
    table: dict[str, tuple[int, ...]] = dict(outer_tensors(dims))
    for index in range(dims.layers):
        layer = LAYERS[dims.architecture](dims, index)
        table |= {f"blk.{index}.{name}": shape for name, shape in layer.tensors.items()}
    return table


def tensor_types(dims: Dims, mix: Mix) -> Types:
    """Return every tensor of a model's file by its name, with its shape and type."""
    table = tensor_table(dims)
    mixers = [name for name in table if "attn_v." in name or "attn_qkv." in name]
    better = {name for i, name in enumerate(mixers) if gets_better(i, len(mixers))}
    for name in table:
        if "ffn_down" in name and gets_better(int(name.split(".")[1]), dims.layers):
            better.add(name)
    return {
        name: (shape, tensor_type(mix, inner_name(name), shape, dims.tied, name in better))
        for name, shape in table.items()
    }


def file_bytes(dims: Dims, mix: Mix) -> int:
    """Return the bytes of all tensors of a model's file."""
    return sum(quant.bytes_for(prod(shape)) for shape, quant in tensor_types(dims, mix).values())


def inner_name(name: str) -> str:
    """Return the name of a tensor without the prefix of its layer."""
    return name.split(".", 2)[2] if name.startswith("blk.") else name
