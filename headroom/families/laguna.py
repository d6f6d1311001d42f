"""Laguna: gated attention, mostly in windows; routed experts after the first layers."""

from dataclasses import replace
from typing import TYPE_CHECKING

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
    Yarn,
    model_config,
    plain_recipe,
)
from headroom.families.rope import plain_rope, rope_kind, rope_settings, yarn_rope
from headroom.families.synth.settings import (
    expert_config,
    layer_types,
    with_kind_ropes,
    yarn_config,
    yarn_keys,
)
from headroom.families.tensors import (
    attention,
    dense_ffn,
    head_norms,
    norms,
    routed_experts,
    shared_expert,
)
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata
from headroom.formats.names import Naming

if TYPE_CHECKING:
    import numpy as np

    from headroom.families.family import Floats

SIGMOID = 2  # expert_gating_func of a GGUF file
ROUTER_BIAS = "exp_probs_b.bias"


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a Laguna model."""
    layers = facts.layers
    kinds = named_kinds(facts) or _gguf_kinds(facts)
    key = "hf.num_attention_heads_per_layer"
    key = key if key in facts.header.metadata else "attention.head_count"
    heads = facts.sizes(key, layers)
    full = {count for count, kind in zip(heads, kinds, strict=True) if kind == "full"}
    window = {count for count, kind in zip(heads, kinds, strict=True) if kind != "full"}
    if len(full) > 1 or len(window) > 1:
        raise facts.wrong("layers of one kind have different numbers of heads")
    head_dim = facts.size("attention.key_length")
    full_heads = facts.checked("attention.head_count", max(full or window))
    return common_dims(
        facts,
        kinds=kinds,
        window=facts.size("attention.sliding_window") if window else 0,
        heads=full_heads,
        window_heads=facts.checked("attention.head_count", max(window or full)),
        kv_heads=facts.size("attention.head_count_kv"),
        head_dim=head_dim,
        gate_each_value=_gates_each_value(facts, full_heads * head_dim),
        ffn=facts.size("feed_forward_length"),
        dense_layers=_dense_layers(facts),
        **expert_dims(facts, shared=True),
    )


def _gguf_kinds(facts: Facts) -> tuple[LayerKind, ...]:
    """Return the kinds of layers from GGUF's keys, which models without windows do not have."""
    if not facts.size("attention.sliding_window", default=0, least=0):
        return pattern(facts.layers, 1, "window")
    key = "attention.sliding_window_pattern"
    if isinstance(facts.header.metadata.values.get(key, 4), int):
        return pattern(facts.layers, facts.size(key, default=4), "window", 0)
    return window_flags(facts, key) or ()


def _gates_each_value(facts: Facts, values: int) -> bool:
    """Return whether the output has one gate per value: by the gate's tensor, if it is known."""
    rows = facts.rows("layers.0.attn.gate")
    if rows is not None:
        return rows == values
    return facts.header.metadata.values.get("hf.gating") == "per-element"


def _dense_layers(facts: Facts) -> int:
    names = facts.entries("hf.mlp_layer_types", facts.layers)
    if names is None:
        return facts.size("leading_dense_block_count", default=1, least=0)
    dense = sum(1 for name in names if name == "dense")
    if any(name == "dense" for name in names[dense:]):
        raise facts.wrong("dense layers stand between layers of experts")
    return dense


def layer(dims: Dims, index: int) -> LayerDims:
    """Return a layer; full layers and window layers differ in heads, the first ones are dense."""
    full, dense = dims.kind(index) == "full", index < dims.dense_layers
    heads = dims.heads if full else dims.window_heads
    tensors = norms(dims, "attn_norm", "ffn_norm") | head_norms(dims.head_dim)
    tensors |= attention(dims.hidden, heads, dims.kv_heads, dims.head_dim)
    gates = heads * dims.head_dim if dims.gate_each_value else heads
    tensors["attn_gate.weight"] = (gates, dims.hidden)
    if dense:
        tensors |= dense_ffn(dims.hidden, dims.ffn)
    else:
        tensors |= routed_experts(dims) | shared_expert(dims)
        tensors[ROUTER_BIAS] = (dims.experts,)
    return LayerDims(
        tensors=tensors,
        kind="full" if full else "window",
        heads=heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        gate_width=gates,
        ffn=dims.ffn if dense else dims.shared_ffn,
    )


