"""Mistral and Ministral: Llama's layers, with windows or YaRN in some models.

GGUF files of the older models say `llama`, those of the newer ones `mistral3`; safetensors of all
of them are read here.
"""

import logging
import math
from dataclasses import replace

from headroom.families.config import (
    AttentionConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from headroom.families.dims import Dims, Facts, LayerKind, common_dims, named_kinds, window_flags
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
from headroom.families.llama import undo_pairs
from headroom.families.rope import plain_rope, rope_kind, rope_settings, yarn_rope
from headroom.families.synth.settings import yarn_config, yarn_keys
from headroom.families.tensors import GGUF_TOWERS, plain_layer
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata
from headroom.formats.names import Naming

log = logging.getLogger(__name__)

MODEL_TYPES = ("mistral", "ministral", "ministral3", "mistral3")
WINDOW: tuple[LayerKind, ...] = ("window",)
SCALED_QUERIES = "later queries are scaled by their position, which no kernel does"
BETA = 0.1  # scales queries of Ministral 3 beyond the original context

# Rotary settings that are read here; `yarn_rope` reads the others.
_OWN_ROPE_KEYS = (
    "rope.scaling.llama_4_scaling_beta", "rope.scaling.max_position_embeddings",
    "rope.scaling.mscale", "rope.scaling.mscale_all_dim", "rope.scaling.yarn_log_multiplier",
)  # fmt: skip


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a Mistral model."""
    window = facts.size("attention.sliding_window", default=0, least=0)
    made_for = facts.size("context_length")
    context = min(made_for, _first_scaled_position(facts))
    return common_dims(
        facts,
        context=context,
        context_end=SCALED_QUERIES if context < made_for else "",
        ffn=facts.size("feed_forward_length"),
        window=window,
        kinds=_kinds(facts) if window else (),
    )


def _first_scaled_position(facts: Facts) -> int:
    """Return the position from which on queries are multiplied by 1 + beta log(1 + pos // length).

    No kernel scales queries by position. The factor is exactly 1 before that position, so that the
    context ends there.
    """
    metadata = facts.header.metadata
    key = "attention.temperature_scale"
    key = key if key in metadata else "rope.scaling.llama_4_scaling_beta"
    if not metadata.get_float(key, 0.0):
        return facts.size("context_length")
    return facts.size("attention.temperature_length", "rope.scaling.original_context_length")


def _kinds(facts: Facts) -> tuple[LayerKind, ...]:
    """Return the kinds of layers of a model with a window: all have it, or those in layer_types."""
    flags = window_flags(facts, "attention.sliding_window_pattern")
    if flags is not None:
        return flags
    every = WINDOW * facts.layers
    # The classes of other model types ignore layer_types.
    alternates = facts.header.metadata.values.get("hf.model_type") == "ministral"
    return (named_kinds(facts) or every) if alternates else every


def read_config(header: ModelHeader, dims: Dims) -> ModelConfig:
    """Read a Mistral model's settings from either format."""
    if dims.context < (made_for := header.metadata.get_int("context_length")):
        log.warning(
            "describe: the context ends at %d of %d tokens: %s",
            dims.context,
            made_for,
            dims.context_end,
        )
    attention = AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=_rope(header, dims.head_dim),
        scale=dims.head_dim**-0.5,
        interleaved=header.format == "gguf",  # its conversion stores rotary pairs side by side
    )
    mixers = {"full": attention, "window": replace(attention, window=dims.window)}
    layers = tuple(
        LayerConfig(mixer=mixers[dims.kind(index)], ffn=FfnConfig(dims.ffn))
        for index in range(dims.layers)
    )
    return model_config(header, dims, layers)


def _rope(header: ModelHeader, head_dim: int) -> RopeConfig:
    found = rope_settings(header, "full")
    own = {key: value for key, value in found.values.items() if key not in _OWN_ROPE_KEYS}
    if rope_kind(found) == "none":
        return plain_rope(replace(found, values=own), head_dim)
    own.setdefault("rope.scaling.yarn_attn_factor", _attention_factor(found))
    return yarn_rope(replace(found, values=own), head_dim)


def _attention_factor(settings: Metadata) -> float:
    """Return YaRN's factor of cos and sin, a quotient where `mscale_all_dim` is not 0."""
    factor = settings.get_float("rope.scaling.factor", 1.0)
    # GGUF has a key for the divisor alone: its dividend is always 1.
    scale = settings.get_float("rope.scaling.mscale", 1.0)
    divisor = settings.get_float(
        "rope.scaling.yarn_log_multiplier",
        settings.get_float("rope.scaling.mscale_all_dim", 0.0),
    )
    if not (scale and divisor):
        return _magnitude(factor, 1.0)
    return _magnitude(factor, scale) / _magnitude(factor, divisor)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


FIXED: FixedSettings = {
    "hf.model_type": MODEL_TYPES,  # of the text model inside one that sees pictures
    "hf.hidden_act": ("silu",),
    "expert_count": (0,),
    "attention.sliding_window": ANY,
    "rope.scaling.type": ("none", "default", "yarn"),
    "rope.scaling.factor": ANY,
}

# Contexts end where queries begin to be scaled; the files say 262144 and 393216.
MINISTRAL_3B = Dims(
    architecture="mistral3", layers=26, hidden=3072, vocab=131072, context=16384, tied=True,
    heads=32, kv_heads=8, head_dim=128, ffn=9216, context_end=SCALED_QUERIES,
)  # fmt: skip
DEVSTRAL_24B = Dims(
    architecture="mistral3", layers=40, hidden=5120, vocab=131072, context=8192, heads=32,
    kv_heads=8, head_dim=128, ffn=32768, context_end=SCALED_QUERIES,
)  # fmt: skip
ROPES = {"devstral-small-2-24b": (1e8, 48.0)}  # base and YaRN's factor, where not 1e6 and 16
TINY = Dims(
    architecture="mistral3", layers=4, hidden=256, vocab=1024, context=2048, heads=8, kv_heads=2,
    head_dim=64, ffn=512,
)  # fmt: skip

SPECIAL = {
    0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]",
    6: "[/AVAILABLE_TOOLS]", 7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]",
    10: "[IMG]", 11: "<pad>", 17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]",
}  # fmt: skip
TOKENIZER = TokenizerKind(
    model="gpt2",
    pre="tekken",
    template="""\
{{- bos_token }}
{%- if tools %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'assistant' %}
{{- message.content + eos_token }}
{%- else %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- endif %}
{%- endfor %}
""",
    places=SPECIAL,
    roles={"bos": "<s>", "eos": "</s>", "unknown": "<unk>", "padding": "<pad>"},
    add_bos=True,
)


