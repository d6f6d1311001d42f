"""GLM-4.5 and its successors: attention with biases; routed experts after the first layers."""

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
from headroom.families.dims import Dims, Facts, LayerDims, common_dims, expert_dims
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
from headroom.families.rope import rotated_dims
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
ROTATED = 0.5  # of a head, where settings do not say


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a GLM-4.5 model."""
    experts = expert_dims(facts)
    if not experts:
        raise facts.wrong("there are no routed experts")
    shared = facts.size("expert_shared_count", default=1)
    return common_dims(
        facts,
        normed_heads=facts.has(".attn.q_norm") or facts.flag("hf.use_qk_norm"),
        ffn=facts.size("feed_forward_length"),
        dense_layers=facts.size("leading_dense_block_count", default=1, least=0),
        shared_ffn=shared * experts["expert_ffn"],
        **experts,
    )


def layer(dims: Dims, index: int) -> LayerDims:
    """Return a layer; the first ones are dense."""
    dense = index < dims.dense_layers
    tensors = norms(dims, "attn_norm", "post_attention_norm")
    tensors |= attention(dims.hidden, dims.heads, dims.kv_heads, dims.head_dim)
    tensors |= {f"attn_{part}.bias": tensors[f"attn_{part}.weight"][:1] for part in "qkv"}
    if dims.normed_heads:
        tensors |= head_norms(dims.head_dim)
    if dense:
        tensors |= dense_ffn(dims.hidden, dims.ffn)
    else:
        tensors |= routed_experts(dims) | shared_expert(dims)
        tensors[ROUTER_BIAS] = (dims.experts,)
    return LayerDims(
        tensors=tensors,
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        ffn=dims.ffn if dense else dims.shared_ffn,
    )


def read_config(header: ModelHeader, dims: Dims) -> ModelConfig:
    """Read a GLM-4.5 model's settings from either format."""
    metadata = header.metadata
    mixer = AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=RopeConfig(metadata.get_float("rope.freq_base"), _rotated(metadata, dims.head_dim)),
        scale=dims.head_dim**-0.5,
        head_norms=dims.normed_heads,
        biases=True,
    )
    experts = ExpertsConfig(
        experts=dims.experts,
        used=dims.experts_used,
        width=dims.expert_ffn,
        scores="sigmoid",
        scale=metadata.get_float("expert_weights_scale", 1.0),
        bias=True,
        shared_width=dims.shared_ffn,
    )
    dense = LayerConfig(mixer=mixer, ffn=FfnConfig(dims.ffn))
    sparse = LayerConfig(mixer=mixer, ffn=None, experts=experts)
    first = min(dims.dense_layers, dims.layers)
    return model_config(header, dims, (dense,) * first + (sparse,) * (dims.layers - first))


def _rotated(metadata: Metadata, head_dim: int) -> int:
    if "rope.scaling.partial_rotary_factor" in metadata or "rope.dimension_count" in metadata:
        return rotated_dims(metadata, head_dim)
    return int(head_dim * metadata.get_float("hf.partial_rotary_factor", ROTATED))


FIXED: FixedSettings = {
    "hf.hidden_act": ("silu",),
    "hf.attention_bias": (True,),
    "hf.partial_rotary_factor": ANY,
    "rope.scaling.partial_rotary_factor": ANY,
    "hf.topk_group": (1,),
    "hf.norm_topk_prob": (True,),
    "expert_gating_func": (SIGMOID,),
    "expert_weights_norm": (True,),
}
TINY = Dims(
    architecture="glm4moe", layers=4, hidden=256, vocab=1024, context=4096, heads=4, kv_heads=2,
    head_dim=64, ffn=512, experts=8, experts_used=2, expert_ffn=256, shared_ffn=256,
    dense_layers=1, normed_heads=True,
)  # fmt: skip
SPECIAL = {
    151329: "<|endoftext|>", 151331: "[gMASK]", 151333: "<sop>", 151335: "<|system|>",
    151336: "<|user|>", 151337: "<|assistant|>", 151338: "<|observation|>", 151350: "<think>",
    151351: "</think>",
}  # fmt: skip
TOKENIZER = TokenizerKind(
    model="gpt2",
    pre="glm4",
    template="""\
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think></think>\\n' }}
{%- endif %}
{%- endif %}
""",
    places=SPECIAL,
    shown=frozenset(("<think>", "</think>")),
    roles={
        "bos": "<|endoftext|>",
        "eos": "<|endoftext|>",
        "eot": "<|user|>",
        "padding": "<|endoftext|>",
    },
)
SMALL_PLACES = dict(enumerate(SPECIAL.values()))


