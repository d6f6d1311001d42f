"""Llama: grouped attention and a gated feed-forward network in every layer.

Mixtral is Llama with routed experts, in GGUF files under the same name.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headroom.errors import ModelError
from headroom.families.config import (
    AttentionConfig,
    ExpertsConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from headroom.families.dims import Dims, Facts, LayerDims, common_dims, expert_dims
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
from headroom.families.tensors import attention, norms, plain_layer, routed_experts
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata
from headroom.formats.names import Naming

if TYPE_CHECKING:
    from headroom.families.family import Floats


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a model whose layers are all equal: dense, or with experts."""
    if experts := expert_dims(facts, width_keys=("feed_forward_length",)):
        return common_dims(facts, **experts)
    return common_dims(facts, ffn=facts.size("feed_forward_length"))


def layer(dims: Dims, index: int) -> LayerDims:
    """Return a plain layer; routed experts replace the dense part."""
    plain = plain_layer(dims, index)
    if not dims.experts:
        return plain
    tensors = norms(dims, "attn_norm", "ffn_norm") | routed_experts(dims)
    tensors |= attention(dims.hidden, dims.heads, dims.kv_heads, dims.head_dim)
    return replace(plain, tensors=tensors, ffn=0)


def read_config(header: ModelHeader, dims: Dims) -> ModelConfig:
    """Read a Llama model's settings from either format."""
    part = LayerConfig(
        mixer=AttentionConfig(
            heads=dims.heads,
            kv_heads=dims.kv_heads,
            head_dim=dims.head_dim,
            rope=_rope(header, header.metadata.get_int("rope.dimension_count", dims.head_dim)),
            scale=dims.head_dim**-0.5,
            interleaved=header.format == "gguf",  # its conversion stores rotary pairs side by side
        ),
        ffn=None if dims.experts else FfnConfig(dims.ffn),
        experts=_experts(dims) if dims.experts else None,
    )
    return model_config(header, dims, (part,) * dims.layers)


def _experts(dims: Dims) -> ExpertsConfig:
    return ExpertsConfig(
        experts=dims.experts, used=dims.experts_used, width=dims.expert_ffn, normalise=True
    )


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
MIXTRAL_VOCAB = 32000
MIXTRAL = TokenizerKind(
    model="llama",
    pre="default",
    template="""\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- ' ' + message.content + eos_token }}
{%- else %}
{{- ' [INST] ' + message.content + ' [/INST]' }}
{%- endif %}
{%- endfor %}
""",
    special=("<unk>", "<s>", "</s>"),
    roles={"bos": "<s>", "eos": "</s>", "unknown": "<unk>", "padding": "<unk>"},
    add_bos=True,
)


def _recipe(name: str, dims: Dims) -> Recipe:
    return replace(plain_recipe(name, dims), eps=1e-5, theta=1e6 if dims.experts else 1e5)


def _config(recipe: Recipe, tokens: Json) -> Json:
    dims = recipe.dims
    if not dims.experts:
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": dims.expert_ffn,
        "num_experts_per_tok": dims.experts_used,
        "num_local_experts": dims.experts,
        "sliding_window": None,
    }


def _keys(recipe: Recipe) -> Json:
    dims = recipe.dims
    keys: Json = {"vocab_size": dims.vocab, "rope.dimension_count": recipe.rope_dims}
    if dims.experts:
        keys["feed_forward_length"] = dims.expert_ffn
    return keys


def undo_pairs(part: str, dims: Dims) -> "Callable[[Floats], Floats] | None":
    """Return what puts the rotary pairs of queries and keys half a head apart again."""
    if part not in ("attn_q", "attn_k"):
        return None
    half = dims.head_dim // 2
    return lambda rows: rows.reshape(-1, half, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


FAMILIES = (
    Family(
        naming=Naming(
            architecture="llama",
            model_types=("llama", "mixtral"),
            layer_names=(
                ("ffn.router", "ffn_gate_inp", "block_sparse_moe.gate"),
                # The first GGUF files of Mixtral have one tensor per expert, too.
                ("ffn.experts.{e}.gate", "ffn_gate.{e}", "block_sparse_moe.experts.{e}.w1"),
                ("ffn.experts.{e}.up", "ffn_up.{e}", "block_sparse_moe.experts.{e}.w3"),
                ("ffn.experts.{e}.down", "ffn_down.{e}", "block_sparse_moe.experts.{e}.w2"),
            ),
        ),
        read_dims=read_dims,
        layer=layer,
        read_config=read_config,
        fixed={
            "hf.hidden_act": ("silu",),
            "hf.attention_bias": (False,),
            "hf.mlp_bias": (False,),
            "expert_gating_func": (1,),  # softmax
            "expert_weights_norm": (True,),
            "expert_weights_scale": (0.0, 1.0),
            # Checked in `_divisors`, whose error lists the supported ones.
            "rope.scaling.type": ANY,
            "rope.scaling.factor": ANY,
        },
        known={
            "smollm2-135m": Dims(
                architecture="llama", layers=30, hidden=576, vocab=49152, context=8192, tied=True,
                heads=9, kv_heads=3, head_dim=64, ffn=1536,
            ),
            "mixtral-8x7b": Dims(
                architecture="llama", layers=32, hidden=4096, vocab=MIXTRAL_VOCAB, context=32768,
                heads=32, kv_heads=8, head_dim=128, experts=8, experts_used=2, expert_ffn=14336,
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
                "tiny-moe": Dims(
                    architecture="llama", layers=4, hidden=256, vocab=1024, context=4096,
                    heads=4, kv_heads=2, head_dim=64, experts=8, experts_used=2, expert_ffn=256,
                ),
            },
            tokenizer=lambda vocab: MIXTRAL if vocab == MIXTRAL_VOCAB else SMOLLM,
            recipe=_recipe,
            config=_config,
            keys=_keys,
            layout=SafetensorsLayout(undo=undo_pairs),
        ),
    ),
)  # fmt: skip
