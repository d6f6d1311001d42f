"""SmolLM3: Llama's layers, of which every fourth does not rotate queries and keys."""

import math
from dataclasses import replace

from headroom.families.config import (
    AttentionConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from headroom.families.dims import Dims, Facts, common_dims
from headroom.families.family import (
    ANY,
    Family,
    Json,
    Recipe,
    SafetensorsLayout,
    Synthesis,
    TokenizerKind,
    model_config,
    plain_recipe,
)
from headroom.families.llama import TURNS, undo_pairs
from headroom.families.rope import plain_rope, rope_settings
from headroom.families.tensors import plain_layer
from headroom.formats.header import ModelHeader
from headroom.formats.names import Naming

PERIOD = 4  # the last of so many layers does not rotate


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a SmolLM3 model."""
    return common_dims(facts, ffn=facts.size("feed_forward_length"))


def read_config(header: ModelHeader, dims: Dims) -> ModelConfig:
    """Read a SmolLM3 model's settings from either format."""
    rotated = AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=plain_rope(rope_settings(header, "full"), dims.head_dim),
        scale=dims.head_dim**-0.5,
        interleaved=header.format == "gguf",  # its conversion stores rotary pairs side by side
    )
    still = replace(rotated, rope=_standing(rotated.rope))
    layers = tuple(
        LayerConfig(mixer=rotated if rotates else still, ffn=FfnConfig(dims.ffn))
        for rotates in _rotating(Facts(header))
    )
    return model_config(header, dims, layers)


def _standing(rope: RopeConfig) -> RopeConfig:
    """Return a rotation by angles of 0, which changes no value."""
    return replace(rope, divisors=(math.inf,) * (rope.dims // 2))


def _rotating(facts: Facts) -> list[bool]:
    """Return whether each layer rotates queries and keys, by a list or by the usual period."""
    # Despite its name, the list has a 1 for every layer that rotates.
    flags = facts.entries("hf.no_rope_layers", facts.layers)
    if flags is not None:
        return [facts.checked("no_rope_layers", flag, 0) != 0 for flag in flags]
    period = facts.size("hf.no_rope_layer_interval", default=PERIOD)
    return [(index + 1) % period != 0 for index in range(facts.layers)]


TOKENIZER = TokenizerKind(
    model="gpt2",
    pre="llama-bpe",
    template=TURNS
    + "{%- if enable_thinking is defined and not enable_thinking %}\n"
    + "{{- '<think>\\n\\n</think>\\n' }}\n{%- endif %}\n{%- endif %}\n",
    places={
        128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128002: "<think>",
        128003: "</think>", 128004: "<|finetune_right_pad_id|>", 128011: "<|im_start|>",
        128012: "<|im_end|>",
    },
    shown=frozenset(("<think>", "</think>")),
    roles={
        "bos": "<|begin_of_text|>",
        "eos": "<|im_end|>",
        "padding": "<|finetune_right_pad_id|>",
    },
)  # fmt: skip
SMALL_PLACES = dict(enumerate(TOKENIZER.places.values()))


def _tokenizer(vocab: int) -> TokenizerKind:
    """Return the tokenizer of the published size, or one whose special tokens come first."""
    return TOKENIZER if vocab > max(TOKENIZER.places) else replace(TOKENIZER, places=SMALL_PLACES)


def _recipe(name: str, dims: Dims) -> Recipe:
    return replace(plain_recipe(name, dims), theta=5e6)


def _config(recipe: Recipe, tokens: Json) -> Json:
    layers = range(recipe.dims.layers)
    return {
        "no_rope_layer_interval": PERIOD,
        "no_rope_layers": [int((index + 1) % PERIOD != 0) for index in layers],
        "use_sliding_window": False,
    }


def _keys(recipe: Recipe) -> Json:
    return {"vocab_size": recipe.dims.vocab, "rope.dimension_count": recipe.rope_dims}


FAMILIES = (
    Family(
        naming=Naming(architecture="smollm3", model_types=("smollm3",), tied_by_default=True),
        read_dims=read_dims,
        layer=plain_layer,
        read_config=read_config,
        fixed={
            "hf.hidden_act": ("silu",),
            "hf.no_rope_layers": ANY,
            "hf.use_sliding_window": (False,),
        },
        known={
            "smollm3-3b": Dims(
                architecture="smollm3", layers=36, hidden=2048, vocab=128256, context=65536,
                tied=True, heads=16, kv_heads=4, head_dim=128, ffn=11008,
            ),
        },
        synthesis=Synthesis(
            model_class="SmolLM3ForCausalLM",
            model_type="smollm3",
            tiny={
                "tiny": Dims(
                    architecture="smollm3", layers=5, hidden=256, vocab=1024, context=4096,
                    tied=True, heads=4, kv_heads=2, head_dim=64, ffn=512,
                ),
            },
            tokenizer=_tokenizer,
            recipe=_recipe,
            config=_config,
            keys=_keys,
            layout=SafetensorsLayout(undo=undo_pairs),
        ),
    ),
)  # fmt: skip
