"""Settings of small models as keys of GGUF files, by family."""

from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from tests.optional import optional

gguf = optional("gguf")

Keys = dict[str, Any]  # without the family's prefix


def plain_config(model: PreTrainedModel) -> Any:
    """Return a model's settings as they are saved; Gemma's class refuses to give some of them."""
    values = model.config.to_dict()
    if "num_local_experts" in values:  # the saved spelling of Qwen3-MoE
        values["num_experts"] = values["num_local_experts"]
    return SimpleNamespace(**values)


def write_settings(writer: Any, config: Any) -> None:
    """Write a model's settings, each in the type that its value has."""
    for name, value in settings(config).items():
        key = f"{writer.arch}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def settings(config: Any) -> Keys:
    """Return a model's settings as converters write them."""
    keys: Keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    return keys | FAMILIES[config.model_type](config)


def _llama(config: Any) -> Keys:
    return {
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }


def _mixtral(config: Any) -> Keys:
    """Return the keys of a Mixtral model; its experts have the width of Llama's dense part."""
    experts = {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
    return _llama(config) | experts


def _mistral(config: Any) -> Keys:
    """Return the keys of a Mistral model; llama.cpp's converter writes no windows, this does."""
    keys, rope = _llama(config), config.rope_parameters
    if config.sliding_window:
        keys["attention.sliding_window"] = config.sliding_window
    if config.model_type == "ministral":
        window = [kind == "sliding_attention" for kind in config.layer_types]
        keys["attention.sliding_window_pattern"] = window
    if config.model_type == "ministral3":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    return keys


def _qwen3(config: Any) -> Keys:
    return {
        "feed_forward_length": config.intermediate_size,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }


def _experts(config: Any) -> Keys:
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


def _qwen35(config: Any) -> Keys:
    rope, values = config.rope_parameters, config.linear_num_value_heads
    keys: Keys = {
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * config.linear_value_head_dim,
    }
    if config.model_type == "qwen3_5_text":
        return keys | {"feed_forward_length": config.intermediate_size}
    shared = {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
    return keys | _experts(config) | shared


def _laguna(config: Any) -> Keys:
    full = config.rope_parameters["full_attention"]
    window = config.rope_parameters["sliding_attention"]
    keys: Keys = {
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads_per_layer,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": window["rope_theta"],
        "rope.dimension_count": int(config.head_dim * full["partial_rotary_factor"]),
        "rope.dimension_count_swa": int(config.head_dim * window["partial_rotary_factor"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": full["factor"],
        "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": full["beta_fast"],
        "rope.scaling.yarn_beta_slow": full["beta_slow"],
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_weights_norm": True,
        "expert_weights_scale": config.moe_routed_scaling_factor,
        "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID.value,
    }
    if "attention_factor" in full:
        keys["rope.scaling.yarn_attn_factor"] = full["attention_factor"]
    if "sliding_attention" not in config.layer_types:
        keys = {key: value for key, value in keys.items() if "sliding" not in key}
        keys = {key: value for key, value in keys.items() if not key.endswith("_swa")}
    return keys | _experts(config)


def _gemma3(config: Any) -> Keys:
    """Return the keys of a Gemma 3 model; nothing tells the scale of scores or the pattern."""
    full = config.rope_parameters["full_attention"]
    keys: Keys = {
        "feed_forward_length": config.intermediate_size,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }
    if full["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]}
    return keys


def _gemma4(config: Any) -> Keys:
    window = [kind == "sliding_attention" for kind in config.layer_types]
    full = full_layers(config)
    full_heads = full.get("num_key_value_heads", config.num_key_value_heads)
    widths = [config.intermediate_size] * len(window)
    if config.use_double_wide_mlp:
        for index in range(len(window) - config.num_kv_shared_layers, len(window)):
            widths[index] *= 2
    heads = [config.num_key_value_heads if x else full_heads for x in window]
    keys: Keys = {
        "feed_forward_length": widths if len(set(widths)) > 1 else widths[0],
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": window,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": config.head_dim,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if config.enable_moe_block:
        keys["expert_count"] = config.num_experts
        keys["expert_used_count"] = config.top_k_experts
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    return keys


def full_layers(config: Any) -> Keys:
    """Return the settings that only full layers of a Gemma 4 have."""
    own: Keys = next(iter(config.per_layer_config.values()))
    return own


def _gpt_oss(config: Any) -> Keys:
    rope = config.rope_parameters
    return {
        "feed_forward_length": config.intermediate_size,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.intermediate_size,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }


def _glm4_moe(config: Any) -> Keys:
    return {
        "feed_forward_length": config.intermediate_size,
        "rope.dimension_count": config.head_dim // 2,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": True,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID.value,
    }


FAMILIES = {
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mixtral": _mixtral,
    "mistral": _mistral,
    "ministral": _mistral,
    "ministral3": _mistral,
    "smollm3": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": lambda config: _qwen3(config) | _experts(config),
    "qwen3_5_text": _qwen35,
    "qwen3_5_moe_text": _qwen35,
    "laguna": _laguna,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
}
