"""Gemma 3: norms on both sides of every part, and a window in five of six layers.

Only the text model is read, alone or from inside a model that sees pictures.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from headroom.families.config import (
    AttentionConfig,
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
    model_config,
    plain_recipe,
)
from headroom.families.rope import check_scaling, plain_rope, rope_kind, rope_settings
from headroom.families.synth.settings import layer_types, with_kind_ropes
from headroom.families.tensors import GGUF_TOWERS, attention, dense_ffn, head_norms, norms
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata
from headroom.formats.names import Naming

if TYPE_CHECKING:
    from headroom.families.family import Floats

# What a published config.json leaves out, and transformers adds.
CONFIG_DEFAULTS: Mapping[str, object] = {
    "attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 256,
    "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 4096,
    "context_length": 131072, "vocab_size": 262208, "hf.query_pre_attn_scalar": 256,
}  # fmt: skip
THETA, WINDOW_THETA = 1e6, 1e4
PERIOD = 6  # one layer in six sees the whole context
LAYERS_OF_27B = 62


def _complete(header: ModelHeader) -> ModelHeader:
    """Return the header with the settings that a config.json may leave out."""
    if header.format == "gguf":
        return header
    metadata = header.metadata
    return replace(
        header, metadata=replace(metadata, values={**CONFIG_DEFAULTS, **metadata.values})
    )


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a Gemma 3 model."""
    facts = Facts(_complete(facts.header))
    window = facts.size("attention.sliding_window", default=0, least=0)
    return common_dims(
        facts,
        ffn=facts.size("feed_forward_length"),
        window=window,
        kinds=_kinds(facts) if window else (),
    )


def _kinds(facts: Facts) -> tuple[LayerKind, ...]:
    """Return the kinds of layers: by a list, by a period, or by the usual period."""
    if named := named_kinds(facts):
        return named
    key = "attention.sliding_window_pattern"
    values = facts.header.metadata.values
    if key in values and not isinstance(values[key], int):
        return window_flags(facts, key) or ()
    return pattern(
        facts.layers, facts.size(key, "hf.sliding_window_pattern", default=PERIOD), "window"
    )


def layer(dims: Dims, index: int) -> LayerDims:
    """Return a layer; full layers and window layers have the same tensors."""
    tensors = norms(dims, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    tensors |= attention(dims.hidden, dims.heads, dims.kv_heads, dims.head_dim)
    tensors |= head_norms(dims.head_dim) | dense_ffn(dims.hidden, dims.ffn)
    return LayerDims(
        tensors=tensors,
        kind=dims.kind(index),
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        ffn=dims.ffn,
        post_norms=True,
    )


def read_config(header: ModelHeader, dims: Dims) -> ModelConfig:
    """Read a Gemma 3 model's settings from either format."""
    header = _complete(header)
    # GGUF has no key for what scores are divided by the root of.
    scalar = header.metadata.get_float("hf.query_pre_attn_scalar", _score_scalar(dims))
    full = AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=_full_rope(header, dims.head_dim),
        scale=scalar**-0.5,
        head_norms=True,
    )
    mixers = {
        "full": full,
        "window": replace(full, rope=_window_rope(header, dims.head_dim), window=dims.window),
    }
    layers = tuple(
        LayerConfig(
            mixer=mixers[dims.kind(index)], ffn=FfnConfig(dims.ffn, "gelu"), post_norms=True
        )
        for index in range(dims.layers)
    )
    return model_config(
        header,
        dims,
        layers,
        embed_scale=dims.hidden**0.5,
        # Conversion to GGUF adds the one.
        norm_offset=0.0 if header.format == "gguf" else 1.0,
    )


