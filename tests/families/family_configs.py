"""Configurations of small models of every family, and random weights for all their parameters."""

import math
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LagunaConfig,
    LagunaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.tiny import VOCAB

# Columns of all matrices are multiples of 32, so that every small block type can hold them.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}


def llama(**changes: Any) -> LlamaForCausalLM:
    """A tied Llama."""
    rope = {"rope_type": "default", "rope_theta": 1e5}
    settings = COMMON | {"tie_word_embeddings": True, "rope_parameters": rope}
    return _build(LlamaForCausalLM, LlamaConfig(**settings | changes))


def mixtral(**changes: Any) -> MixtralForCausalLM:
    """A Llama with routed experts in every layer."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    settings = COMMON | experts | {"tie_word_embeddings": False, "rope_parameters": rope}
    return _build(MixtralForCausalLM, MixtralConfig(**settings | changes))


def mistral(**changes: Any) -> MistralForCausalLM:
    """Mistral 7B's type: every layer has a window."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    settings = COMMON | {"sliding_window": 9, "rope_parameters": rope}
    return _build(MistralForCausalLM, MistralConfig(**settings | changes))


def ministral(**changes: Any) -> MinistralForCausalLM:
    """Ministral 8B's type: windows in some layers."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    rope = {"rope_type": "default", "rope_theta": 1e4}
    settings = COMMON | {"sliding_window": 9, "layer_types": kinds, "rope_parameters": rope}
    return _build(MinistralForCausalLM, MinistralConfig(**settings | changes))


def ministral3(mscale_all_dim: float = 1.0, **changes: Any) -> Ministral3ForCausalLM:
    """Ministral 3's type: YaRN, and queries that grow beyond the original context."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 16.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 256, "mscale": 1.0,
        "mscale_all_dim": mscale_all_dim, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    settings = COMMON | {"tie_word_embeddings": True, "rope_parameters": rope}
    return _build(Ministral3ForCausalLM, Ministral3Config(**settings | changes))


def smollm3(**changes: Any) -> SmolLM3ForCausalLM:
    """A tied model whose fourth layer of five does not rotate."""
    rope = {"rope_type": "default", "rope_theta": 5e6}
    settings = COMMON | {
        "num_hidden_layers": 5, "tie_word_embeddings": True, "rope_parameters": rope,
    }  # fmt: skip
    return _build(SmolLM3ForCausalLM, SmolLM3Config(**settings | changes))


def glm4_moe(**changes: Any) -> Glm4MoeForCausalLM:
    """A GLM-4.5 whose first layer is dense; half of each head is rotated."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    settings = COMMON | {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
        "attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False, "rope_parameters": rope,
    }  # fmt: skip
    return _build(Glm4MoeForCausalLM, Glm4MoeConfig(**settings | changes))


def gpt_oss(**changes: Any) -> GptOssForCausalLM:
    """A gpt-oss whose YaRN is blended between fractions of frequencies."""
    rope = {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 64, "truncate": False,
    }  # fmt: skip
    settings = COMMON | {
        "num_hidden_layers": 4, "sliding_window": 9, "num_local_experts": 8,
        "num_experts_per_tok": 3, "tie_word_embeddings": False, "rope_parameters": rope,
    }  # fmt: skip
    return _build(GptOssForCausalLM, GptOssConfig(**settings | changes))


def qwen3(**changes: Any) -> Qwen3ForCausalLM:
    """A Qwen3 whose heads together are wider than a token."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    settings = COMMON | {"tie_word_embeddings": True, "rope_parameters": rope}
    return _build(Qwen3ForCausalLM, Qwen3Config(**settings | changes))


