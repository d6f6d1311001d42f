"""config.json of every family, as transformers writes it for the text model alone."""

from typing import Any

from headroom.families.synth.recipe import DRAFT_BLOCK, Recipe
from headroom.families.tables import Dims

Json = dict[str, Any]
# GGUF's name of a family to the class and the model_type of its text model.
CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "laguna": ("LagunaForCausalLM", "laguna"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "dflash": ("DFlashDraftModel", "qwen3"),
}
_KINDS = {
    "full": "full_attention", "window": "sliding_attention", "recurrent": "linear_attention",
}  # fmt: skip


def config_json(recipe: Recipe, dtype: str, tokens: Json) -> Json:
    """Return the settings of a model; `tokens` are the ids of its special tokens."""
    dims = recipe.dims
    name, model_type = CLASSES[recipe.family]
    values: Json = {
        "architectures": [name],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "max_position_embeddings": dims.context,
        "model_type": model_type,
        "num_attention_heads": dims.heads,
        "num_hidden_layers": dims.layers,
        "num_key_value_heads": dims.kv_heads,
        "rms_norm_eps": recipe.eps,
        "rope_parameters": {"rope_theta": recipe.theta, "rope_type": "default"},
        "tie_word_embeddings": dims.tied,
        "vocab_size": dims.vocab,
        **tokens,
    }
    if dims.ffn:
        values["intermediate_size"] = dims.ffn
    values |= _expert_settings(recipe)
    match recipe.family:
        case "qwen35" | "qwen35moe":
            values |= _recurrent_settings(recipe)
        case "laguna":
            values |= _laguna_settings(recipe)
        case "gemma4":
            values |= _gemma_settings(recipe)
        case "dflash":
            values |= _draft_settings(recipe, tokens)
    return dict(sorted(values.items()))


def _expert_settings(recipe: Recipe) -> Json:
    dims = recipe.dims
    if not dims.experts:
        return {}
    values: Json = {"num_experts": dims.experts, "moe_intermediate_size": dims.expert_ffn}
    values["top_k_experts" if recipe.family == "gemma4" else "num_experts_per_tok"] = (
        dims.experts_used
    )
    if dims.shared_ffn:
        values["shared_expert_intermediate_size"] = dims.shared_ffn
    if recipe.family == "qwen3moe":
        values |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return values


def _layer_types(dims: Dims) -> list[str]:
    return [_KINDS[dims.kind(i)] for i in range(dims.layers)]


def _recurrent_settings(recipe: Recipe) -> Json:
    dims = recipe.dims
    return {
        "layer_types": _layer_types(dims),
        "linear_conv_kernel_dim": dims.conv,
        "linear_key_head_dim": dims.state_dim,
        "linear_num_key_heads": dims.state_key_heads,
        "linear_num_value_heads": dims.state_heads,
        "linear_value_head_dim": dims.state_dim,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": list(recipe.sections),
            "partial_rotary_factor": recipe.rope_dims / dims.head_dim,
            "rope_theta": recipe.theta,
            "rope_type": "default",
        },
    }


def _laguna_settings(recipe: Recipe) -> Json:
    dims = recipe.dims
    kinds = [dims.kind(i) for i in range(dims.layers)]
    full: Json = {
        "partial_rotary_factor": recipe.rope_dims / dims.head_dim,
        "rope_theta": recipe.theta,
        "rope_type": "default",
    }
    if (yarn := recipe.yarn) is not None:
        full |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original,
            "beta_fast": yarn.beta_fast,
            "beta_slow": 1.0,
        }
        if yarn.attention_factor is not None:
            full["attention_factor"] = yarn.attention_factor
    window = {
        "partial_rotary_factor": 1.0,
        "rope_theta": recipe.window_theta,
        "rope_type": "default",
    }
    return {
        "gating": "per-element" if dims.gate_each_value else True,
        "layer_types": _layer_types(dims),
        "mlp_layer_types": [
            "dense" if i < dims.dense_layers else "sparse" for i in range(dims.layers)
        ],
        "moe_routed_scaling_factor": recipe.routed_scale,
        "num_attention_heads_per_layer": [
            dims.heads if kind == "full" else dims.window_heads for kind in kinds
        ],
        "rope_parameters": {"full_attention": full, "sliding_attention": window},
        "sliding_window": dims.window,
    }


def _gemma_settings(recipe: Recipe) -> Json:
    dims = recipe.dims
    full = {
        "partial_rotary_factor": 0.25,
        "rope_theta": recipe.theta,
        "rope_type": "proportional",
    }
    values: Json = {
        "attention_k_eq_v": dims.keys_are_values,
        "enable_moe_block": dims.experts > 0,
        "final_logit_softcapping": recipe.softcap,
        "global_head_dim": dims.full_head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": dims.side_width,
        "layer_types": _layer_types(dims),
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


def _draft_settings(recipe: Recipe, tokens: Json) -> Json:
    dims = recipe.dims
    return {
        "block_size": DRAFT_BLOCK,
        "dflash_config": {
            "mask_token_id": tokens.get("mask_token_id"),
            "target_layer_ids": list(recipe.taps),
        },
        "layer_types": _layer_types(dims),
        "sliding_window": dims.window or None,
        "use_sliding_window": dims.window > 0,
    }
