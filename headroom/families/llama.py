"""Llama: grouped attention and a gated feed-forward network in every layer."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headroom.errors import ModelError
from headroom.families.config import (
    AttentionConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from headroom.families.dims import Dims, Facts, common_dims
from headroom.families.family import (
    ANY,
    Family,
    Json,
    Recipe,
    SafetensorsLayout,
    Synthesis,
    TokenizerKind,
    model_config,
    plain_recipe,
)
from headroom.families.rope import stored_divisors
from headroom.families.tensors import plain_layer
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata
from headroom.formats.names import Naming

if TYPE_CHECKING:
    from headroom.families.family import Floats


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a model whose layers are all equal and dense."""
    return common_dims(facts, ffn=facts.size("feed_forward_length"))


def read_config(header: ModelHeader, dims: Dims) -> ModelConfig:
    """Read a Llama model's settings from either format."""
    layer = LayerConfig(
        mixer=AttentionConfig(
            heads=dims.heads,
            kv_heads=dims.kv_heads,
            head_dim=dims.head_dim,
            rope=_rope(header, header.metadata.get_int("rope.dimension_count", dims.head_dim)),
            scale=dims.head_dim**-0.5,
            interleaved=header.format == "gguf",  # its conversion stores rotary pairs side by side
        ),
        ffn=FfnConfig(dims.ffn),
    )
    return model_config(header, dims, (layer,) * dims.layers)


def _rope(header: ModelHeader, dims: int) -> RopeConfig:
    theta = header.metadata.get_float("rope.freq_base", 10000.0)
    return RopeConfig(theta, dims, _divisors(header, theta, dims))


def _divisors(header: ModelHeader, theta: float, dims: int) -> tuple[float, ...]:
    """Return the divisor of each rotary frequency; GGUF files of Llama 3 store all of them."""
    metadata = header.metadata
    if (stored := stored_divisors(header)) is not None:
        return stored
    kind = metadata.get_str("rope.scaling.type", "none")
    if kind == "none":
        return ()
    factor = metadata.get_float("rope.scaling.factor")
    if kind == "linear":
        return (factor,) * (dims // 2)
    if kind == "llama3":
        return tuple(
            _llama3_divisor(theta ** (-2 * i / dims), metadata, factor) for i in range(dims // 2)
        )
    raise ModelError(
        f"{metadata.path}: rotary scaling {kind!r} is not supported for llama.",
        hint="Supported: none, linear, llama3.",
    )


def _llama3_divisor(frequency: float, metadata: Metadata, factor: float) -> float:
    """Return the divisor of one frequency: the factor for slow ones, 1 for fast ones.

    Frequencies between are blended.
    """
    low = metadata.get_float("rope.scaling.low_freq_factor")
    high = metadata.get_float("rope.scaling.high_freq_factor")
    original = metadata.get_float("rope.scaling.original_context_length")
    turns = original * frequency / (2 * math.pi)  # full rotations within the original context
    blend = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1 / ((1 - blend) / factor + blend)


TURNS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
"""
SMOLLM = TokenizerKind(
    model="gpt2",
    pre="smollm",
    template=TURNS + "{%- endif %}\n",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    roles={
        "bos": "<|im_start|>",
        "eos": "<|im_end|>",
        "padding": "<|im_end|>",
        "unknown": "<|endoftext|>",
    },
)


def _recipe(name: str, dims: Dims) -> Recipe:
    return replace(plain_recipe(name, dims), eps=1e-5, theta=1e5)


def _keys(recipe: Recipe) -> Json:
    return {"vocab_size": recipe.dims.vocab, "rope.dimension_count": recipe.rope_dims}


def undo_pairs(part: str, dims: Dims) -> "Callable[[Floats], Floats] | None":
    """Return what puts the rotary pairs of queries and keys half a head apart again."""
    if part not in ("attn_q", "attn_k"):
        return None
    half = dims.head_dim // 2
    return lambda rows: rows.reshape(-1, half, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


FAMILIES = (
    Family(
        naming=Naming(architecture="llama", model_types=("llama",)),
        read_dims=read_dims,
        layer=plain_layer,
        read_config=read_config,
        fixed={
            "hf.hidden_act": ("silu",),
            "hf.attention_bias": (False,),
            "hf.mlp_bias": (False,),
            "expert_count": (0,),
            # Checked in `_divisors`, whose error lists the supported ones.
            "rope.scaling.type": ANY,
            "rope.scaling.factor": ANY,
        },
        known={
            "smollm2-135m": Dims(
                architecture="llama", layers=30, hidden=576, vocab=49152, context=8192, tied=True,
                heads=9, kv_heads=3, head_dim=64, ffn=1536,
            ),
        },
        synthesis=Synthesis(
            model_class="LlamaForCausalLM",
            model_type="llama",
            tiny={
                "tiny": Dims(
                    architecture="llama", layers=4, hidden=256, vocab=1024, context=4096,
                    tied=True, heads=4, kv_heads=2, head_dim=64, ffn=512,
                ),
            },
            tokenizer=lambda vocab: SMOLLM,
            recipe=_recipe,
            keys=_keys,
            layout=SafetensorsLayout(undo=undo_pairs),
        ),
    ),
)  # fmt: skip
