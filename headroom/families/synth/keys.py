"""GGUF keys of every family, as llama.cpp's converter writes them."""

from headroom.families.synth.recipe import DRAFT_BLOCK, Recipe
from headroom.families.tables import Dims
from headroom.formats.gguf_writer import Value

Values = dict[str, Value]
SIGMOID = 2  # how GGUF numbers the way in which scores of experts are made


def gguf_keys(recipe: Recipe) -> Values:
    """Return a model's own keys, each with the family before it."""
    dims = recipe.dims
    values: Values = {
        "block_count": dims.layers,
        "context_length": dims.context,
        "embedding_length": dims.hidden,
        "attention.head_count": dims.heads,
        "attention.head_count_kv": dims.kv_heads,
        "attention.key_length": dims.head_dim,
        "attention.value_length": dims.head_dim,
        "attention.layer_norm_rms_epsilon": recipe.eps,
        "rope.freq_base": recipe.theta,
    }
    if dims.ffn:
        values["feed_forward_length"] = list(dims.ffn_by_layer) or dims.ffn
    values |= _expert_keys(dims)
    match recipe.family:
        case "llama":
            values |= {"vocab_size": dims.vocab, "rope.dimension_count": recipe.rope_dims}
        case "qwen35" | "qwen35moe":
            values |= _recurrent_keys(recipe)
        case "laguna":
            values |= _laguna_keys(recipe)
        case "gemma4":
            values |= _gemma_keys(recipe)
        case "dflash":
            values |= _draft_keys(recipe)
    return {f"{recipe.family}.{key}": value for key, value in values.items()}


def _expert_keys(dims: Dims) -> Values:
    if not dims.experts:
        return {}
    values: Values = {
        "expert_count": dims.experts,
        "expert_used_count": dims.experts_used,
        "expert_feed_forward_length": dims.expert_ffn,
    }
    if dims.shared_ffn:
        values["expert_shared_feed_forward_length"] = dims.shared_ffn
    return values


def _recurrent_keys(recipe: Recipe) -> Values:
    dims = recipe.dims
    return {
        "rope.dimension_count": recipe.rope_dims,
        "rope.dimension_sections": [*recipe.sections, 0],
        "full_attention_interval": dims.kinds.index("full") + 1 if "full" in dims.kinds else 4,
        "ssm.conv_kernel": dims.conv,
        "ssm.state_size": dims.state_dim,
        "ssm.group_count": dims.state_key_heads,
        "ssm.time_step_rank": dims.state_heads,
        "ssm.inner_size": dims.state_width,
    }


def _laguna_keys(recipe: Recipe) -> Values:
    dims = recipe.dims
    values: Values = {
        "vocab_size": dims.vocab,
        "attention.head_count": [
            dims.heads if dims.kind(i) == "full" else dims.window_heads for i in range(dims.layers)
        ],
        "attention.sliding_window": dims.window,
        "rope.freq_base_swa": recipe.window_theta,
        "rope.dimension_count": recipe.rope_dims,
        "rope.dimension_count_swa": dims.head_dim,
        "leading_dense_block_count": dims.dense_layers,
        "expert_weights_norm": True,
        "expert_weights_scale": recipe.routed_scale,
        "expert_gating_func": SIGMOID,
    }
    if (yarn := recipe.yarn) is not None:
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": yarn.factor,
            "rope.scaling.original_context_length": yarn.original,
            "rope.scaling.yarn_beta_fast": yarn.beta_fast,
            "rope.scaling.yarn_beta_slow": 1.0,
        }
        if yarn.attention_factor is not None:
            values["rope.scaling.yarn_attn_factor"] = yarn.attention_factor
    return values


def _gemma_keys(recipe: Recipe) -> Values:
    dims = recipe.dims
    kinds = [dims.kind(i) for i in range(dims.layers)]
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
        "embedding_length_per_layer_input": dims.side_width,
        "final_logit_softcapping": recipe.softcap,
    }


def _draft_keys(recipe: Recipe) -> Values:
    dims = recipe.dims
    values: Values = {
        "block_size": DRAFT_BLOCK,
        "target_layers": [tap + 1 for tap in recipe.taps],
        "vocab_size": dims.vocab,
    }
    if dims.window:
        flags = [dims.kind(i) == "window" for i in range(dims.layers)]
        values["attention.sliding_window"] = dims.window
        values["attention.sliding_window_pattern"] = flags
    return values
