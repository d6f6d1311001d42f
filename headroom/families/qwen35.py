"""Qwen3.5 and 3.6: gated linear attention, with gated full attention in every fourth layer.

The feed-forward part is dense, or routed experts with a gated shared expert.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headroom.families.config import (
    AttentionConfig,
    DeltaNetConfig,
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
    mtp_dims,
    named_kinds,
    pattern,
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
from headroom.families.qwen3 import (
    EXPERTS_FIXED,
    SHOWN_TOKENS,
    SPECIAL,
    TEMPLATE_START,
    TOKEN_ROLES,
)
from headroom.families.synth.settings import expert_config, layer_types
from headroom.families.tensors import (
    GGUF_TOWERS,
    attention,
    dense_ffn,
    head_norms,
    norms,
    routed_experts,
    shared_expert,
)
from headroom.formats.header import ModelHeader
from headroom.formats.names import MTP_PREFIX, NameRow, Naming

if TYPE_CHECKING:
    import numpy as np

    from headroom.families.family import Floats

LAYER_NAMES: tuple[NameRow, ...] = (
    ("ffn.norm", "post_attention_norm", "post_attention_layernorm"),
    ("delta.qkv", "attn_qkv", "linear_attn.in_proj_qkv"),
    ("delta.z", "attn_gate", "linear_attn.in_proj_z"),
    ("delta.beta", "ssm_beta", "linear_attn.in_proj_b"),
    ("delta.alpha", "ssm_alpha", "linear_attn.in_proj_a"),
    ("delta.conv", "ssm_conv1d", "linear_attn.conv1d"),
    ("delta.a", "ssm_a", "linear_attn.A_log"),  # GGUF holds -exp of it
    ("delta.dt", "ssm_dt", ""),
    ("delta.dt_bias", "", "linear_attn.dt_bias"),
    ("delta.norm", "ssm_norm", "linear_attn.norm"),
    ("delta.out", "ssm_out", "linear_attn.out_proj"),
)
# The layer that predicts further ahead is one of full attention with these in addition: it reads a
# token's embedding beside the hidden state after the token before it, both normed.
MTP_NAMES: tuple[NameRow, ...] = (
    ("mtp.proj", "nextn.eh_proj", "fc"),
    ("mtp.embed_norm", "nextn.enorm", "pre_fc_norm_embedding"),
    ("mtp.hidden_norm", "nextn.hnorm", "pre_fc_norm_hidden"),
    ("mtp.norm", "nextn.shared_head_norm", "norm"),
    ("mtp.embed", "nextn.embed_tokens", "embed_tokens"),
    ("mtp.head", "nextn.shared_head_head", "lm_head"),
)
MTP_PARTS = (
    "mtp.proj", "mtp.embed_norm", "mtp.hidden_norm", "mtp.norm", "attn.norm", "attn.q", "attn.k",
    "attn.v", "attn.out", "attn.q_norm", "attn.k_norm", "ffn.norm",
)  # fmt: skip
UNUSED_PARTS = (*GGUF_TOWERS, "visual.", MTP_PREFIX)


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a Qwen3.5 model, dense or with experts."""
    experts = expert_dims(facts, shared=True)
    dense = {} if experts else {"ffn": facts.size("feed_forward_length")}
    state_dim = facts.size("ssm.state_size", "hf.linear_value_head_dim")
    key_dim = facts.size("hf.linear_key_head_dim", default=state_dim)
    if key_dim != state_dim:
        raise facts.wrong(f"keys of {key_dim} and values of {state_dim} values are not supported")
    return common_dims(
        facts,
        kinds=_kinds(facts),
        state_heads=facts.size("ssm.time_step_rank", "hf.linear_num_value_heads"),
        state_key_heads=facts.size("ssm.group_count", "hf.linear_num_key_heads"),
        state_dim=state_dim,
        conv=facts.size("ssm.conv_kernel", "hf.linear_conv_kernel_dim"),
        **experts,
        **dense,
        **mtp_dims(facts, MTP_PARTS),
    )


def _kinds(facts: Facts) -> tuple[LayerKind, ...]:
    if named := named_kinds(facts):
        return named
    if (flags := facts.entries("attention.recurrent_layers", facts.layers)) is not None:
        return tuple("recurrent" if flag else "full" for flag in flags)
    every = facts.size("full_attention_interval", "hf.full_attention_interval", default=4)
    return pattern(facts.layers, every, "recurrent")


