"""gpt-oss: attention with sinks and biases, every second layer in a window; experts with biases."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headroom.families.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from headroom.families.dims import (
    Dims,
    Facts,
    LayerDims,
    Tensors,
    common_dims,
    expert_dims,
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
    Yarn,
    model_config,
    plain_recipe,
)
from headroom.families.rope import plain_rope, rope_kind, rope_settings, yarn_rope
from headroom.families.synth.settings import layer_types, yarn_config, yarn_keys
from headroom.families.tensors import attention, norms, routed_experts
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata
from headroom.formats.names import Naming

if TYPE_CHECKING:
    import numpy as np

    from headroom.families.family import Floats

PERIOD = 2  # every second layer sees the whole context


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a gpt-oss model."""
    return common_dims(
        facts,
        kinds=named_kinds(facts) or pattern(facts.layers, PERIOD, "window"),
        window=facts.size("attention.sliding_window"),
        **expert_dims(facts, width_keys=("feed_forward_length",)),
    )


def layer(dims: Dims, index: int) -> LayerDims:
    """Return a layer; all its matrices have biases."""
    tensors = norms(dims, "attn_norm", "post_attention_norm") | routed_experts(dims)
    tensors |= attention(dims.hidden, dims.heads, dims.kv_heads, dims.head_dim)
    biases: Tensors = {
        name.replace(".weight", ".bias"): shape[:-1] for name, shape in tensors.items()
    }
    tensors |= {name: shape for name, shape in biases.items() if shape}
    tensors["attn_sinks.weight"] = (dims.heads,)
    return LayerDims(
        tensors=tensors,
        kind=dims.kind(index),
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
    )


def read_config(header: ModelHeader, dims: Dims) -> ModelConfig:
    """Read a gpt-oss model's settings from either format."""
    full = AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=_rope(header, dims.head_dim),
        scale=dims.head_dim**-0.5,
        biases=True,
        out_bias=True,
        sinks=True,
    )
    mixers = {"full": full, "window": replace(full, window=dims.window)}
    # Softmax over the picked logits is softmax over all, divided by the sum of the picked.
    experts = ExpertsConfig(
        experts=dims.experts,
        used=dims.experts_used,
        width=dims.expert_ffn,
        activation="clamped",
        biases=True,
    )
    layers = tuple(
        LayerConfig(mixer=mixers[dims.kind(index)], ffn=None, experts=experts)
        for index in range(dims.layers)
    )
    return model_config(header, dims, layers)


def _rope(header: ModelHeader, head_dim: int) -> RopeConfig:
    settings = rope_settings(header, "full")
    if rope_kind(settings) == "none":
        return plain_rope(settings, head_dim)
    if header.format == "gguf":  # files have no key for it
        values = {**settings.values, "rope.scaling.truncate": False}
        settings = Metadata(values, settings.path, settings.tied)
    return yarn_rope(settings, head_dim, may_blend_between=True)


FIXED: FixedSettings = {
    "hf.hidden_act": ("silu",),
    "hf.attention_bias": (True,),
    "hf.swiglu_limit": (7, 7.0),
    "hf.swiglu_alpha": (1.702,),
    "attention.sliding_window": ANY,
    "rope.scaling.type": ANY,
    "rope.scaling.factor": ANY,
}
TINY = Dims(
    architecture="gpt-oss", layers=4, hidden=256, vocab=1024, context=4096, heads=4, kv_heads=2,
    head_dim=64, kinds=pattern(4, PERIOD, "window"), window=16, experts=8, experts_used=2,
    expert_ffn=256, fused_experts=True,
)  # fmt: skip
SPECIAL = {
    199998: "<|startoftext|>", 199999: "<|endoftext|>", 200002: "<|return|>",
    200003: "<|constrain|>", 200005: "<|channel|>", 200006: "<|start|>", 200007: "<|end|>",
    200008: "<|message|>", 200012: "<|call|>",
}  # fmt: skip
TOKENIZER = TokenizerKind(
    model="gpt2",
    pre="gpt-4o",
    template="""\
{%- for message in messages %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start|>assistant' }}
{%- endif %}
""",
    places=SPECIAL,
    roles={
        "bos": "<|startoftext|>",
        "eos": "<|return|>",
        "eot": "<|call|>",
        "padding": "<|endoftext|>",
    },
)
SMALL_PLACES = dict(enumerate(SPECIAL.values()))


