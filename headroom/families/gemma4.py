"""Gemma 4: norms on both sides of every part; windows, shared caches, per-layer inputs."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headroom.errors import ModelError
from headroom.families.config import (
    AttentionConfig,
    ExpertsConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from headroom.families.dims import (
    Dims,
    Facts,
    LayerDims,
    LayerKind,
    Tensors,
    common_dims,
    expert_dims,
    named_kinds,
    pattern,
    window_flags,
)
from headroom.families.family import (
    ANY,
    Family,
    FixedSettings,
    Json,
    Recipe,
    SafetensorsLayout,
    Synthesis,
    TokenizerKind,
    model_config,
    plain_recipe,
)
from headroom.families.rope import check_scaling, plain_rope, rope_settings, stored_divisors
from headroom.families.synth.settings import expert_config, layer_types, with_kind_ropes
from headroom.families.tensors import (
    GGUF_TOWERS,
    attention,
    dense_ffn,
    expert_stacks,
    head_norms,
    norms,
    outer_tensors,
)
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata
from headroom.formats.names import Naming

if TYPE_CHECKING:
    import numpy as np

    from headroom.families.family import Floats

NAMING = Naming(
    architecture="gemma4",
    model_types=("gemma4", "gemma4_text"),
    tied_by_default=True,
    # Per-layer inputs, from a second embedding table.
    model_names=(
        ("per_layer.embed", "per_layer_token_embd", "embed_tokens_per_layer"),
        ("per_layer.proj", "per_layer_model_proj", "per_layer_model_projection"),
        ("per_layer.norm", "per_layer_proj_norm", "per_layer_projection_norm"),
    ),
    layer_names=(
        ("attn.post_norm", "post_attention_norm", "post_attention_layernorm"),
        ("ffn.norm", "ffn_norm", "pre_feedforward_layernorm"),
        ("ffn.post_norm", "post_ffw_norm", "post_feedforward_layernorm"),
        ("ffn.dense_post_norm", "post_ffw_norm_1", "post_feedforward_layernorm_1"),
        ("ffn.experts_post_norm", "post_ffw_norm_2", "post_feedforward_layernorm_2"),
        ("ffn.experts_norm", "pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
        ("ffn.router", "ffn_gate_inp", "router.proj"),
        ("ffn.router_scale", "ffn_gate_inp.scale", "router.scale"),
        ("ffn.experts_scale", "ffn_down_exps.scale", "router.per_expert_scale"),
        ("ffn.experts.gate_up", "ffn_gate_up_exps", "experts.gate_up_proj"),
        ("ffn.experts.down", "ffn_down_exps", "experts.down_proj"),
        ("per_layer.gate", "inp_gate", "per_layer_input_gate"),
        ("per_layer.proj", "proj", "per_layer_projection"),
        ("per_layer.norm", "post_norm", "post_per_layer_input_norm"),
        ("scale", "layer_output_scale", "layer_scalar"),
    ),
)
PER_LAYER_TABLE = "per_layer_token_embd.weight"


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a Gemma 4 model."""
    layers = facts.layers
    kinds = _kinds(facts)
    full = kinds.index("full") if "full" in kinds else -1
    window = kinds.index("window") if "window" in kinds else full
    ffn = facts.sizes("feed_forward_length", layers)
    shared = facts.size("attention.shared_kv_layers", "hf.num_kv_shared_layers", default=0, least=0)
    if facts.flag("hf.use_double_wide_mlp"):
        ffn = tuple(width * (2 if i >= layers - shared else 1) for i, width in enumerate(ffn))
    per_layer_width = facts.size(
        "embedding_length_per_layer_input", "hf.hidden_size_per_layer_input", default=0, least=0
    )
    experts = expert_dims(facts, used_key="hf.top_k_experts")
    if experts:
        experts["fused_experts"] = not facts.has(".ffn.experts.gate")
    return common_dims(
        facts,
        kinds=kinds,
        window=facts.size("attention.sliding_window"),
        heads=facts.size("attention.head_count"),
        **_heads(facts, full, window),
        keys_are_values=_keys_are_values(facts, full),
        shared_kv_layers=min(shared, layers),
        per_layer_width=per_layer_width,
        ffn=max(ffn),
        ffn_by_layer=ffn if len(set(ffn)) > 1 else (),
        **experts,
    )


