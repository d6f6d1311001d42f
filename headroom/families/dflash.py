"""DFlash drafts: a few Qwen3 layers that read features of a target model and draft a block.

A draft can be planned and synthesised, but it does not run alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from headroom.families import gemma4, qwen3, qwen35
from headroom.families.dims import (
    Dims,
    Facts,
    LayerKind,
    Tensors,
    common_dims,
    named_kinds,
    pattern,
    window_flags,
)
from headroom.families.family import (
    Family,
    Json,
    Recipe,
    SafetensorsLayout,
    Synthesis,
    TokenizerKind,
    plain_recipe,
)
from headroom.families.synth.settings import layer_types
from headroom.formats.metadata import Metadata
from headroom.formats.names import Naming

DRAFT_TOKENS = 16  # tokens that a draft proposes in one pass


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a draft."""
    kinds = _kinds(facts)
    window = facts.size("attention.sliding_window", default=0, least=0)
    return common_dims(
        facts,
        ffn=facts.size("feed_forward_length"),
        vocab=facts.size("vocab_size", default=1),
        tied=False,  # it has neither embedding nor head
        kinds=kinds,
        window=window if "window" in kinds else 0,
        taps=_count_taps(facts),
    )


def _kinds(facts: Facts) -> tuple[LayerKind, ...]:
    flags = window_flags(facts, "attention.sliding_window_pattern")
    if flags is not None:
        return flags
    kinds = named_kinds(facts)
    if kinds or not facts.size("attention.sliding_window", default=0, least=0):
        return kinds
    return pattern(facts.layers, facts.layers, "window")


def _count_taps(facts: Facts) -> int:
    """Return how many target layers a draft reads, by its projection or by its settings."""
    projection = facts.header.tensors.get("features.proj")
    if projection is not None:
        return max(1, projection.shape[-1] // facts.size("embedding_length"))
    named = _target_layers(facts.header.metadata)
    return len(named) or facts.layers


def _target_layers(metadata: Metadata) -> list[int]:
    """Return the target layers that a config.json names, or [] where it names none."""
    settings = metadata.values.get("hf.dflash_config")
    named = settings.get("target_layer_ids") if isinstance(settings, Mapping) else None
    return named if isinstance(named, list) else []


def outer(dims: Dims) -> Tensors:
    """Return the tensors outside the layers; embedding and head are the target's."""
    return {
        "output_norm.weight": (dims.hidden,),
        "fc.weight": (dims.hidden, dims.taps * dims.hidden),
        "enc.output_norm.weight": (dims.hidden,),
    }


DRAFT_27B = Dims(
    architecture="dflash", layers=5, hidden=5120, vocab=248320, context=262144, heads=32,
    kv_heads=8, head_dim=128, ffn=17408, taps=5,
)  # fmt: skip
TINY = Dims(
    architecture="dflash", layers=2, hidden=256, vocab=1024, context=4096, heads=4, kv_heads=2,
    head_dim=64, ffn=512, taps=3, kinds=("window", "full"), window=16,
)  # fmt: skip
TARGET_LAYERS = {"qwen3.6-35b-a3b-dflash": 40, "gemma-4-31b-dflash": 60, "tiny": 8}  # others: 64


def _tokenizer(vocab: int) -> TokenizerKind:
    """Return the tokenizer of the target, which is found by the size of the vocabulary."""
    return gemma4.TOKENIZER if vocab == gemma4.VOCAB else qwen35.TOKENIZER


def _recipe(name: str, dims: Dims) -> Recipe:
    theta = 1e6 if dims.vocab == gemma4.VOCAB else 1e7
    taps = spread_taps(dims.taps, TARGET_LAYERS.get(name, 64))
    return replace(plain_recipe(name, dims), theta=theta, taps=taps)


def spread_taps(count: int, target_layers: int) -> tuple[int, ...]:
    """Return `count` target layers, evenly spaced from the second to the third-last."""
    if count == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))


def _from_config(recipe: Recipe, metadata: Metadata) -> Recipe:
    named = _target_layers(metadata)
    return replace(recipe, taps=tuple(named) or tuple(range(1, recipe.dims.taps + 1)))


def _config(recipe: Recipe, tokens: Json) -> Json:
    dims = recipe.dims
    return {
        "block_size": DRAFT_TOKENS,
        "dflash_config": {
            "mask_token_id": tokens.get("mask_token_id"),
            "target_layer_ids": list(recipe.taps),
        },
        "layer_types": layer_types(dims),
        "sliding_window": dims.window or None,
        "use_sliding_window": dims.window > 0,
    }


def _keys(recipe: Recipe) -> Json:
    dims = recipe.dims
    values: Json = {
        "block_size": DRAFT_TOKENS,
        "target_layers": [tap + 1 for tap in recipe.taps],
        "vocab_size": dims.vocab,
    }
    if dims.window:
        flags = [dims.kind(index) == "window" for index in range(dims.layers)]
        values["attention.sliding_window"] = dims.window
        values["attention.sliding_window_pattern"] = flags
    return values


FAMILIES = (
    Family(
        naming=Naming(
            architecture="dflash",
            model_types=("dflash",),
            classes=("DFlashDraftModel",),
            # The projection and norm of the target's features, which the draft reads.
            model_names=(
                ("features.proj", "fc", "fc"),
                ("features.norm", "enc.output_norm", "hidden_norm"),
            ),
        ),
        read_dims=read_dims,
        layer=qwen3.layer,
        outer=outer,
        read_config=None,
        known={
            "qwen3.5-27b-dflash": DRAFT_27B,
            "qwen3.6-27b-dflash": replace(DRAFT_27B, window=2048, kinds=pattern(5, 5, "window")),
            "qwen3.6-35b-a3b-dflash": replace(
                DRAFT_27B, layers=8, hidden=2048, kv_heads=4, ffn=6144, window=4096,
                kinds=pattern(8, 8, "window"),
            ),
            "gemma-4-31b-dflash": replace(
                DRAFT_27B, hidden=5376, vocab=gemma4.VOCAB, heads=64, ffn=10752, window=2048,
                taps=6, kinds=pattern(5, 5, "window"),
            ),
        },
        synthesis=Synthesis(
            model_class="DFlashDraftModel",
            model_type="qwen3",
            tiny={"tiny": TINY},
            tokenizer=_tokenizer,
            recipe=_recipe,
            from_config=_from_config,
            config=_config,
            keys=_keys,
            layout=SafetensorsLayout(prefix=""),
        ),
    ),
)  # fmt: skip
