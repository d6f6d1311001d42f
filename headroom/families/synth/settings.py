"""Settings of synthesised models in both formats: the entries that families share, and helpers.

GGUF keys are those that llama.cpp's converter writes; config.json is what transformers writes for
the text model alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from headroom.families.dims import KIND_NAMES, Dims
from headroom.families.family import Json, Recipe, Synthesis, Yarn

_NAMES_OF_KINDS = {kind: name for name, kind in KIND_NAMES.items()}


def config_json(synthesis: Synthesis, recipe: Recipe, dtype: str, tokens: Json) -> Json:
    """Return a model's config.json; `tokens` are the ids of its special tokens."""
    dims = recipe.dims
    values: Json = {
        "architectures": [synthesis.model_class],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "max_position_embeddings": dims.context,
        "model_type": synthesis.model_type,
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
    values |= synthesis.config(recipe, tokens)
    return dict(sorted(values.items()))


def gguf_keys(synthesis: Synthesis, recipe: Recipe) -> Json:
    """Return a model's own GGUF keys, each with the architecture before it."""
    dims = recipe.dims
    values: Json = {
        "block_count": dims.layers + dims.mtp,
        "context_length": dims.context,
        "embedding_length": dims.hidden,
        "attention.head_count": dims.heads,
        "attention.head_count_kv": dims.kv_heads,
        "attention.key_length": dims.head_dim,
        "attention.value_length": dims.head_dim,
        "attention.layer_norm_rms_epsilon": recipe.eps,
        "rope.freq_base": recipe.theta,
    }
    if dims.mtp:
        values["nextn_predict_layers"] = 1
    if dims.ffn:
        values["feed_forward_length"] = list(dims.ffn_by_layer) or dims.ffn
    if dims.experts:
        values["expert_count"] = dims.experts
        values["expert_used_count"] = dims.experts_used
        values["expert_feed_forward_length"] = dims.expert_ffn
    if dims.shared_ffn:
        values["expert_shared_feed_forward_length"] = dims.shared_ffn
    values |= synthesis.keys(recipe)
    return {f"{recipe.family}.{key}": value for key, value in values.items()}


def layer_types(dims: Dims) -> list[str]:
    """Return the kinds of all layers as config.json names them."""
    return [_NAMES_OF_KINDS[dims.kind(index)] for index in range(dims.layers)]


def expert_config(dims: Dims, used_key: str = "num_experts_per_tok") -> Json:
    """Return config.json's entries of routed experts; none where the model has none."""
    if not dims.experts:
        return {}
    values: Json = {
        "num_experts": dims.experts,
        "moe_intermediate_size": dims.expert_ffn,
        used_key: dims.experts_used,
    }
    if dims.shared_ffn:
        values["shared_expert_intermediate_size"] = dims.shared_ffn
    return values


def yarn_config(yarn: Yarn) -> Json:
    """Return YaRN's entries in config.json's rope_parameters."""
    values: Json = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original,
        "beta_fast": yarn.beta_fast,
        "beta_slow": 1.0,
    }
    if yarn.attention_factor is not None:
        values["attention_factor"] = yarn.attention_factor
    return values


def yarn_keys(yarn: Yarn) -> Json:
    """Return YaRN's GGUF keys."""
    values: Json = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": yarn.factor,
        "rope.scaling.original_context_length": yarn.original,
        "rope.scaling.yarn_beta_fast": yarn.beta_fast,
        "rope.scaling.yarn_beta_slow": 1.0,
    }
    if yarn.attention_factor is not None:
        values["rope.scaling.yarn_attn_factor"] = yarn.attention_factor
    return values


def with_kind_ropes(recipe: Recipe, ropes: object) -> Recipe:
    """Return the recipe with the rotary settings that a config.json has for each kind of layer."""
    if not isinstance(ropes, Mapping):
        return recipe
    full, window = ropes.get("full_attention", {}), ropes.get("sliding_attention", {})
    yarn = None
    if full.get("rope_type") == "yarn":
        yarn = Yarn(
            float(full["factor"]),
            int(full["original_max_position_embeddings"]),
            float(full.get("beta_fast", 32.0)),
            full.get("attention_factor"),
        )
    return replace(
        recipe,
        theta=float(full.get("rope_theta", recipe.theta)),
        window_theta=float(window.get("rope_theta", recipe.window_theta)),
        rope_dims=int(recipe.dims.head_dim * full.get("partial_rotary_factor", 1.0)),
        yarn=yarn,
    )
