"""Known models: shapes that a plan can be made from before anything is downloaded."""

from dataclasses import replace
from math import prod

from headroom.errors import OptionError
from headroom.formats.quants import F32, QuantType
from headroom.memory.mixes import Mix, find_mix, gets_better, tensor_type
from headroom.memory.shape import LayerShape, ModelShape
from headroom.memory.tables import (
    CONV,
    LAYERS,
    STATE_DIM,
    STATE_KEY_HEADS,
    Dims,
    LayerDims,
    conv_channels,
    outer_tensors,
)

_QWEN35 = Dims(
    architecture="qwen35", layers=64, hidden=5120, vocab=248320, context=262144, heads=24,
    kv_heads=4, head_dim=256, ffn=17408, full_every=4, state_heads=48,
)  # fmt: skip
_QWEN35_MOE = Dims(
    architecture="qwen35moe", layers=40, hidden=2048, vocab=248320, context=262144, heads=16,
    kv_heads=2, head_dim=256, full_every=4, state_heads=32, experts=256, experts_used=8,
    expert_ffn=512, shared_ffn=512,
)  # fmt: skip
_GEMMA4_31B = Dims(
    architecture="gemma4", layers=60, hidden=5376, vocab=262144, context=262144, tied=True,
    heads=32, kv_heads=16, head_dim=256, ffn=21504, full_every=6, window=1024, full_kv_heads=4,
    full_head_dim=512, keys_are_values=True,
)  # fmt: skip
_DRAFT_27B = Dims(
    architecture="dflash", layers=5, hidden=5120, vocab=248320, context=262144, heads=32,
    kv_heads=8, head_dim=128, ffn=17408, taps=5,
)  # fmt: skip

KNOWN: dict[str, Dims] = {
    "smollm2-135m": Dims(
        architecture="llama", layers=30, hidden=576, vocab=49152, context=8192, tied=True,
        heads=9, kv_heads=3, head_dim=64, ffn=1536,
    ),
    "qwen3-0.6b": Dims(
        architecture="qwen3", layers=28, hidden=1024, vocab=151936, context=40960, tied=True,
        heads=16, kv_heads=8, head_dim=128, ffn=3072,
    ),
    "qwen3-30b-a3b": Dims(
        architecture="qwen3moe", layers=48, hidden=2048, vocab=151936, context=40960, heads=32,
        kv_heads=4, head_dim=128, experts=128, experts_used=8, expert_ffn=768,
    ),
    "qwen3.5-27b": _QWEN35,
    "qwen3.6-27b": _QWEN35,
    "qwen3.5-35b-a3b": _QWEN35_MOE,
    "qwen3.6-35b-a3b": _QWEN35_MOE,
    "laguna-xs.2": Dims(
        architecture="laguna", layers=40, hidden=2048, vocab=100352, context=131072, heads=48,
        window_heads=64, kv_heads=8, head_dim=128, ffn=8192, full_every=4, window=512,
        experts=256, experts_used=8, expert_ffn=512, shared_ffn=512,
    ),
    "gemma-4-e4b": Dims(
        architecture="gemma4", layers=42, hidden=2560, vocab=262144, context=131072, tied=True,
        heads=8, kv_heads=2, head_dim=256, ffn=10240, full_every=6, window=512, full_kv_heads=2,
        full_head_dim=512, shared_kv_layers=18, side_width=256,
    ),
    "gemma-4-31b": _GEMMA4_31B,
    "gemma-4-26b-a4b": replace(
        _GEMMA4_31B, layers=30, hidden=2816, heads=16, kv_heads=8, ffn=2112, full_kv_heads=2,
        experts=128, experts_used=8, expert_ffn=704,
    ),
    "qwen3.5-27b-dflash": _DRAFT_27B,
    "qwen3.6-27b-dflash": replace(_DRAFT_27B, window=2048),
    "qwen3.6-35b-a3b-dflash": replace(
        _DRAFT_27B, layers=8, hidden=2048, kv_heads=4, ffn=6144, window=4096
    ),
    "gemma-4-31b-dflash": replace(
        _DRAFT_27B, hidden=5376, vocab=262144, heads=64, ffn=10752, window=2048, taps=6
    ),
}  # fmt: skip


