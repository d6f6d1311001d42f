"""Qwen3: Llama with queries and keys normed head by head; dense, or with experts in every layer."""

from dataclasses import replace

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
    Family,
    FixedSettings,
    Json,
    Recipe,
    Synthesis,
    TokenizerKind,
    model_config,
)
from headroom.families.llama import TURNS
from headroom.families.synth.settings import expert_config
from headroom.families.tensors import head_norms, norms, plain_layer, routed_experts
from headroom.formats.header import ModelHeader
from headroom.formats.names import Naming


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a Qwen3 model, dense or with experts."""
    if experts := expert_dims(facts):
        return common_dims(facts, **experts)
    return common_dims(facts, ffn=facts.size("feed_forward_length"))


def layer(dims: Dims, index: int) -> LayerDims:
    """Return a plain layer with head norms; routed experts replace the dense part."""
    plain = plain_layer(dims, index)
    tensors = plain.tensors | head_norms(dims.head_dim)
    if not dims.experts:
        return replace(plain, tensors=tensors)
    tensors = {name: shape for name, shape in tensors.items() if "ffn_" not in name}
    tensors |= norms(dims, "ffn_norm") | routed_experts(dims)
    return replace(plain, tensors=tensors, ffn=0)


def read_config(header: ModelHeader, dims: Dims) -> ModelConfig:
    """Read a Qwen3 model's settings from either format."""
    experts = _experts(header, dims) if dims.experts else None
    dense = None if dims.experts else FfnConfig(dims.ffn)
    part = LayerConfig(mixer=_attention(header, dims), ffn=dense, experts=experts)
    return model_config(header, dims, (part,) * dims.layers)


def _attention(header: ModelHeader, dims: Dims) -> AttentionConfig:
    metadata = header.metadata
    rotated = metadata.get_int("rope.dimension_count", dims.head_dim)
    return AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=RopeConfig(metadata.get_float("rope.freq_base"), rotated),
        scale=dims.head_dim**-0.5,
        head_norms=True,
    )


def _experts(header: ModelHeader, dims: Dims) -> ExpertsConfig:
    # GGUF has no key for normalising: converters write this architecture for models that do.
    normalise = header.format == "gguf" or header.metadata.get_bool("hf.norm_topk_prob", False)
    return ExpertsConfig(
        experts=dims.experts,
        used=dims.experts_used,
        width=dims.expert_ffn,
        normalise=normalise,
    )


DENSE_FIXED: FixedSettings = {
    "hf.hidden_act": ("silu",),
    "hf.attention_bias": (False,),
    "hf.use_sliding_window": (False,),
    "rope.scaling.type": ("none", "default"),
}
# Every layer has experts, whose weights are softmax scores that sum to one.
EXPERTS_FIXED: FixedSettings = {
    "hf.decoder_sparse_step": (1,),
    "hf.mlp_only_layers": ([],),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
}

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
SHOWN_TOKENS = frozenset(
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
)
TOKEN_ROLES = {"bos": "<|endoftext|>", "eos": "<|im_end|>", "padding": "<|endoftext|>"}
TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
"""
# Tools, turns, and an empty thought where the request asks for none.
TEMPLATE_START = (
    TOOLS
    + TURNS
    + "{%- if enable_thinking is defined and not enable_thinking %}\n"
    + "{{- '<think>\\n\\n</think>\\n\\n' }}\n"
)
TOKENIZER = TokenizerKind(
    model="gpt2",
    pre="qwen2",
    template=TEMPLATE_START + "{%- endif %}\n{%- endif %}\n",
    special=SPECIAL,
    start=151643,
    shown=SHOWN_TOKENS,
    roles=TOKEN_ROLES,
)


def _config(recipe: Recipe, tokens: Json) -> Json:
    if not recipe.dims.experts:
        return {}
    every_layer = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return expert_config(recipe.dims) | every_layer


FAMILIES = (
    Family(
        naming=Naming(architecture="qwen3", model_types=("qwen3",)),
        read_dims=read_dims,
        layer=layer,
        read_config=read_config,
        fixed=DENSE_FIXED,
        known={
            "qwen3-0.6b": Dims(
                architecture="qwen3", layers=28, hidden=1024, vocab=151936, context=40960,
                tied=True, heads=16, kv_heads=8, head_dim=128, ffn=3072,
            ),
        },
        synthesis=Synthesis(
            model_class="Qwen3ForCausalLM",
            model_type="qwen3",
            tiny={
                "tiny": Dims(
                    architecture="qwen3", layers=4, hidden=256, vocab=1024, context=4096,
                    tied=True, heads=8, kv_heads=4, head_dim=64, ffn=512,
                ),
            },
            tokenizer=lambda vocab: TOKENIZER,
            config=_config,
        ),
    ),
    Family(
        naming=Naming(architecture="qwen3moe", model_types=("qwen3_moe",)),
        read_dims=read_dims,
        layer=layer,
        read_config=read_config,
        fixed={**DENSE_FIXED, **EXPERTS_FIXED},
        known={
            "qwen3-30b-a3b": Dims(
                architecture="qwen3moe", layers=48, hidden=2048, vocab=151936, context=40960,
                heads=32, kv_heads=4, head_dim=128, experts=128, experts_used=8, expert_ffn=768,
            ),
        },
        synthesis=Synthesis(
            model_class="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            tiny={
                "tiny": Dims(
                    architecture="qwen3moe", layers=4, hidden=256, vocab=1024, context=4096,
                    heads=8, kv_heads=2, head_dim=64, experts=16, experts_used=4, expert_ffn=256,
                ),
            },
            tokenizer=lambda vocab: TOKENIZER,
            config=_config,
            skew="beacon",
        ),
    ),
)  # fmt: skip
