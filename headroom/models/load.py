"""load_model(): planned weights into blocks."""

from collections.abc import Callable, Mapping

from headroom.formats.tensor import TensorInfo
from headroom.layers.attention import Attention
from headroom.layers.block import Block, Layer
from headroom.layers.cache import allocate_kv, kv_bytes
from headroom.layers.embedding import Embedding, Head
from headroom.layers.fused import FusedBlock, refuses_to_fuse
from headroom.layers.mlp import Mlp
from headroom.layers.norm import RmsNorm
from headroom.layers.weights import WeightSource, open_weights
from headroom.layers.workspace import Workspace, open_workspace
from headroom.memory.budget import PlanSettings
from headroom.memory.plan import Plan
from headroom.models.config import ModelConfig
from headroom.models.model import Model


def load_model(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    plan: Plan,
    count: Callable[[str, int], None],
) -> Model:
    """Bring a model's weights to their device as the plan says and build its blocks."""
    settings, device = plan.settings, plan.devices[0]
    source = open_weights(tensors, device.name, settings, count)
    # Plain kernels take their scratch from torch, so that only the plan counts it.
    scratch_bytes = device.allocated["workspace"] if settings.kernels == "native" else 0
    workspace = open_workspace(config.hidden, config.vocab, settings, scratch_bytes, count)
    embeddings = source.at("", "embeddings")
    table = embeddings("embed") if config.tied else embeddings.table("embed")
    blocks = []
    for index in range(len(config.layers)):
        get = source.at(f"layers.{index}.")
        blocks.append(build_layer(config, index, get, settings, workspace))
    vocabulary = table if config.tied else source.at("", "head")("head")
    norm = RmsNorm(source.vector("norm"), config.norm_eps, source.case)
    return Model(Embedding(table), blocks, Head(norm, vocabulary, source.case), workspace)


def build_layer(
    config: ModelConfig,
    index: int,
    get: WeightSource,
    settings: PlanSettings,
    workspace: Workspace,
) -> Layer:
    """Build layer `index`; `get` returns its weights on the planned device."""
    layer = config.layers[index]
    cache = allocate_kv(
        layer.attention,
        settings.pages,
        settings.page_size,
        settings.k_type,
        settings.v_type,
        get.case.device,
    )
    get.count("kv", kv_bytes(cache))
    if refuses_to_fuse(layer.attention, get, cache) is None:
        return FusedBlock(layer.attention, config.norm_eps, get, cache, workspace.scratch)
    return Block(
        mixer_norm=RmsNorm(get.vector("attn.norm"), config.norm_eps, get.case),
        mixer=Attention(layer.attention, get, cache),
        ffn_norm=RmsNorm(get.vector("ffn.norm"), config.norm_eps, get.case),
        ffn=Mlp(get),
    )