def layer(dims: Dims, index: int) -> LayerDims:
    """Return a layer of gated full attention or of gated linear attention.

    The layer behind the model's own predicts further ahead.
    """
    hidden = dims.hidden
    tensors = norms(dims, "attn_norm", "post_attention_norm")
    if index >= dims.layers:
        dims = replace(dims, fused_experts=dims.mtp_fused)
        tensors |= norms(dims, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
        tensors["nextn.eh_proj.weight"] = (hidden, 2 * hidden)
    if dims.experts:
        tensors |= routed_experts(dims) | shared_expert(dims)
        tensors["ffn_gate_inp_shexp.weight"] = (hidden,)
    else:
        tensors |= dense_ffn(hidden, dims.ffn)
    ffn = dims.shared_ffn or dims.ffn
    if dims.kind(index) == "full":
        tensors |= attention(hidden, dims.heads, dims.kv_heads, dims.head_dim)
        tensors["attn_q.weight"] = (2 * dims.heads * dims.head_dim, hidden)  # with output gates
        return LayerDims(
            tensors=tensors | head_norms(dims.head_dim),
            heads=dims.heads,
            kv_heads=dims.kv_heads,
            head_dim=dims.head_dim,
            gate_width=dims.heads * dims.head_dim,
            gate_in_queries=True,
            ffn=ffn,
            shared_gate=dims.experts > 0,
        )
    inner, channels = dims.state_width, dims.conv_channels
    tensors |= {
        "attn_qkv.weight": (channels, hidden),
        "attn_gate.weight": (inner, hidden),
        "ssm_beta.weight": (dims.state_heads, hidden),
        "ssm_alpha.weight": (dims.state_heads, hidden),
        "ssm_conv1d.weight": (channels, dims.conv),
        "ssm_a": (dims.state_heads,),
        "ssm_dt.bias": (dims.state_heads,),
        "ssm_norm.weight": (dims.state_dim,),
        "ssm_out.weight": (hidden, inner),
    }
    return LayerDims(
        tensors=tensors,
        kind="recurrent",
        ffn=ffn,
        shared_gate=dims.experts > 0,
        state_heads=dims.state_heads,
    )


def read_config(header: ModelHeader, dims: Dims) -> ModelConfig:
    """Read a Qwen3.5 model's settings from either format."""
    experts = _experts(dims) if dims.experts else None
    dense = None if dims.experts else FfnConfig(dims.ffn)
    layers = tuple(
        LayerConfig(mixer=_mixer(header, dims, index), ffn=dense, experts=experts)
        for index in range(dims.layers + dims.mtp)
    )
    # The conversion to GGUF has added one to the weights of norms already.
    offset = 0.0 if header.format == "gguf" else 1.0
    own, mtp = layers[: dims.layers], layers[-1] if dims.mtp else None
    return model_config(header, dims, own, norm_offset=offset, mtp=mtp)


def _mixer(header: ModelHeader, dims: Dims, index: int) -> AttentionConfig | DeltaNetConfig:
    from_gguf = header.format == "gguf"
    if dims.kind(index) == "recurrent":
        return DeltaNetConfig(
            key_heads=dims.state_key_heads,
            value_heads=dims.state_heads,
            head_dim=dims.state_dim,
            conv=dims.conv,
            # The conversion to GGUF assigns value heads to key heads in turn, and stores the decay.
            tiled=from_gguf,
            decay_is_log=not from_gguf,
        )
    theta = header.metadata.get_float("rope.freq_base")
    return AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=RopeConfig(theta, _rotary_dims(header, dims)),
        scale=dims.head_dim**-0.5,
        head_norms=True,
        gate="query",
    )


def _rotary_dims(header: ModelHeader, dims: Dims) -> int:
    """Return how many values of a head are rotated: a quarter if the file does not say."""
    metadata = header.metadata
    key = "rope.scaling.partial_rotary_factor"
    key = key if key in metadata else "hf.partial_rotary_factor"
    share = metadata.get_float(key, 0.25)
    return metadata.get_int("rope.dimension_count", int(dims.head_dim * share))


def _experts(dims: Dims) -> ExpertsConfig:
    """Return the experts of every layer; the weights of the picked ones always sum to one."""
    return ExpertsConfig(
        experts=dims.experts,
        used=dims.experts_used,
        width=dims.expert_ffn,
        shared_width=dims.shared_ffn,
        shared_gate=True,
    )


FIXED: FixedSettings = {
    "hf.hidden_act": ("silu",),
    "hf.attention_bias": (False,),
    "hf.attn_output_gate": (True,),
    "hf.output_gate_type": ("swish", "silu"),
    "rope.scaling.type": ("none", "default"),
    "rope.scaling.partial_rotary_factor": ANY,
    "hf.partial_rotary_factor": ANY,  # in older files
}

DENSE_27B = Dims(
    architecture="qwen35", layers=64, hidden=5120, vocab=248320, context=262144, heads=24,
    kv_heads=4, head_dim=256, ffn=17408, kinds=pattern(64, 4, "recurrent"), state_heads=48,
)  # fmt: skip
EXPERTS_35B = Dims(
    architecture="qwen35moe", layers=40, hidden=2048, vocab=248320, context=262144, heads=16,
    kv_heads=2, head_dim=256, kinds=pattern(40, 4, "recurrent"), state_heads=32, experts=256,
    experts_used=8, expert_ffn=512, shared_ffn=512,
)  # fmt: skip
TINY = Dims(
    architecture="qwen35", layers=8, hidden=256, vocab=1024, context=4096, heads=4, kv_heads=2,
    head_dim=64, ffn=512, kinds=pattern(8, 4, "recurrent"), state_heads=4, state_key_heads=2,
    state_dim=64,
)  # fmt: skip
TINY_EXPERTS = replace(
    TINY, architecture="qwen35moe", ffn=0, experts=16, experts_used=4, expert_ffn=256,
    shared_ffn=256,
)  # fmt: skip