def _recipe(name: str, dims: Dims) -> Recipe:
    plain = replace(plain_recipe(name, dims), eps=1e-5)
    if dims.window:  # as Mistral 7B
        return replace(plain, theta=1e4)
    theta, factor = ROPES.get(name, (1e6, 16.0))
    return replace(plain, theta=theta, yarn=Yarn(factor, dims.context, 32.0, None))


def _from_config(recipe: Recipe, metadata: Metadata) -> Recipe:
    if "rope.scaling.factor" not in metadata:
        return replace(recipe, yarn=None)
    factor = metadata.get_float("rope.scaling.factor")
    original = metadata.get_int("rope.scaling.original_context_length")
    beta_fast = metadata.get_float("rope.scaling.yarn_beta_fast", 32.0)
    return replace(recipe, yarn=Yarn(factor, original, beta_fast, None))


def _config(recipe: Recipe, tokens: Json) -> Json:
    yarn, window = recipe.yarn, recipe.dims.window
    if yarn is None:
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window or None,
        }
    scaling = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": BETA}
    return {
        "max_position_embeddings": int(yarn.factor) * yarn.original,
        "rope_parameters": {"rope_theta": recipe.theta, **yarn_config(yarn), **scaling},
        "sliding_window": window or None,
    }


def _keys(recipe: Recipe) -> Json:
    yarn, dims = recipe.yarn, recipe.dims
    values: Json = {"vocab_size": dims.vocab, "rope.dimension_count": recipe.rope_dims}
    if yarn is None:
        return values | {"attention.sliding_window": dims.window}
    scaling = {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": BETA}
    length = {"context_length": int(yarn.factor) * yarn.original}
    return length | values | yarn_keys(yarn) | scaling


FAMILIES = (
    Family(
        naming=Naming(architecture="mistral3", model_types=MODEL_TYPES),
        read_dims=read_dims,
        layer=plain_layer,
        unused_parts=(*GGUF_TOWERS, "vision_tower.", "multi_modal_projector."),
        read_config=read_config,
        fixed=FIXED,
        known={"ministral-3-3b": MINISTRAL_3B, "devstral-small-2-24b": DEVSTRAL_24B},
        synthesis=Synthesis(
            model_class="Ministral3ForCausalLM",
            model_type="ministral3",
            tiny={
                "tiny": TINY,
                "tiny-window": replace(TINY, window=16, kinds=WINDOW * TINY.layers),
            },
            tokenizer=lambda vocab: TOKENIZER,
            recipe=_recipe,
            from_config=_from_config,
            config=_config,
            keys=_keys,
            layout=SafetensorsLayout(undo=undo_pairs),
        ),
    ),
)
