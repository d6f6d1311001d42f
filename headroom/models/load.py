"""load_model(): planned weights into blocks, with progress."""

from collections.abc import Callable

from headroom.formats.tensor import TensorInfo
from headroom.layers.attention import Attention
from headroom.layers.block import Block
from headroom.layers.cache import allocate_kv, kv_bytes
from headroom.layers.embedding import Embedding, Head
from headroom.layers.mlp import Mlp
from headroom.layers.norm import RmsNorm
from headroom.layers.weights import WeightSource
from headroom.memory.budget import PlanSettings
from headroom.models.config import ModelConfig
from headroom.models.model import Model

Progress = Callable[[int, int], None]  # layers done, layers in all


def load_model(
    config: ModelConfig,
    tensors: dict[str, TensorInfo],
    settings: PlanSettings,
    device: str,
    count: Callable[[str, int], None],
    progress: Progress = lambda done, total: None,
) -> Model:
    """Bring a model's weights to a device as the plan says and build its blocks."""
    source = WeightSource(
        tensors=tensors,
        device=device,
        dtype=settings.dtype,
        unpack=settings.weights == "unpacked",
        count=count,
    )
    table = source.at("", "embeddings")("embed")
    blocks = []
    for index in range(len(config.layers)):
        blocks.append(build_layer(config, index, source.at(f"layers.{index}."), settings))
        progress(index + 1, len(config.layers))
    vocabulary = table if config.tied else source.at("", "head")("head")
    norm = RmsNorm(source.vector("norm"), config.norm_eps)
    return Model(Embedding(table), blocks, Head(norm, vocabulary, settings.dtype))


def build_layer(
    config: ModelConfig, index: int, get: WeightSource, settings: PlanSettings
) -> Block:
    """Build layer `index`; `get` returns its weights on the planned device."""
    layer = config.layers[index]
    cache = allocate_kv(
        layer.attention,
        settings.pages,
        settings.page_size,
        settings.k_type,
        settings.v_type,
        get.device,
    )
    get.count("kv", kv_bytes(cache))
    return Block(
        mixer_norm=RmsNorm(get.vector("attn.norm"), config.norm_eps),
        mixer=Attention(layer.attention, get, cache),
        ffn_norm=RmsNorm(get.vector("ffn.norm"), config.norm_eps),
        ffn=Mlp(get),
    )