def _kinds(facts: Facts) -> tuple[LayerKind, ...]:
    flags = window_flags(facts, "attention.sliding_window_pattern")
    return named_kinds(facts) or (pattern(facts.layers, 6, "window") if flags is None else flags)


def _heads(facts: Facts, full: int, window: int) -> dict[str, int]:
    """Return head sizes and key heads of window layers and of full ones, in either format.

    `full` and `window` are the first layers of their kinds.
    """
    kv = facts.sizes("attention.head_count_kv", facts.layers)
    if "attention.key_length_swa" in facts.header.metadata:  # GGUF
        return {
            "head_dim": facts.size("attention.key_length_swa"),
            "full_head_dim": facts.size("attention.key_length"),
            "kv_heads": max(1, kv[window]),
            "full_kv_heads": max(1, kv[full]),
        }
    own = _layer_overrides(facts, full)
    full_dim = own.get("head_dim", facts.size("hf.global_head_dim", default=512))
    full_kv = own.get("num_key_value_heads", kv[full])
    if facts.flag("hf.attention_k_eq_v"):
        full_kv = facts.size("hf.num_global_key_value_heads", default=full_kv)
    return {
        "head_dim": facts.size("attention.key_length"),
        "full_head_dim": facts.checked("global_head_dim", full_dim),
        "kv_heads": max(1, kv[window]),
        "full_kv_heads": facts.checked("num_global_key_value_heads", full_kv),
    }


def _layer_overrides(facts: Facts, index: int) -> Mapping[str, Any]:
    """Return a config.json's settings of one layer, whose keys are layer numbers like "05"."""
    by_layer = facts.header.metadata.values.get("hf.per_layer_config")
    for key, value in by_layer.items() if isinstance(by_layer, Mapping) else ():
        if isinstance(value, Mapping) and str(key).isdigit() and int(key) == index:
            return value
    return {}


def _keys_are_values(facts: Facts, full: int) -> bool:
    """Return whether full layers use keys as values: by the tensors, if they are known."""
    if facts.header.tensors and full >= 0:
        return f"layers.{full}.attn.v" not in facts.header.tensors
    return facts.flag("hf.attention_k_eq_v")


