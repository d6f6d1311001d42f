"""load_model(): planned weights into blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headroom.experts.cold import Hybrid
from headroom.experts.device_ffn import Counts, DeviceBeside, DeviceExperts, Place, experts_fit
from headroom.experts.ffn import BesideExperts, ExpertsFfn
from headroom.experts.placement import ExpertPlacement
from headroom.experts.stats import RoutingStats
from headroom.experts.store import LayerStore, StoreRequest, blob_layout, open_store
from headroom.families.config import (
    AttentionConfig,
    DeltaNetConfig,
    ExpertsConfig,
    LayerConfig,
    ModelConfig,
)
from headroom.formats.tensor import TensorInfo
from headroom.kernels.cuda.matmul import RowNorm
from headroom.layers.attention import Attention
from headroom.layers.block import (
    Block,
    Ffn,
    Layer,
    Mixer,
    NormedFfn,
    NormedMixer,
    PostNormed,
    SandwichBlock,
)
from headroom.layers.cache import KvPages, allocate_kv, allocate_state
from headroom.layers.cuda_block import (
    CudaAttention,
    CudaBlock,
    CudaDeltaNet,
    CudaMlp,
    CudaPart,
    CudaPerLayerPart,
    CudaScale,
    fits_cuda,
)
from headroom.layers.delta_net import DeltaNet
from headroom.layers.modules import Embedding, Head, Mlp, RmsNorm
from headroom.layers.native_block import NativeBlock, refuses_native_block
from headroom.layers.per_layer_inputs import PerLayerInputs, PerLayerPart
from headroom.layers.upload import open_upload
from headroom.layers.weights import WeightSource, open_weights
from headroom.layers.workspace import Workspace, open_workspace
from headroom.machine.devices import torch_name
from headroom.plan.plan import Plan
from headroom.plan.settings import PlanSettings
from headroom.split.model import Model


@dataclass(frozen=True, slots=True, eq=False)
class Common:
    """What the layers of a model share while they are built."""

    settings: PlanSettings
    workspace: Workspace
    side: PerLayerInputs | None
    routing: RoutingStats | None
    hybrid: Hybrid | None = None  # where some experts are cold
    caches: dict[int, KvPages] = field(default_factory=dict)  # by the layer that owns them


def load_model(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    plan: Plan,
    count: Callable[[str, int], None],
    placement: ExpertPlacement | None = None,
) -> Model:
    """Bring a model's weights to their device as the plan says and build its blocks.

    With a placement some experts are cold; without one the device holds all of them.
    """
    settings, device = plan.settings, plan.devices[0]
    place = torch_name(device.name)
    # Plain kernels take their scratch from torch, so that only the plan counts it.
    planned = settings.kernels == "native" or settings.uses_arena
    scratch_bytes = device.allocated["workspace"] if planned else 0
    workspace = open_workspace(
        config.hidden, config.vocab, settings, scratch_bytes, count, config.keeps_embedding,
        place,
    )  # fmt: skip
    # Steps use their scratch later: until then it is free for loading.
    lent = workspace.scratch if settings.uses_arena else None
    with open_upload(place, device.allocated["workspace"], lent) as upload:
        source = open_weights(tensors, device.name, settings, count, config.norm_offset, upload)
        return _build(config, source, plan, workspace, placement)


def _build(
    config: ModelConfig,
    source: WeightSource,
    plan: Plan,
    workspace: Workspace,
    placement: ExpertPlacement | None,
) -> Model:
    settings, device = plan.settings, plan.devices[0]
    # First of all: memory that is refused is told before anything is read.
    hybrid = None if placement is None else _open_hybrid(config, source, plan, placement)
    embeddings = source.at("", "embeddings")
    here = config.tied or "embeddings" in device.allocated
    table = embeddings("embed") if config.tied else embeddings.table("embed", pinned=not here)
    side = _side_inputs(config, source, plan)
    routing = open_routing(config, torch_name(device.name))
    common = Common(settings, workspace, side, routing, hybrid)
    blocks = [
        build_layer(config, index, source.at(f"layers.{index}."), common)
        for index in range(len(config.layers))
    ]
    vocabulary = table if config.tied else source.at("", "head")("head")
    norm = RmsNorm(source.norm("norm"), config.norm_eps, source.case)
    head = Head(norm, vocabulary, source.case, config.softcap)
    embedding = Embedding(table, source.case, config.embed_scale)
    model = Model(embedding, blocks, head, workspace, routing, side, hybrid)
    model.to_compile = source.to_compile
    return model


def _open_hybrid(
    config: ModelConfig, source: WeightSource, plan: Plan, placement: ExpertPlacement
) -> Hybrid:
    """Return memory for the experts of all layers that have cold ones, and who computes those."""
    settings, device = plan.settings, plan.devices[0]
    assert plan.cold_speeds is not None
    layouts = []
    for index, layer in enumerate(config.layers):
        get = source.at(f"layers.{index}.")
        layouts.append(
            None
            if layer.experts is None
            else blob_layout(layer.experts, get, tiles=_fits_device(layer, get))
        )
    request = StoreRequest(
        placement=placement,
        cold=settings.cold,
        speeds=plan.cold_speeds,
        pin=settings.pin_experts,
        keep_copy=settings.keep_host_copy,
        staging_bytes=device.allocated.get("expert_staging", 0),
    )
    store = open_store(layouts, request, device.name, source.count)
    return Hybrid(store, device.name, plan.cold_speeds, settings.cold)


def _side_inputs(config: ModelConfig, source: WeightSource, plan: Plan) -> PerLayerInputs | None:
    """Return what makes the inputs of single layers, where a model has them."""
    if not config.layers[0].side_width:
        return None
    hosted = any(line.name == "embeddings" for line in plan.host.lines)
    table = source.at("", "embeddings").table("side.embed", pinned=hosted)
    return PerLayerInputs(table, source, config.norm_eps, plan.settings.stream_rows)


def open_routing(config: ModelConfig, device: str) -> RoutingStats | None:
    """Return empty statistics of a model's routers; None where it has none."""
    experts = max((layer.experts.experts for layer in config.layers if layer.experts), default=0)
    return RoutingStats(len(config.layers), experts, device) if experts else None