def known_shape(text: str) -> ModelShape:
    """Return the shape that `qwen3.6-35b-a3b:q4_k_m` stands for; drafts are bf16 if not said."""
    name, _, mix_name = text.lower().partition(":")
    dims = KNOWN.get(name)
    if dims is None:
        raise OptionError(f"{name!r} is no known model.", hint=f"Known: {', '.join(KNOWN)}.")
    mix_name = mix_name or ("bf16" if dims.taps else "q4_k_m")
    return shape_of(f"{name}:{mix_name}", dims, find_mix(mix_name))


def tensor_types(dims: Dims, mix: Mix) -> dict[str, tuple[tuple[int, ...], QuantType]]:
    """Return every tensor of a model's file by its name, with its shape and type."""
    table: dict[str, tuple[int, ...]] = dict(outer_tensors(dims))
    for index in range(dims.layers):
        layer = LAYERS[dims.architecture](dims, index)
        table |= {f"blk.{index}.{name}": shape for name, shape in layer.tensors.items()}
    mixers = [name for name in table if "attn_v." in name or "attn_qkv." in name]
    better = {name for i, name in enumerate(mixers) if gets_better(i, len(mixers))}
    for name in table:
        if "ffn_down" in name and gets_better(int(name.split(".")[1]), dims.layers):
            better.add(name)
    return {
        name: (shape, tensor_type(mix, _inner(name), shape, dims.tied, name in better))
        for name, shape in table.items()
    }


def file_bytes(dims: Dims, mix: Mix) -> int:
    """Return the bytes of all tensors of a model's file."""
    return sum(_bytes(shape, quant) for shape, quant in tensor_types(dims, mix).values())


def shape_of(name: str, dims: Dims, mix: Mix) -> ModelShape:
    """Return what the planner needs to know of a model in a mix."""
    types = tensor_types(dims, mix)
    outer = {key: value for key, value in types.items() if not key.startswith("blk.")}

    def size(*keys: str) -> tuple[int, int]:
        held = [outer.pop(key) for key in keys if key in outer]
        return sum(_bytes(*x) for x in held), sum(prod(shape) for shape, _ in held)

    embed, head = size("token_embd.weight"), size("output.weight")
    lookup = size("per_layer_token_embd.weight")
    rest = size(*outer)
    layers = [LAYERS[dims.architecture](dims, index) for index in range(dims.layers)]
    return ModelShape(
        name=name,
        architecture=dims.architecture,
        hidden=dims.hidden,
        vocab=dims.vocab,
        context_limit=dims.context,
        layers=tuple(_layer_shape(dims, layer, i, types) for i, layer in enumerate(layers)),
        embed_bytes=embed[0],
        embed_values=embed[1],
        head_bytes=head[0],
        head_values=head[1],
        lookup_bytes=lookup[0],
        lookup_values=lookup[1],
        norm_bytes=rest[0],
        norm_values=rest[1],
        ffn_width=max(layer.ffn for layer in layers),
        staging_buffers=3 if dims.architecture == "gemma4" else 2,
        taps=dims.taps,
        tap_width=dims.hidden if dims.taps else 0,
    )


def _layer_shape(
    dims: Dims,
    layer: LayerDims,
    index: int,
    types: dict[str, tuple[tuple[int, ...], QuantType]],
) -> LayerShape:
    own = {name: types[f"blk.{index}.{name}"] for name in layer.tensors}
    if not layer.owns_kv:  # files hold these, but nobody loads them
        unused = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
        own = {name: value for name, value in own.items() if name not in unused}
    stacks = [own.pop(name) for name in list(own) if name.endswith("_exps.weight")]
    experts = dims.experts if stacks else 0
    stack_values = sum(prod(shape) for shape, _ in stacks)
    state_values = layer.state_heads * STATE_DIM * STATE_DIM
    channels = conv_channels(layer.state_heads) if layer.state_heads else 0
    inner = layer.state_heads * STATE_DIM
    return LayerShape(
        kind=layer.kind,
        core_bytes=sum(_bytes(*tensor) for tensor in own.values()),
        core_values=sum(prod(shape) for shape, _ in own.values()),
        float_values=sum(prod(shape) for shape, quant in own.values() if quant is F32),
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
        expert_bytes=sum(_bytes(*x) for x in stacks) // experts if stacks else 0,
        expert_values=stack_values // experts if stacks else 0,
        state_values=state_values,
        conv_values=channels * (CONV - 1),
        mixer_width=2 * channels + 2 * inner if state_values else 0,
        verify_values=STATE_KEY_HEADS * STATE_DIM + inner if state_values else 0,
    )


def _inner(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blk.") else name


def _bytes(shape: tuple[int, ...], quant: QuantType) -> int:
    return quant.bytes_for(prod(shape))