def _tokenizer(vocab: int) -> TokenizerKind:
    """Return the tokenizer of the published size, or one whose special tokens come first."""
    return TOKENIZER if vocab > max(SPECIAL) else replace(TOKENIZER, places=SMALL_PLACES)


def _recipe(name: str, dims: Dims) -> Recipe:
    half = dims.head_dim // 2
    plain = plain_recipe(name, dims)
    return replace(plain, eps=1e-5, theta=1e6, rope_dims=half, routed_scale=2.5)


def _from_config(recipe: Recipe, metadata: Metadata) -> Recipe:
    scale = metadata.get_float("expert_weights_scale", 1.0)
    rope_dims = _rotated(metadata, recipe.dims.head_dim)
    return replace(recipe, rope_dims=rope_dims, routed_scale=scale)


def _config(recipe: Recipe, tokens: Json) -> Json:
    dims = recipe.dims
    return {
        "attention_bias": True,
        "first_k_dense_replace": dims.dense_layers,
        "moe_intermediate_size": dims.expert_ffn,
        "n_routed_experts": dims.experts,
        "n_shared_experts": dims.shared_ffn // dims.expert_ffn,
        "norm_topk_prob": True,
        "num_experts_per_tok": dims.experts_used,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "partial_rotary_factor": recipe.rope_dims / dims.head_dim,
            "rope_theta": recipe.theta,
            "rope_type": "default",
        },
        "routed_scaling_factor": recipe.routed_scale,
        "use_qk_norm": dims.normed_heads,
    }


def _keys(recipe: Recipe) -> Json:
    dims = recipe.dims
    return {
        "vocab_size": dims.vocab,
        "rope.dimension_count": recipe.rope_dims,
        "leading_dense_block_count": dims.dense_layers,
        "expert_shared_count": dims.shared_ffn // dims.expert_ffn,
        "expert_weights_norm": True,
        "expert_weights_scale": recipe.routed_scale,
        "expert_gating_func": SIGMOID,
    }


def _vector(name: str, normal: "Floats", source: "np.random.Generator") -> "Floats | None":
    if name == ROUTER_BIAS:
        return 0.02 * normal
    return 0.1 * normal if name.endswith(".bias") else None


FAMILIES = (
    Family(
        naming=Naming(
            architecture="glm4moe",
            model_types=("glm4_moe",),
            layer_names=(
                ("ffn.norm", "post_attention_norm", "post_attention_layernorm"),
                ("ffn.score", "exp_probs_b", ""),
                ("ffn.score_bias", "", "mlp.gate.e_score_correction_bias"),
                ("ffn.shared.gate", "ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
                ("ffn.shared.up", "ffn_up_shexp", "mlp.shared_experts.up_proj"),
                ("ffn.shared.down", "ffn_down_shexp", "mlp.shared_experts.down_proj"),
            ),
        ),
        read_dims=read_dims,
        layer=layer,
        read_config=read_config,
        fixed=FIXED,
        known={
            "glm-4.5": Dims(
                architecture="glm4moe", layers=92, hidden=5120, vocab=151552, context=131072,
                heads=96, kv_heads=8, head_dim=128, ffn=12288, experts=160, experts_used=8,
                expert_ffn=1536, shared_ffn=1536, dense_layers=3, normed_heads=True,
            ),
            "glm-4.5-air": Dims(
                architecture="glm4moe", layers=46, hidden=4096, vocab=151552, context=131072,
                heads=96, kv_heads=8, head_dim=128, ffn=10944, experts=128, experts_used=8,
                expert_ffn=1408, shared_ffn=1408, dense_layers=1,
            ),
        },
        synthesis=Synthesis(
            model_class="Glm4MoeForCausalLM",
            model_type="glm4_moe",
            tiny={"tiny": TINY, "tiny-air": replace(TINY, normed_heads=False)},
            tokenizer=_tokenizer,
            recipe=_recipe,
            from_config=_from_config,
            config=_config,
            keys=_keys,
            layout=SafetensorsLayout(bare=(".bias", "e_score_correction_bias")),
            skew="bias",
            router_bias=ROUTER_BIAS,
            vector=_vector,
        ),
    ),
)  # fmt: skip
