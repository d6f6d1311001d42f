"""load_model(): planned weights into blocks."""

from collections.abc import Callable, Mapping

import torch

from headroom.errors import OptionError
from headroom.formats.tensor import TensorInfo
from headroom.layers.attention import Attention
from headroom.layers.block import Block, Ffn, Layer, Mixer
from headroom.layers.cache import allocate_kv, allocate_state
from headroom.layers.config import DeltaNetConfig
from headroom.layers.delta_net import DeltaNet
from headroom.layers.embedding import Embedding, Head
from headroom.layers.fused import FusedBlock, refuses_to_fuse
from headroom.layers.mlp import Mlp
from headroom.layers.norm import RmsNorm
from headroom.layers.weights import WeightSource, open_weights
from headroom.layers.workspace import Workspace, open_workspace
from headroom.memory.budget import PlanSettings
from headroom.memory.plan import Plan
from headroom.models.config import LayerConfig, ModelConfig
from headroom.models.model import Model
from headroom.moe.experts_ffn import ExpertsFfn
from headroom.moe.stats import RoutingStats
from headroom.options import KV_TYPES


def load_model(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    plan: Plan,
    count: Callable[[str, int], None],
) -> Model:
    """Bring a model's weights to their device as the plan says and build its blocks."""
    settings, device = plan.settings, plan.devices[0]
    _check_cache_types(settings)
    source = open_weights(tensors, device.name, settings, count, config.norm_offset)
    # Plain kernels take their scratch from torch, so that only the plan counts it.
    scratch_bytes = device.allocated["workspace"] if settings.kernels == "native" else 0
    workspace = open_workspace(config.hidden, config.vocab, settings, scratch_bytes, count)
    embeddings = source.at("", "embeddings")
    table = embeddings("embed") if config.tied else embeddings.table("embed")
    routing = open_routing(config, device.name)
    blocks = []
    for index in range(len(config.layers)):
        get = source.at(f"layers.{index}.")
        blocks.append(build_layer(config, index, get, settings, workspace, routing))
    vocabulary = table if config.tied else source.at("", "head")("head")
    norm = RmsNorm(source.norm("norm"), config.norm_eps, source.case)
    head = Head(norm, vocabulary, source.case, config.softcap)
    return Model(Embedding(table, config.embed_scale), blocks, head, workspace, routing)


def open_routing(config: ModelConfig, device: str) -> RoutingStats | None:
    """Return empty statistics of a model's routers; None where it has none."""
    experts = max((layer.experts.experts for layer in config.layers if layer.experts), default=0)
    return RoutingStats(len(config.layers), experts, device) if experts else None


def _check_cache_types(settings: PlanSettings) -> None:
    """Refuse a type that plans can count and no kernel has yet."""
    for what, name in (("keys", settings.k_type), ("values", settings.v_type)):
        if name not in KV_TYPES:
            raise OptionError(
                f"Cached {what} in {name} cannot be run yet.",
                hint=f"Choose from {', '.join(KV_TYPES)}.",
                param="kv_type",
            )


def build_layer(
    config: ModelConfig,
    index: int,
    get: WeightSource,
    settings: PlanSettings,
    workspace: Workspace,
    routing: RoutingStats | None,
) -> Layer:
    """Build layer `index`; `get` returns its weights on the planned device."""
    layer = config.layers[index]
    mixer = _mixer(config, index, get, settings, workspace)
    if isinstance(mixer, FusedBlock):
        return mixer
    return Block(
        mixer_norm=RmsNorm(get.norm("attn.norm"), config.norm_eps, get.case),
        mixer=mixer,
        ffn_norm=RmsNorm(get.norm("ffn.norm"), config.norm_eps, get.case),
        ffn=_ffn(layer, get, workspace, routing.of_layer(index) if routing else None),
    )


def _ffn(
    layer: LayerConfig, get: WeightSource, workspace: Workspace, counts: torch.Tensor | None
) -> Ffn:
    """The feed-forward part of a layer: dense, or experts instead."""
    if layer.experts is not None:
        assert counts is not None
        # A layer's counts may be a longer row: layers need not have equally many experts.
        counts = counts[: layer.experts.experts]
        return ExpertsFfn(layer.experts, get, counts, workspace.scratch)
    assert layer.ffn is not None
    return Mlp(get, layer.ffn.activation)


def _mixer(
    config: ModelConfig,
    index: int,
    get: WeightSource,
    settings: PlanSettings,
    workspace: Workspace,
) -> Mixer | FusedBlock:
    """Build a layer's mixer with what it remembers, or the whole layer where one kernel runs it."""
    mixer, dense = config.layers[index].mixer, config.layers[index].experts is None
    if isinstance(mixer, DeltaNetConfig):
        state = allocate_state(mixer, settings, get.case.device)
        get.count("recurrent_state", state.nbytes)
        return DeltaNet(mixer, config.norm_eps, get, state)
    pages = allocate_kv(mixer, settings, get.case.device)
    get.count("kv", pages.nbytes)
    if dense and refuses_to_fuse(mixer, get, pages) is None:
        return FusedBlock(mixer, config.norm_eps, get, pages, workspace.scratch)
    return Attention(mixer, config.norm_eps, get, pages)