def _tokenizer(vocab: int) -> TokenizerKind:
    """Return the tokenizer of the published size, or one whose special tokens come first."""
    return TOKENIZER if vocab > max(SPECIAL) else replace(TOKENIZER, places=SMALL_PLACES)


def _recipe(name: str, dims: Dims) -> Recipe:
    yarn = Yarn(32.0, dims.context // 32, 32.0, None)
    return replace(plain_recipe(name, dims), eps=1e-5, theta=150000.0, yarn=yarn)


def _from_config(recipe: Recipe, metadata: Metadata) -> Recipe:
    yarn = None
    if metadata.get_str("rope.scaling.type", "none") == "yarn":
        yarn = Yarn(
            metadata.get_float("rope.scaling.factor"),
            metadata.get_int("rope.scaling.original_context_length"),
            metadata.get_float("rope.scaling.yarn_beta_fast", 32.0),
            None,
        )
    return replace(recipe, dims=replace(recipe.dims, fused_experts=True), yarn=yarn)


def _config(recipe: Recipe, tokens: Json) -> Json:
    dims = recipe.dims
    ropes: Json = {"rope_theta": recipe.theta, "rope_type": "default"}
    if recipe.yarn is not None:
        ropes |= yarn_config(recipe.yarn) | {"truncate": False}
    return {
        "attention_bias": True,
        "intermediate_size": dims.expert_ffn,
        "layer_types": layer_types(dims),
        "num_local_experts": dims.experts,
        "num_experts_per_tok": dims.experts_used,
        "rope_parameters": ropes,
        "sliding_window": dims.window,
    }


def _keys(recipe: Recipe) -> Json:
    dims = recipe.dims
    keys = {"vocab_size": dims.vocab, "attention.sliding_window": dims.window}
    return keys if recipe.yarn is None else keys | yarn_keys(recipe.yarn)


def _vector(name: str, normal: "Floats", source: "np.random.Generator") -> "Floats | None":
    return 0.1 * normal if name.endswith(".bias") or "sinks" in name else None


def _their_shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1]) if len(shape) == 3 else shape


def _undo(part: str, dims: Dims) -> "Callable[[Floats], Floats] | None":
    """Return what makes stacks those of transformers: columns first, gates and ups in turn."""
    if part not in ("ffn_gate_up_exps", "ffn_down_exps"):
        return None

    def undo(values: "Floats") -> "Floats":
        if part == "ffn_gate_up_exps":
            split = values.reshape(len(values), 2, values.shape[1] // 2, *values.shape[2:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        return values.swapaxes(1, 2).copy() if values.ndim == 3 else values

    return undo


def _known(layers: int, experts: int) -> Dims:
    return Dims(
        architecture="gpt-oss", layers=layers, hidden=2880, vocab=201088, context=131072, heads=64,
        kv_heads=8, head_dim=64, kinds=pattern(layers, PERIOD, "window"), window=128,
        experts=experts, experts_used=4, expert_ffn=2880,
    )  # fmt: skip


FAMILIES = (
    Family(
        naming=Naming(
            architecture="gpt-oss",
            model_types=("gpt_oss",),
            layer_names=(
                ("ffn.norm", "post_attention_norm", "post_attention_layernorm"),
                ("ffn.router", "ffn_gate_inp", "mlp.router"),
                ("attn.sinks", "attn_sinks", "self_attn.sinks"),
                ("ffn.experts.gate_up_bias", "", "mlp.experts.gate_up_proj_bias"),
                ("ffn.experts.down_bias", "", "mlp.experts.down_proj_bias"),
            ),
            transposed_stacks=("ffn.experts.gate_up", "ffn.experts.down"),
            alternating_stacks=("ffn.experts.gate_up", "ffn.experts.gate_up_bias"),
        ),
        read_dims=read_dims,
        layer=layer,
        read_config=read_config,
        fixed=FIXED,
        cpu_only="no kernel of a GPU has its attention sinks and the biases of its experts",
        known={"gpt-oss-20b": _known(24, 32), "gpt-oss-120b": _known(36, 128)},
        synthesis=Synthesis(
            model_class="GptOssForCausalLM",
            model_type="gpt_oss",
            tiny={"tiny": TINY},
            tokenizer=_tokenizer,
            recipe=_recipe,
            from_config=_from_config,
            config=_config,
            keys=_keys,
            layout=SafetensorsLayout(
                bare=(".bias", "_bias", "sinks", "experts.gate_up_proj", "experts.down_proj"),
                stacked_experts=True,
                shape=_their_shape,
                undo=_undo,
            ),
            vector=_vector,
        ),
    ),
)