def layer(dims: Dims, index: int) -> LayerDims:
    """Return a layer; full layers and window layers differ in heads, experts run together with
    the dense part."""
    full, ffn = dims.kind(index) == "full", dims.ffn_width(index)
    kv_heads = dims.full_kv_heads if full else dims.kv_heads
    head_dim = dims.full_head_dim if full else dims.head_dim
    tensors = norms(dims, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    tensors |= attention(dims.hidden, dims.heads, kv_heads, head_dim) | head_norms(head_dim)
    if full and dims.keys_are_values:
        del tensors["attn_v.weight"]
    tensors |= dense_ffn(dims.hidden, ffn) | {"layer_output_scale.weight": (1,)}
    if dims.experts:
        tensors |= norms(dims, "post_ffw_norm_1", "post_ffw_norm_2", "pre_ffw_norm_2")
        tensors |= {
            "ffn_gate_inp.weight": (dims.experts, dims.hidden),
            "ffn_gate_inp.scale": (dims.hidden,),
            "ffn_down_exps.scale": (dims.experts,),
            **expert_stacks(dims),
        }
    if dims.per_layer_width:
        tensors |= norms(dims, "post_norm")
        tensors["inp_gate.weight"] = (dims.per_layer_width, dims.hidden)
        tensors["proj.weight"] = (dims.hidden, dims.per_layer_width)
    return LayerDims(
        tensors=tensors,
        kind="full" if full else "window",
        heads=dims.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        owns_kv=index < dims.layers - dims.shared_kv_layers,
        keys_are_values=full and dims.keys_are_values,
        ffn=ffn,
        post_norms=True,
        per_layer_width=dims.per_layer_width,
    )


def outer(dims: Dims) -> Tensors:
    """Return the tensors outside the layers, with rotary divisors and per-layer inputs."""
    tensors = outer_tensors(dims) | {"rope_freqs.weight": (dims.full_head_dim // 2,)}
    if dims.per_layer_width:
        width = dims.layers * dims.per_layer_width
        tensors[PER_LAYER_TABLE] = (dims.vocab, width)
        tensors["per_layer_model_proj.weight"] = (width, dims.hidden)
        tensors["per_layer_proj_norm.weight"] = (dims.per_layer_width,)
    return tensors


def read_config(header: ModelHeader, dims: Dims) -> ModelConfig:
    """Read a Gemma 4 model's settings from either format."""
    metadata = header.metadata
    ropes = {kind: _rope(header, dims, kind) for kind in {dims.kind(i) for i in range(dims.layers)}}
    layers = tuple(
        LayerConfig(
            mixer=_attention(header, dims, index, ropes[dims.kind(index)]),
            ffn=FfnConfig(dims.ffn_width(index), "gelu"),
            experts=_experts(dims) if dims.experts else None,
            post_norms=True,
            per_layer_width=dims.per_layer_width,
            scaled=True,
        )
        for index in range(dims.layers)
    )
    key = "final_logit_softcapping"
    key = key if key in metadata else f"hf.{key}"
    return model_config(
        header,
        dims,
        layers,
        embed_scale=dims.hidden**0.5,
        keeps_embedding=True,
        softcap=metadata.get_float(key, 0.0),
    )


def _attention(header: ModelHeader, dims: Dims, index: int, rope: RopeConfig) -> AttentionConfig:
    full = dims.kind(index) == "full"
    return AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.full_kv_heads if full else dims.kv_heads,
        head_dim=dims.full_head_dim if full else dims.head_dim,
        rope=rope,
        scale=1.0,
        window=0 if full else dims.window,
        head_norms=True,
        value_norm=True,
        keys_are_values=full and dims.keys_are_values,
        shares=_cache_owner(header, dims, index),
    )


def _cache_owner(header: ModelHeader, dims: Dims, index: int) -> int | None:
    """Return the layer whose cache a layer reads: the last layer of its kind that has a cache.

    None for a layer with its own cache.
    """
    owners = dims.layers - dims.shared_kv_layers
    if index < owners:
        return None
    for owner in reversed(range(owners)):
        if dims.kind(owner) == dims.kind(index):
            return owner
    raise ModelError(
        f"{header.metadata.path}: layer {index} has no cache of its own, and no earlier "
        f"{dims.kind(index)} layer has one."
    )


def _rope(header: ModelHeader, dims: Dims, kind: LayerKind) -> RopeConfig:
    settings = rope_settings(header, kind)
    if kind == "window":
        return plain_rope(settings, dims.head_dim)
    if header.format == "safetensors":
        return _proportional_rope(settings, dims.full_head_dim)
    check_scaling(settings, "none")
    divisors = stored_divisors(header)
    if divisors is None:
        raise ModelError(
            f"{header.metadata.path} has no rope_freqs.weight, which full layers need."
        )
    return RopeConfig(settings.get_float("rope.freq_base"), dims.full_head_dim, divisors)


def _proportional_rope(settings: Metadata, head_dim: int) -> RopeConfig:
    """Return a rotation over whole heads of which only the first frequencies turn."""
    check_scaling(settings, "proportional")
    share = settings.get_float("rope.scaling.partial_rotary_factor", 1.0)
    turning = int(share * head_dim // 2)
    divisors = (1.0,) * turning + (math.inf,) * (head_dim // 2 - turning)
    return RopeConfig(settings.get_float("rope.freq_base"), head_dim, divisors)


def _experts(dims: Dims) -> ExpertsConfig:
    return ExpertsConfig(
        experts=dims.experts,
        used=dims.experts_used,
        width=dims.expert_ffn,
        expert_scales=True,
        activation="gelu",
    )


FIXED: FixedSettings = {
    "hf.hidden_activation": ("gelu_pytorch_tanh",),
    "hf.attention_bias": (False,),
    "hf.use_bidirectional_attention": ("vision",),  # for pictures only; text is causal
    "attention.sliding_window": ANY,
    "expert_gating_func": (1,),  # softmax
    "hf.rope_parameters": ANY,  # one table for each kind of layer
    "hf.final_logit_softcapping": ANY,
    "final_logit_softcapping": ANY,
}

VOCAB = 262144
DENSE_31B = Dims(
    architecture="gemma4", layers=60, hidden=5376, vocab=VOCAB, context=262144, tied=True,
    heads=32, kv_heads=16, head_dim=256, ffn=21504, kinds=pattern(60, 6, "window"), window=1024,
    full_kv_heads=4, full_head_dim=512, keys_are_values=True, fused_experts=True,
)  # fmt: skip
TINY = Dims(
    architecture="gemma4", layers=12, hidden=256, vocab=1024, context=4096, tied=True, heads=4,
    kv_heads=2, head_dim=64, ffn=512, kinds=pattern(12, 6, "window"), window=16, full_kv_heads=1,
    full_head_dim=128, keys_are_values=True, fused_experts=True,
)  # fmt: skip
TINY_E4B = replace(
    TINY, full_kv_heads=2, keys_are_values=False, shared_kv_layers=6, per_layer_width=64
)  # fmt: skip

SPECIAL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>",
    48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>",
    52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>",
    106: "<turn|>",
}  # fmt: skip
TOKENIZER = TokenizerKind(
    model="gemma4",
    pre="gemma4",
    template="""\
{{- bos_token }}
{%- set thinks = enable_thinking is defined and enable_thinking %}
{%- if thinks and messages[0].role != 'system' %}
{{- '<|turn>system\\n<|think|><turn|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<|turn>' + role + '\\n' }}
{%- if thinks and loop.first and role == 'system' %}
{{- '<|think|>' }}
{%- endif %}
{{- message.content + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn>model\\n' }}
{%- if not thinks %}
{{- '<|channel>thought\\n<channel|>' }}
{%- endif %}
{%- endif %}
""",
    places=SPECIAL,
    shown=frozenset(("<|channel>", "<channel|>", "<|think|>")),
    roles={
        "bos": "<bos>",
        "eos": "<eos>",
        "eot": "<turn|>",
        "unknown": "<unk>",
        "padding": "<pad>",
        "mask": "<mask>",
    },
    add_bos=True,
)


def _recipe(name: str, dims: Dims) -> Recipe:
    return replace(plain_recipe(name, dims), rope_dims=dims.full_head_dim, softcap=30.0)


def _from_config(recipe: Recipe, metadata: Metadata) -> Recipe:
    found = with_kind_ropes(recipe, metadata.values.get("hf.rope_parameters"))
    # Whole heads are rotated: a share of the frequencies is 0 instead.
    return replace(found, rope_dims=recipe.dims.full_head_dim)


def _config(recipe: Recipe, tokens: Json) -> Json:
    dims = recipe.dims
    full = {
        "partial_rotary_factor": 0.25,
        "rope_theta": recipe.theta,
        "rope_type": "proportional",
    }
    values = expert_config(dims, used_key="top_k_experts") | {
        "attention_k_eq_v": dims.keys_are_values,
        "enable_moe_block": dims.experts > 0,
        "final_logit_softcapping": recipe.softcap,
        "global_head_dim": dims.full_head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": dims.per_layer_width,
        "layer_types": layer_types(dims),
        "num_kv_shared_layers": dims.shared_kv_layers,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_theta": recipe.window_theta, "rope_type": "default"},
        },
        "sliding_window": dims.window,
        "use_double_wide_mlp": bool(dims.ffn_by_layer),
        "vocab_size_per_layer_input": dims.vocab,
    }
    if dims.keys_are_values:
        values["num_global_key_value_heads"] = dims.full_kv_heads
    if dims.ffn_by_layer:
        values["intermediate_size"] = min(dims.ffn_by_layer)
    return values


def _keys(recipe: Recipe) -> Json:
    dims = recipe.dims
    kinds = [dims.kind(index) for index in range(dims.layers)]
    kv_heads = [dims.full_kv_heads if kind == "full" else dims.kv_heads for kind in kinds]
    return {
        "attention.head_count_kv": kv_heads if len(set(kv_heads)) > 1 else dims.kv_heads,
        "attention.key_length": dims.full_head_dim,
        "attention.value_length": dims.full_head_dim,
        "attention.key_length_swa": dims.head_dim,
        "attention.value_length_swa": dims.head_dim,
        "attention.sliding_window": dims.window,
        "attention.sliding_window_pattern": [kind == "window" for kind in kinds],
        "attention.shared_kv_layers": dims.shared_kv_layers,
        "rope.freq_base_swa": recipe.window_theta,
        "rope.dimension_count": dims.full_head_dim,
        "rope.dimension_count_swa": dims.head_dim,
        "embedding_length_per_layer_input": dims.per_layer_width,
        "final_logit_softcapping": recipe.softcap,
    }


def _vector(name: str, normal: "Floats", source: "np.random.Generator") -> "Floats | None":
    import numpy as np

    if name == "rope_freqs.weight":  # the first quarter of a head's pairs turns
        kept = np.arange(len(normal)) < len(normal) // 4
        return np.where(kept, np.float32(1), np.float32(1e30))
    if name == "attn_q_norm.weight":
        return 0.3 * (1 + 0.1 * normal)  # this family does not scale scores
    if name == "ffn_gate_inp.weight":
        return normal  # its input is divided by the root of the width
    return None


def _spread(name: str, dims: Dims) -> float | None:
    # Rows of this table are looked up and multiplied by the root of their width.
    return float(dims.per_layer_width**-0.5) if name == PER_LAYER_TABLE else None


FAMILIES = (
    Family(
        naming=NAMING,
        read_dims=read_dims,
        layer=layer,
        outer=outer,
        lookup_tables=(PER_LAYER_TABLE,),
        unused_parts=(*GGUF_TOWERS, "vision_tower.", "audio_tower.", "embed_vision.",
                      "embed_audio.", "multi_modal_projector."),
        read_config=read_config,
        fixed=FIXED,
        keeps_embedding=True,
        known={
            "gemma-4-e4b": Dims(
                architecture="gemma4", layers=42, hidden=2560, vocab=VOCAB, context=131072,
                tied=True, heads=8, kv_heads=2, head_dim=256, ffn=10240,
                kinds=pattern(42, 6, "window"), window=512, full_kv_heads=2, full_head_dim=512,
                shared_kv_layers=18, per_layer_width=256,
            ),
            "gemma-4-31b": DENSE_31B,
            "gemma-4-26b-a4b": replace(
                DENSE_31B, layers=30, kinds=pattern(30, 6, "window"), hidden=2816, heads=16,
                kv_heads=8, ffn=2112, full_kv_heads=2, experts=128, experts_used=8, expert_ffn=704,
            ),
        },
        synthesis=Synthesis(
            model_class="Gemma4ForCausalLM",
            model_type="gemma4_text",
            tiny={
                "tiny": TINY,
                "tiny-moe": replace(TINY, experts=16, experts_used=4, expert_ffn=256),
                "tiny-e4b": TINY_E4B,
                "tiny-e2b": replace(
                    TINY_E4B, layers=10, kinds=pattern(10, 5, "window"), shared_kv_layers=5,
                    ffn=1024, ffn_by_layer=(512,) * 5 + (1024,) * 5,
                ),
            },
            tokenizer=lambda vocab: TOKENIZER,
            recipe=_recipe,
            from_config=_from_config,
            config=_config,
            keys=_keys,
            layout=SafetensorsLayout(
                bare=("experts.gate_up_proj", "experts.down_proj", "router.scale",
                      "router.per_expert_scale", "layer_scalar"),
                stacked_experts=True,
            ),
            last_layer_is_full=True,
            vector=_vector,
            spread=_spread,
        ),
    ),
)  # fmt: skip