def build_layer(config: ModelConfig, index: int, get: WeightSource, common: Common) -> Layer:
    """Build layer `index`; `get` returns its weights on the planned device."""
    layer, eps = config.layers[index], config.norm_eps
    if _fits_device(layer, get):
        return _device_block(config, index, get, common)
    mixer = _mixer(config, index, get, common)
    if isinstance(mixer, NativeBlock):
        return mixer
    if layer.post_norms:
        return _sandwich(config, index, mixer, get, common)
    return Block(
        mixer_norm=_norm(get, "attn.norm", eps),
        mixer=mixer,
        ffn_norm=_norm(get, "ffn.norm", eps),
        ffn=_ffn(layer, index, get, common),
    )


def _fits_device(layer: LayerConfig, get: WeightSource) -> bool:
    """Tell whether a GPU's fused parts run a layer; others run as separate operations."""
    if not fits_cuda(layer.mixer, get):
        return False
    return layer.experts is None or experts_fit(layer.experts, get)


def _device_block(config: ModelConfig, index: int, get: WeightSource, common: Common) -> CudaBlock:
    """Build a layer of the GPU's fused parts."""
    layer, eps = config.layers[index], config.norm_eps
    parts: list[CudaPart] = []
    if isinstance(layer.mixer, DeltaNetConfig):
        state = allocate_state(layer.mixer, common.settings, get.case.place)
        get.count("recurrent_state", state.nbytes)
        parts.append(CudaDeltaNet(layer.mixer, eps, get, state))
    else:
        after = RowNorm(get.norm("attn.post_norm"), eps) if layer.post_norms else None
        pages = _pages(layer.mixer, index, get, common)
        parts.append(CudaAttention(layer.mixer, eps, get, pages, after))
    parts.append(_device_ffn(config, index, get, common))
    if common.side is not None:
        parts.append(CudaPerLayerPart(common.side, index, get, eps))
    if layer.scaled:
        parts.append(CudaScale(get.vector("scale")))
    return CudaBlock(*parts)


def _device_ffn(config: ModelConfig, index: int, get: WeightSource, common: Common) -> CudaPart:
    """Build a GPU's feed-forward part: dense, experts instead, or experts beside it."""
    layer, eps = config.layers[index], config.norm_eps
    if layer.experts is not None and not layer.post_norms:
        counts = _counts(layer.experts, index, common)
        return DeviceExperts(layer.experts, eps, get, counts, _place(index, common))
    assert layer.ffn is not None
    if layer.experts is not None:
        dense = CudaMlp(layer.ffn, eps, get, RowNorm(get.norm("ffn.dense_post_norm"), eps))
        counts = _counts(layer.experts, index, common)
        return DeviceBeside(dense, layer.experts, eps, get, counts, _place(index, common))
    after = RowNorm(get.norm("ffn.post_norm"), eps) if layer.post_norms else None
    return CudaMlp(layer.ffn, eps, get, after)