TOKENIZER = TokenizerKind(
    model="gpt2",
    pre="qwen35",
    template=TEMPLATE_START + "{%- else %}\n{{- '<think>\\n' }}\n{%- endif %}\n{%- endif %}\n",
    special=(*SPECIAL, "<|mask|>"),
    start=248044,
    shown=SHOWN_TOKENS,
    roles={**TOKEN_ROLES, "mask": "<|mask|>"},
)


def _recipe(name: str, dims: Dims) -> Recipe:
    return replace(plain_recipe(name, dims), theta=1e7, rope_dims=dims.head_dim // 4)


def _config(recipe: Recipe, tokens: Json) -> Json:
    dims = recipe.dims
    ahead = {"mtp_num_hidden_layers": 1} if dims.mtp else {}
    return (
        expert_config(dims)
        | ahead
        | {
            "layer_types": layer_types(dims),
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
    )


def _keys(recipe: Recipe) -> Json:
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


def _vector(name: str, normal: "Floats", source: "np.random.Generator") -> "Floats | None":
    import numpy as np

    if name == "ssm_a":
        return np.asarray(-source.uniform(1, 16, normal.shape), np.float32)
    if name == "ssm_dt.bias":  # softplus of it is 0.001 to 0.1: states forget slowly
        steps = np.exp(source.uniform(np.log(0.001), np.log(0.1), normal.shape))
        return np.asarray(np.log(np.expm1(steps)), np.float32)
    return None


def _safetensors_shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if part == "ssm_conv1d":
        return shape[0], 1, shape[1]
    return (1, *shape) if part == "ffn_gate_inp_shexp" else shape


def _undo(part: str, dims: Dims) -> "Callable[[Floats], Floats] | None":
    """Return what undoes the conversion of a part to GGUF: norms plus one, order of heads."""
    import numpy as np

    if part.endswith("norm") and part != "ssm_norm":
        return lambda weight: weight - 1
    if part in ("attn_gate", "ssm_beta", "ssm_alpha", "ssm_dt"):
        return lambda rows: _grouped(rows, dims)
    if part == "ssm_a":
        return lambda a: _grouped(np.log(-a), dims)
    if part in ("attn_qkv", "ssm_conv1d"):
        plain = 2 * dims.state_key_heads * dims.state_dim
        return lambda rows: np.concatenate([rows[:plain], _grouped(rows[plain:], dims)])
    if part == "ssm_out":
        return lambda rows: np.ascontiguousarray(_grouped(rows.T, dims).T)
    return None


def _grouped(rows: "Floats", dims: Dims) -> "Floats":
    """Return rows of value heads, reordered so that those of one key head are adjacent."""
    keys, values = dims.state_key_heads, dims.state_heads
    heads = rows.reshape(values // keys, keys, rows.shape[0] // values, *rows.shape[1:])
    return heads.swapaxes(0, 1).reshape(rows.shape)


LAYOUT = SafetensorsLayout(
    bare=("A_log", "dt_bias"),
    shape=_safetensors_shape,
    undo=_undo,
)

FAMILIES = (
    Family(
        naming=Naming(
            architecture="qwen35",
            model_types=("qwen3_5", "qwen3_5_text"),
            layer_names=LAYER_NAMES,
            mtp_names=MTP_NAMES,
        ),
        read_dims=read_dims,
        layer=layer,
        unused_parts=UNUSED_PARTS,
        read_config=read_config,
        fixed=FIXED,
        known={"qwen3.5-27b": DENSE_27B, "qwen3.6-27b": DENSE_27B},
        synthesis=Synthesis(
            model_class="Qwen3_5ForCausalLM",
            model_type="qwen3_5_text",
            tiny={"tiny": TINY},
            tokenizer=lambda vocab: TOKENIZER,
            recipe=_recipe,
            config=_config,
            keys=_keys,
            layout=LAYOUT,
            vector=_vector,
        ),
    ),
    Family(
        naming=Naming(
            architecture="qwen35moe",
            model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
            layer_names=LAYER_NAMES,
            mtp_names=MTP_NAMES,
        ),
        read_dims=read_dims,
        layer=layer,
        unused_parts=UNUSED_PARTS,
        read_config=read_config,
        fixed={**FIXED, **EXPERTS_FIXED, "hf.norm_topk_prob": (True,)},
        known={"qwen3.5-35b-a3b": EXPERTS_35B, "qwen3.6-35b-a3b": EXPERTS_35B},
        synthesis=Synthesis(
            model_class="Qwen3_5MoeForCausalLM",
            model_type="qwen3_5_moe_text",
            tiny={"tiny": TINY_EXPERTS},
            tokenizer=lambda vocab: TOKENIZER,
            recipe=_recipe,
            config=_config,
            keys=_keys,
            layout=LAYOUT,
            skew="beacon",
            vector=_vector,
        ),
    ),
)