def qwen3_moe(**changes: Any) -> Qwen3MoeForCausalLM:
    """A Qwen3 with routed experts in every layer, their weights made to sum to one."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    more = {"tie_word_embeddings": False, "norm_topk_prob": True, "rope_parameters": rope}
    return _build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**COMMON | EXPERTS | more | changes))


def _qwen35_settings(key_heads: int, value_heads: int, state_dim: int) -> dict[str, Any]:
    return COMMON | {
        "num_hidden_layers": 8,
        "tie_word_embeddings": False,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": state_dim,
        "linear_value_head_dim": state_dim,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }


def qwen35(
    key_heads: int = 2, value_heads: int = 6, state_dim: int = 32, **changes: Any
) -> Qwen3_5ForCausalLM:
    """Gated linear attention with full attention in every fourth of eight layers."""
    settings = _qwen35_settings(key_heads, value_heads, state_dim)
    return _build(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**settings | changes))


def qwen35_moe(
    key_heads: int = 2, value_heads: int = 4, state_dim: int = 32, **changes: Any
) -> Qwen3_5MoeForCausalLM:
    """Qwen3.5 with routed experts and a gated shared expert in every layer."""
    settings = _qwen35_settings(key_heads, value_heads, state_dim) | EXPERTS
    settings |= {"shared_expert_intermediate_size": 64}
    del settings["intermediate_size"]
    return _build(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**settings | changes))


def laguna(
    gating: bool | str = True, attention_factor: float | None = 1.0, **changes: Any
) -> LagunaForCausalLM:
    """Full layers with YaRN and 4 heads, window layers with 6; the first layer is dense."""
    yarn = {
        "rope_type": "yarn", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "factor": 2.0,
        "beta_fast": 16.0, "beta_slow": 1.0, "original_max_position_embeddings": 256,
    }  # fmt: skip
    if attention_factor is not None:
        yarn["attention_factor"] = attention_factor
    plain = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    full = [index % 4 == 0 for index in range(8)]
    settings = COMMON | EXPERTS | {
        "num_hidden_layers": 8,
        "num_attention_heads_per_layer": [4 if x else 6 for x in full],
        "layer_types": ["full_attention" if x else "sliding_attention" for x in full],
        "mlp_layer_types": ["dense"] + 7 * ["sparse"],
        "sliding_window": 9,
        "gating": gating,
        "shared_expert_intermediate_size": 64,
        "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 0.0,
        "tie_word_embeddings": False,
        "rope_parameters": {"full_attention": yarn, "sliding_attention": plain},
    }  # fmt: skip
    return _build(LagunaForCausalLM, LagunaConfig(**settings | changes))


def gemma3(**changes: Any) -> Gemma3ForCausalLM:
    """Windows in five of six layers, and rotations of full layers that are slowed down."""
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    window = {"rope_type": "default", "rope_theta": 1e4}
    settings = COMMON | {
        "num_hidden_layers": 7,
        "sliding_window": 7,
        "query_pre_attn_scalar": COMMON["head_dim"],
        "rope_parameters": {"full_attention": full, "sliding_attention": window},
        "tie_word_embeddings": True,
    }
    return _build(Gemma3ForCausalLM, Gemma3TextConfig(**settings | changes))


def gemma4(**changes: Any) -> Gemma4ForCausalLM:
    """The 31B type: full layers with wider heads, whose keys are their values."""
    settings = COMMON | {
        "num_hidden_layers": 12,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 7,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "tie_word_embeddings": True,
    }
    return _build(Gemma4ForCausalLM, Gemma4TextConfig(**settings | changes))


def gemma4_moe(**changes: Any) -> Gemma4ForCausalLM:
    """The 26B type: routed experts beside the dense part of every layer."""
    experts = {"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
    return gemma4(num_hidden_layers=6, enable_moe_block=True, **experts, **changes)


def gemma4_small(**changes: Any) -> Gemma4ForCausalLM:
    """The E4B type: inputs of every layer, and last layers that read the cache of others."""
    settings = {
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 6,
    }
    return gemma4(**settings | changes)


def gemma4_smallest(**changes: Any) -> Gemma4ForCausalLM:
    """The E2B type: one key head, another period, and a wider dense part in sharing layers."""
    kinds = ["full_attention" if index % 5 == 4 else "sliding_attention" for index in range(10)]
    settings = {
        "num_hidden_layers": 10,
        "layer_types": kinds,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True,
    }
    return gemma4_small(**settings | changes)


def _build(kind: type[PreTrainedModel], config: Any) -> Any:
    model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    persistent = model.state_dict().keys()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in persistent:
                tensor.copy_(_values(name, torch.randn(tensor.shape, generator=generator), config))
    return model


def _values(name: str, noise: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a parameter's values: far from their initial values, but well conditioned."""
    fan_in, tied = math.sqrt(noise.shape[-1]), config.tie_word_embeddings
    gemma, qwen35 = "gemma" in config.model_type, "qwen3_5" in config.model_type
    less_one = qwen35 or "gemma3" in config.model_type
    if "norm" in name:
        centre = 0.0 if less_one and "linear_attn" not in name else 1.0
        if name == "model.norm.weight" and tied:
            centre += 1 if gemma else 0 if qwen35 else 3
        scale = 0.3 if "gemma4" in config.model_type and "q_norm" in name else 1.0
        # Multiples of 1/1024, so that a conversion may add and subtract one exactly.
        return ((centre + 0.2 * noise) * scale * 1024).round() / 1024
    if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        return 1 + 0.15 * noise
    if name.endswith(("A_log", "dt_bias")):
        return 0.5 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.2 * noise
    if name.endswith("router.proj.weight"):
        return noise  # its input is divided by the root of the width
    if name.endswith(("mlp.gate.weight", "conv1d.weight")):
        return noise / fan_in
    if "embed_tokens_per_layer" in name:
        return noise / math.sqrt(config.hidden_size_per_layer_input)
    if "lm_head" in name:
        return 2 * noise / fan_in
    if "embed_tokens" in name:
        # A tied table is small, so that the layers decide on the next token, not the last one.
        return (1 if gemma else 8 if not tied else 2 if qwen35 else 0.5) * noise / fan_in
    if "in_proj_qkv" in name:
        return noise / fan_in
    return (0.9 if tied and not gemma and not qwen35 else 0.5) * noise / fan_in