def _mixer(
    config: ModelConfig, index: int, get: WeightSource, common: Common
) -> Mixer | NativeBlock:
    """Build a layer's mixer with what it remembers, or the whole layer where one kernel runs it."""
    layer, eps = config.layers[index], config.norm_eps
    if isinstance(layer.mixer, DeltaNetConfig):
        state = allocate_state(layer.mixer, common.settings, get.case.place)
        get.count("recurrent_state", state.nbytes)
        return DeltaNet(layer.mixer, eps, get, state)
    pages = _pages(layer.mixer, index, get, common)
    if layer.plain and refuses_native_block(layer.mixer, get, pages) is None:
        return NativeBlock(layer.mixer, eps, get, pages, common.workspace.scratch)
    return Attention(layer.mixer, eps, get, pages)


def _sandwich(
    config: ModelConfig, index: int, mixer: Mixer, get: WeightSource, common: Common
) -> Layer:
    """Build a layer whose parts are normed before and after."""
    layer, eps = config.layers[index], config.norm_eps
    parts: list[Ffn] = [_sandwiched_ffn(config, index, get, common)]
    if common.side is not None:
        parts.append(PerLayerPart(common.side, index, get, eps))
    return SandwichBlock(
        NormedMixer(_norm(get, "attn.norm", eps), mixer, _norm(get, "attn.post_norm", eps)),
        parts,
        get.vector("scale") if layer.scaled else None,
    )


def _sandwiched_ffn(config: ModelConfig, index: int, get: WeightSource, common: Common) -> Ffn:
    """Build a feed-forward part with norms before and after: dense, or experts beside it."""
    layer, eps = config.layers[index], config.norm_eps
    assert layer.ffn is not None
    dense = Mlp(get, layer.ffn.activation)
    before, after = _norm(get, "ffn.norm", eps), _norm(get, "ffn.post_norm", eps)
    if layer.experts is None:
        return NormedFfn(before, dense, after)
    beside = NormedFfn(before, dense, _norm(get, "ffn.dense_post_norm", eps))
    (counts, _), scratch = _counts(layer.experts, index, common), common.workspace.scratch
    experts = BesideExperts(
        beside, layer.experts, get, eps, counts, scratch, _stored(index, common)
    )
    return PostNormed(experts, after)


def _pages(mixer: AttentionConfig, index: int, get: WeightSource, common: Common) -> KvPages:
    """Return the layer's pages: its own, or those of the layer whose cache it reads."""
    if mixer.shares is not None:
        return common.caches[mixer.shares]
    pages = allocate_kv(mixer, common.settings, get.case.place)
    get.count("kv", pages.nbytes)
    common.caches[index] = pages
    return pages


def _ffn(layer: LayerConfig, index: int, get: WeightSource, common: Common) -> Ffn:
    """Build a layer's feed-forward part: dense, or experts instead."""
    if layer.experts is not None:
        counts, _ = _counts(layer.experts, index, common)
        scratch = common.workspace.scratch
        return ExpertsFfn(layer.experts, get, counts, scratch, _stored(index, common))
    assert layer.ffn is not None
    return Mlp(get, layer.ffn.activation)


def _stored(index: int, common: Common) -> LayerStore | None:
    """Return where a layer's experts are, if some are cold."""
    return None if common.hybrid is None else common.hybrid.store.layers[index]


def _place(index: int, common: Common) -> Place | None:
    """Return the same with what is done about cold ones."""
    stored = _stored(index, common)
    return None if common.hybrid is None or stored is None else (common.hybrid, stored)


def _counts(experts: ExpertsConfig, index: int, common: Common) -> Counts:
    """Return the layer's rows of the statistics, which may be longer than its experts are many."""
    assert common.routing is not None
    few, many = (common.routing.of_layer(index, many=many) for many in (False, True))
    return few[: experts.experts], many[: experts.experts]


def _norm(get: WeightSource, name: str, eps: float) -> RmsNorm:
    return RmsNorm(get.norm(name), eps, get.case)