def _score_scalar(dims: Dims) -> float:
    """Return the number whose root divides scores: the size of a head, but for the 27B model."""
    return float(dims.hidden // dims.heads if dims.layers == LAYERS_OF_27B else dims.head_dim)


def _full_rope(header: ModelHeader, head_dim: int) -> RopeConfig:
    settings = _with_base(rope_settings(header, "full"), THETA)
    if rope_kind(settings) == "none":
        return plain_rope(settings, head_dim)
    check_scaling(settings, "linear", ("rope.scaling.factor",))
    factor = settings.get_float("rope.scaling.factor")
    plain = RopeConfig(settings.get_float("rope.freq_base"), head_dim)
    return replace(plain, divisors=(factor,) * (head_dim // 2))


def _window_rope(header: ModelHeader, head_dim: int) -> RopeConfig:
    """Return the rotation of layers with a window, which is never scaled."""
    theta = header.metadata.get_float("hf.rope_local_base_freq", WINDOW_THETA)
    return plain_rope(_with_base(rope_settings(header, "window"), theta), head_dim)


def _with_base(settings: Metadata, theta: float) -> Metadata:
    """Return rotary settings with a base where they have none."""
    return replace(settings, values={"rope.freq_base": theta, **settings.values})


FIXED: FixedSettings = {
    "hf.hidden_activation": ("gelu_pytorch_tanh",),
    "hf.attention_bias": (False,),
    "hf.use_bidirectional_attention": (False,),
    "attention.sliding_window": ANY,
    "hf.rope_parameters": ANY,  # one table for each kind of layer
    "rope.scaling.type": ("none", "default", "linear"),
    "rope.scaling.factor": ANY,
}

SMALL_4B = Dims(
    architecture="gemma3", layers=34, hidden=2560, vocab=262208, context=131072, tied=True,
    heads=8, kv_heads=4, head_dim=256, ffn=10240, kinds=pattern(34, PERIOD, "window"), window=1024,
)  # fmt: skip

SPECIAL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 105: "<start_of_turn>",
    106: "<end_of_turn>",
}  # fmt: skip
TOKENIZER = TokenizerKind(
    model="llama",
    pre="default",
    template="""\
{{- bos_token }}
{%- set system = messages[0].role == 'system' %}
{%- for message in (messages[1:] if system else messages) %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if system and loop.first %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}
""",
    places=SPECIAL,
    roles={
        "bos": "<bos>",
        "eos": "<eos>",
        "eot": "<end_of_turn>",
        "unknown": "<unk>",
        "padding": "<pad>",
        "mask": "<mask>",
    },
    add_bos=True,
)


def _recipe(name: str, dims: Dims) -> Recipe:
    factor = 1.0 if name == "gemma-3-1b" else 8.0
    return replace(plain_recipe(name, dims), linear_factor=factor)


def _from_config(recipe: Recipe, metadata: Metadata) -> Recipe:
    ropes = metadata.values.get("hf.rope_parameters")
    if not isinstance(ropes, Mapping):
        return replace(
            recipe,
            window_theta=metadata.get_float("hf.rope_local_base_freq", WINDOW_THETA),
            linear_factor=metadata.get_float("rope.scaling.factor", 1.0),
        )
    factor = float(ropes.get("full_attention", {}).get("factor", 1.0))
    return replace(with_kind_ropes(recipe, ropes), linear_factor=factor)


def _config(recipe: Recipe, tokens: Json) -> Json:
    dims, factor = recipe.dims, recipe.linear_factor
    full: Json = {"rope_theta": recipe.theta, "rope_type": "default"}
    if factor != 1:
        full |= {"rope_type": "linear", "factor": factor}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": layer_types(dims),
        "query_pre_attn_scalar": int(_score_scalar(dims)),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_theta": recipe.window_theta, "rope_type": "default"},
        },
        "sliding_window": dims.window,
    }


def _keys(recipe: Recipe) -> Json:
    factor = recipe.linear_factor
    scaling: Json = {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    return {
        "attention.sliding_window": recipe.dims.window,
        "rope.freq_base_swa": recipe.window_theta,
        **(scaling if factor != 1 else {}),
    }


def _undo(part: str, dims: Dims) -> "Callable[[Floats], Floats] | None":
    """Return what undoes the conversion of a part to GGUF, which adds one to norms."""
    return (lambda values: values - 1) if part.endswith("norm") else None


FAMILIES = (
    Family(
        naming=Naming(
            architecture="gemma3",
            model_types=("gemma3", "gemma3_text"),
            tied_by_default=True,
            layer_names=(
                ("attn.post_norm", "post_attention_norm", "post_attention_layernorm"),
                ("ffn.norm", "ffn_norm", "pre_feedforward_layernorm"),
                ("ffn.post_norm", "post_ffw_norm", "post_feedforward_layernorm"),
            ),
        ),
        read_dims=read_dims,
        layer=layer,
        unused_parts=(*GGUF_TOWERS, "vision_tower.", "multi_modal_projector."),
        read_config=read_config,
        fixed=FIXED,
        known={
            "gemma-3-1b": replace(
                SMALL_4B, layers=26, hidden=1152, vocab=262144, context=32768, heads=4, kv_heads=1,
                ffn=6912, kinds=pattern(26, PERIOD, "window"), window=512,
            ),
            "gemma-3-4b": SMALL_4B,
            "gemma-3-12b": replace(
                SMALL_4B, layers=48, hidden=3840, heads=16, kv_heads=8, ffn=15360,
                kinds=pattern(48, PERIOD, "window"),
            ),
            "gemma-3-27b": replace(
                SMALL_4B, layers=LAYERS_OF_27B, hidden=5376, heads=32, kv_heads=16, head_dim=128,
                ffn=21504, kinds=pattern(LAYERS_OF_27B, PERIOD, "window"),
            ),
        },
        synthesis=Synthesis(
            model_class="Gemma3ForCausalLM",
            model_type="gemma3_text",
            tiny={
                "tiny": Dims(
                    architecture="gemma3", layers=8, hidden=256, vocab=1024, context=4096,
                    tied=True, heads=4, kv_heads=2, head_dim=64, ffn=512,
                    kinds=pattern(8, PERIOD, "window"), window=16,
                ),
            },
            tokenizer=lambda vocab: TOKENIZER,
            recipe=_recipe,
            from_config=_from_config,
            config=_config,
            keys=_keys,
            layout=SafetensorsLayout(undo=_undo),
        ),
    ),
)  # fmt: skip