def read_config(header: ModelHeader, dims: Dims) -> ModelConfig:
    """Read a Laguna model's settings from either format."""
    used = {dims.kind(index) for index in range(dims.layers)}
    mixers = {kind: _attention(header, dims, kind) for kind in used}
    experts = _experts(header, dims) if dims.dense_layers < dims.layers else None
    layers = tuple(
        LayerConfig(
            mixer=mixers[dims.kind(index)],
            ffn=FfnConfig(dims.ffn) if index < dims.dense_layers else None,
            experts=None if index < dims.dense_layers else experts,
        )
        for index in range(dims.layers)
    )
    return model_config(header, dims, layers)


def _attention(header: ModelHeader, dims: Dims, kind: LayerKind) -> AttentionConfig:
    full = kind == "full"
    return AttentionConfig(
        heads=dims.heads if full else dims.window_heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=_rope(header, dims.head_dim, kind),
        scale=dims.head_dim**-0.5,
        window=0 if full else dims.window,
        head_norms=True,
        gate="element" if dims.gate_each_value else "head",
    )


def _rope(header: ModelHeader, head_dim: int, kind: LayerKind) -> RopeConfig:
    settings = rope_settings(header, kind)
    scaled = kind == "full" and rope_kind(settings) != "none"
    return yarn_rope(settings, head_dim) if scaled else plain_rope(settings, head_dim)


def _experts(header: ModelHeader, dims: Dims) -> ExpertsConfig:
    metadata = header.metadata
    key = "expert_weights_scale"
    key = key if key in metadata else "hf.moe_routed_scaling_factor"
    cap = "router_logit_softcapping"
    cap = cap if cap in metadata else f"hf.moe_{cap}"
    return ExpertsConfig(
        experts=dims.experts,
        used=dims.experts_used,
        width=dims.expert_ffn,
        scores="sigmoid",
        scale=metadata.get_float(key, 1.0),
        softcap=metadata.get_float(cap, 0.0),
        bias=True,
        shared_width=dims.shared_ffn,
    )


FIXED: FixedSettings = {
    "hf.hidden_act": ("silu",),
    "hf.attention_bias": (False,),
    "hf.gating": (True, "per-head", "per-element"),
    "hf.moe_apply_router_weight_on_input": (False,),
    "expert_gating_func": (SIGMOID,),
    "expert_weights_norm": (True,),
    "expert_shared_count": (1,),
    "attention.sliding_window": ANY,
    "rope.scaling.type": ANY,
    "rope.scaling.factor": ANY,
    "hf.norm_topk_prob": (True,),
    "hf.rope_parameters": ANY,  # one table for each kind of layer
    "hf.moe_router_logit_softcapping": ANY,
    "router_logit_softcapping": ANY,
}

TINY = Dims(
    architecture="laguna", layers=8, hidden=256, vocab=1024, context=4096, heads=4,
    window_heads=8, kv_heads=2, head_dim=64, ffn=512, kinds=pattern(8, 4, "window", 0), window=16,
    experts=16, experts_used=4, expert_ffn=256, shared_ffn=256, dense_layers=1,
)  # fmt: skip

SPECIAL = {
    2: "\u3008|EOS|\u3009", 9: "\u3008|PAD|\u3009", 18: "<think>", 19: "</think>", 20: "<system>",
    21: "</system>", 22: "<user>", 23: "<assistant>", 24: "</assistant>", 25: "</user>",
    26: "<tool_call>", 27: "</tool_call>",
}  # fmt: skip
TOKENIZER = TokenizerKind(
    model="gpt2",
    pre="laguna",
    template="""\
{{- '\u3008|EOS|\u3009' }}
{%- for message in messages %}
{{- '<' + message.role + '>\\n' + message.content + '\\n</' + message.role + '>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<assistant>\\n' }}
{{- '<think>' if enable_thinking is defined and enable_thinking else '</think>' }}
{%- endif %}
""",
    places=SPECIAL,
    shown=frozenset(("<think>", "</think>", "<tool_call>", "</tool_call>")),
    roles={
        "bos": "\u3008|EOS|\u3009",
        "eos": "\u3008|EOS|\u3009",
        "eot": "</assistant>",
        "padding": "\u3008|PAD|\u3009",
    },
)


