"""DFlash drafts: a few Qwen3 layers that read features of a target model and guess a block.

Embedding and head are the target's, so that a draft does not run alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from headroom.errors import ModelError
from headroom.families import gemma4, qwen3, qwen35
from headroom.families.config import AttentionConfig, DraftConfig, FfnConfig, LayerConfig
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
    ANY,
    Family,
    FixedSettings,
    Json,
    Recipe,
    SafetensorsLayout,
    Synthesis,
    TokenizerKind,
    Yarn,
    plain_recipe,
)
from headroom.families.rope import plain_rope, rope_kind, rope_settings, yarn_rope
from headroom.families.synth.settings import layer_types, yarn_config, yarn_keys
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata
from headroom.formats.names import Naming

ARCHITECTURE = "general.architecture"
BLOCK = 16  # tokens of a block in published drafts
MOST_TOKENS = 64  # of a block, which has to fit into a page of a cache
MOST_CONTEXT = 262144  # where a file does not say; the target's context ends sooner
USUAL_EPS = 1e-6  # of norms, where a file does not say
# Masks of drafts whose files name none, by what their converters call the architecture.
MASKS = {"qwen35-dflash-draft": 248070, "gemma4-dflash-draft": 4}


def read_dims(facts: Facts) -> Dims:
    """Read the sizes of a draft."""
    kinds = _kinds(facts)
    window = facts.size("attention.sliding_window", default=0, least=0)
    return common_dims(
        facts,
        ffn=facts.size("feed_forward_length"),
        context=facts.size("context_length", default=MOST_CONTEXT),
        vocab=facts.size("vocab_size", default=1),
        tied=False,  # it has neither embedding nor head
        kinds=kinds,
        window=window if "window" in kinds else 0,
        taps=_count_taps(facts),
        block=_block(facts),
    )


def _block(facts: Facts) -> int:
    block = facts.size("block_size", "dflash.block_size", "hf.block_size", default=BLOCK)
    if not 2 <= block <= MOST_TOKENS:
        raise facts.wrong(f"a block has {block} tokens; it must have 2 to {MOST_TOKENS}")
    return block


def _kinds(facts: Facts) -> tuple[LayerKind, ...]:
    if not facts.header.metadata.get_bool("hf.use_sliding_window", True):
        return ()
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
    return len(named_taps(facts.header.metadata)) or facts.layers


def named_taps(metadata: Metadata) -> tuple[int, ...]:
    """Return the target layers that a file names, from 0; () where it names none."""
    if "target_layers" in metadata:  # of the layer after each
        return tuple(tap - 1 for tap in metadata.get_ints("target_layers"))
    if "dflash.target_layer_ids" in metadata:
        return metadata.get_ints("dflash.target_layer_ids")
    settings = metadata.values.get("hf.dflash_config")
    named = settings.get("target_layer_ids") if isinstance(settings, Mapping) else None
    return tuple(named) if isinstance(named, list) else ()


def read_draft(header: ModelHeader, dims: Dims, target_layers: int) -> DraftConfig:
    """Read a draft's settings from either format."""
    metadata, facts = header.metadata, Facts(header)
    own = metadata.values.get("hf.dflash_config")
    nested = own if isinstance(own, Mapping) else {}
    named = metadata.get_int("hf.num_target_layers", 0)
    taps = tuple(facts.checked("a target layer", tap, 0) for tap in named_taps(metadata))
    return DraftConfig(
        name=header.name,
        hidden=dims.hidden,
        vocab=dims.vocab if dims.vocab > 1 else 0,
        norm_eps=metadata.get_float("attention.layer_norm_rms_epsilon", USUAL_EPS),
        layers=tuple(_layer(header, dims, index) for index in range(dims.layers)),
        causal=_causal(metadata, nested, dims),
        block=dims.block,
        mask_token=_mask_token(facts, nested),
        taps=taps or spread_taps(dims.taps, named or target_layers),
        target_layers=named,
    )


def _layer(header: ModelHeader, dims: Dims, index: int) -> LayerConfig:
    settings = rope_settings(header, "full")
    read = yarn_rope if rope_kind(settings) == "yarn" else plain_rope
    windowed = dims.kind(index) == "window"
    if windowed and not dims.window:
        raise ModelError(f"{header.metadata.path}: layer {index} has a window of no size.")
    attention = AttentionConfig(
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        rope=read(settings, dims.head_dim),
        scale=dims.head_dim**-0.5,
        window=dims.window if windowed else 0,
        head_norms=True,
    )
    return LayerConfig(mixer=attention, ffn=FfnConfig(dims.ffn))


def _causal(metadata: Metadata, nested: Mapping[str, object], dims: Dims) -> tuple[bool, ...]:
    """Return which layers are causal within a block: those with a window, if no setting says."""
    said = nested.get("causal")
    for key in ("hf.is_causal", "attention.causal"):
        said = metadata.values.get(key) if said is None else said
    if said is None:
        return tuple(dims.kind(index) == "window" for index in range(dims.layers))
    return (said is True,) * dims.layers


def _mask_token(facts: Facts, nested: Mapping[str, object]) -> int:
    metadata = facts.header.metadata
    found = nested.get("mask_token_id")
    keys = ("tokenizer.ggml.mask_token_id", "dflash.mask_token_id", "hf.mask_token_id")
    for value in (
        *map(metadata.values.get, keys),
        MASKS.get(str(metadata.values.get(ARCHITECTURE))),
    ):
        found = value if found is None else found
    if found is None:
        raise facts.wrong("no setting names the mask token")
    return facts.checked("mask_token_id", found, 0)


def outer(dims: Dims) -> Tensors:
    """Return the tensors outside the layers; embedding and head are the target's."""
    return {
        "output_norm.weight": (dims.hidden,),
        "fc.weight": (dims.hidden, dims.taps * dims.hidden),
        "enc.output_norm.weight": (dims.hidden,),
    }


FIXED: FixedSettings = {
    "hf.hidden_act": ("silu",),
    "attention.causal": ANY,
    "attention.sliding_window": ANY,
    "rope.scaling.type": ("none", "default", "yarn"),
    "rope.scaling.factor": ANY,
}
DRAFT_27B = Dims(
    architecture="dflash", layers=5, hidden=5120, vocab=248320, context=262144, heads=32,
    kv_heads=8, head_dim=128, ffn=17408, taps=5, block=BLOCK,
)  # fmt: skip
TINY = Dims(
    architecture="dflash", layers=2, hidden=256, vocab=1024, context=4096, heads=4, kv_heads=2,
    head_dim=64, ffn=512, taps=3, block=4, kinds=("window", "full"), window=16,
)  # fmt: skip
TARGET_LAYERS = {"qwen3.6-35b-a3b-dflash": 40, "gemma-4-31b-dflash": 60, "tiny": 8}  # others: 64


def _tokenizer(vocab: int) -> TokenizerKind:
    """Return the tokenizer of the target, which is found by the size of the vocabulary."""
    return gemma4.TOKENIZER if vocab == gemma4.VOCAB else qwen35.TOKENIZER


def _recipe(name: str, dims: Dims) -> Recipe:
    theta = 1e6 if dims.vocab == gemma4.VOCAB else 1e7
    taps = spread_taps(dims.taps, TARGET_LAYERS.get(name, 64))
    recipe = replace(plain_recipe(name, dims), theta=theta, taps=taps)
    if name == "qwen3.6-35b-a3b-dflash":
        return replace(recipe, yarn=Yarn(64.0, 4096, 32.0, None))
    return recipe


def spread_taps(count: int, target_layers: int) -> tuple[int, ...]:
    """Return `count` target layers, evenly spaced from the second to the third-last."""
    if count == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))


def _from_config(recipe: Recipe, metadata: Metadata) -> Recipe:
    taps = named_taps(metadata) or tuple(range(1, recipe.dims.taps + 1))
    yarn = None
    if metadata.get_str("rope.scaling.type", "none") == "yarn":
        yarn = Yarn(
            metadata.get_float("rope.scaling.factor"),
            metadata.get_int("rope.scaling.original_context_length"),
            metadata.get_float("rope.scaling.yarn_beta_fast", 32.0),
            None,
        )
    return replace(recipe, taps=taps, yarn=yarn)


def _config(recipe: Recipe, tokens: Json) -> Json:
    dims = recipe.dims
    values: Json = {
        "block_size": recipe.dims.block,
        "dflash_config": {
            "mask_token_id": tokens.get("mask_token_id"),
            "target_layer_ids": list(recipe.taps),
        },
        "layer_types": layer_types(dims),
        "sliding_window": dims.window or None,
        "use_sliding_window": dims.window > 0,
    }
    if recipe.yarn is not None:
        values["rope_parameters"] = {"rope_theta": recipe.theta, **yarn_config(recipe.yarn)}
    return values


def _keys(recipe: Recipe) -> Json:
    dims = recipe.dims
    values: Json = {
        "block_size": dims.block,
        "target_layers": [tap + 1 for tap in recipe.taps],
        "vocab_size": dims.vocab,
    }
    if dims.window:
        flags = [dims.kind(index) == "window" for index in range(dims.layers)]
        values["attention.sliding_window"] = dims.window
        values["attention.sliding_window_pattern"] = flags
    return values | (yarn_keys(recipe.yarn) if recipe.yarn is not None else {})


FAMILIES = (
    Family(
        naming=Naming(
            architecture="dflash",
            other_architectures=("dflash-draft", "qwen35-dflash-draft", "gemma4-dflash-draft"),
            model_types=("dflash",),
            classes=("DFlashDraftModel",),
            # The projection and norm of the target's features, which the draft reads. Converters
            # have three spellings.
            model_names=(
                ("features.proj", "fc", "fc"),
                ("features.norm", "enc.output_norm", "hidden_norm"),
                ("features.proj", "dflash.fc", ""),
                ("features.norm", "dflash.hidden_norm", ""),
                ("features.proj", "dflash_fc", ""),
                ("features.norm", "dflash_hidden_norm", ""),
            ),
            layer_names=(("ffn.norm", "post_attention_norm", ""),),
        ),
        read_dims=read_dims,
        layer=qwen3.layer,
        outer=outer,
        read_config=None,
        read_draft=read_draft,
        fixed=FIXED,
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