def _recipe(name: str, dims: Dims) -> Recipe:
    original = dims.context // 32
    yarn = Yarn(32.0, original, 64.0, 1.0)
    if dims.context <= TINY.context:
        # Programs differ in how they read the two last numbers; all agree on these.
        yarn = Yarn(32.0, original, 32.0, None)
    plain = plain_recipe(name, dims)
    return replace(plain, theta=5e5, rope_dims=dims.head_dim // 2, yarn=yarn, routed_scale=2.5)


def _from_config(recipe: Recipe, metadata: Metadata) -> Recipe:
    return with_kind_ropes(recipe, metadata.values.get("hf.rope_parameters"))


def _heads(dims: Dims) -> list[int]:
    kinds = (dims.kind(index) for index in range(dims.layers))
    return [dims.heads if kind == "full" else dims.window_heads for kind in kinds]


def _config(recipe: Recipe, tokens: Json) -> Json:
    dims = recipe.dims
    full: Json = {
        "partial_rotary_factor": recipe.rope_dims / dims.head_dim,
        "rope_theta": recipe.theta,
        "rope_type": "default",
    }
    if recipe.yarn is not None:
        full |= yarn_config(recipe.yarn)
    window = {
        "partial_rotary_factor": 1.0,
        "rope_theta": recipe.window_theta,
        "rope_type": "default",
    }
    return expert_config(dims) | {
        "gating": "per-element" if dims.gate_each_value else True,
        "layer_types": layer_types(dims),
        "mlp_layer_types": [
            "dense" if index < dims.dense_layers else "sparse" for index in range(dims.layers)
        ],
        "moe_routed_scaling_factor": recipe.routed_scale,
        "num_attention_heads_per_layer": _heads(dims),
        "rope_parameters": {"full_attention": full, "sliding_attention": window},
        "sliding_window": dims.window,
    }


def _keys(recipe: Recipe) -> Json:
    dims = recipe.dims
    values: Json = {
        "vocab_size": dims.vocab,
        "attention.head_count": _heads(dims),
        "attention.sliding_window": dims.window,
        "rope.freq_base_swa": recipe.window_theta,
        "rope.dimension_count": recipe.rope_dims,
        "rope.dimension_count_swa": dims.head_dim,
        "leading_dense_block_count": dims.dense_layers,
        "expert_weights_norm": True,
        "expert_weights_scale": recipe.routed_scale,
        "expert_gating_func": SIGMOID,
    }
    return values if recipe.yarn is None else values | yarn_keys(recipe.yarn)


def _vector(name: str, normal: "Floats", source: "np.random.Generator") -> "Floats | None":
    return 0.02 * normal if name == "exp_probs_b.bias" else None


FAMILIES = (
    Family(
        naming=Naming(
            architecture="laguna",
            model_types=("laguna",),
            layer_names=(
                ("attn.gate", "attn_gate", "self_attn.g_proj"),
                ("ffn.score", "exp_probs_b", ""),
                ("ffn.score_bias", "", "mlp.experts.e_score_correction_bias"),
            ),
        ),
        read_dims=read_dims,
        layer=layer,
        read_config=read_config,
        fixed=FIXED,
        known={
            "laguna-xs.2": Dims(
                architecture="laguna", layers=40, hidden=2048, vocab=100352, context=131072,
                heads=48, window_heads=64, kv_heads=8, head_dim=128, ffn=8192,
                kinds=pattern(40, 4, "window", 0), window=512, experts=256, experts_used=8,
                expert_ffn=512, shared_ffn=512, dense_layers=1,
            ),
        },
        synthesis=Synthesis(
            model_class="LagunaForCausalLM",
            model_type="laguna",
            tiny={"tiny": TINY, "tiny-value-gate": replace(TINY, gate_each_value=True)},
            tokenizer=lambda vocab: TOKENIZER,
            recipe=_recipe,
            from_config=_from_config,
            config=_config,
            keys=_keys,
            layout=SafetensorsLayout(bare=("e_score_correction_bias",)),
            skew="bias",
            router_bias=ROUTER_BIAS,
            vector=_vector,
        ),
    ),
)  # fmt: skip
