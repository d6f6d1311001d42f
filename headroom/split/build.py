"""load_model(): loads the weights of one stage as planned, and builds its layers from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from headroom.experts.cold import ColdExperts, StoredLayer
from headroom.experts.cuda_ffn import CudaDenseAndExpertsFfn, CudaExpertsFfn, experts_fit
from headroom.experts.ffn import DenseAndExpertsFfn, ExpertsFfn
from headroom.experts.layer_store import BlobLayout, LayerStore
from headroom.experts.placement import ExpertPlacement
from headroom.experts.stats import RouterCounts, RoutingStats
from headroom.experts.store import StoreRequest, blob_layout, open_store
from headroom.experts.traces.taps import LayerTap, RouterTap, StageTap, TapSite
from headroom.experts.traces.trace import TracedLayer
from headroom.families.config import (
    AttentionConfig,
    DeltaNetConfig,
    DraftConfig,
    ExpertsConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
)
from headroom.formats.tensor import TensorInfo
from headroom.kernels.cuda.matmul import RowNorm
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.ops import RecurrentState
from headroom.kernels.weight import Weight
from headroom.layers.attention import Attention
from headroom.layers.block import (
    Block,
    Ffn,
    Mixer,
    NormedFfn,
    NormedMixer,
    PostNormed,
    PreNormBlock,
    SandwichBlock,
)
from headroom.layers.cache import KvPages, StageCaches, allocate_kv, allocate_state
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
from headroom.layers.dflash import DFlashNetwork, Target
from headroom.layers.draft_network import DraftNetwork
from headroom.layers.features import ModelFeatures, StageFeatures
from headroom.layers.guesses import Guesses, Keeper, KeptRows
from headroom.layers.modules import Embedding, Head, Mlp, RmsNorm
from headroom.layers.mtp import HiddenStates, MtpHead
from headroom.layers.native_block import NativeBlock, refuses_native_block
from headroom.layers.per_layer_inputs import LayerInputs, PerLayerInputs, PerLayerPart
from headroom.layers.upload import open_upload
from headroom.layers.weights import WeightSource, open_weights
from headroom.layers.workspace import Workspace, open_workspace
from headroom.machine.devices import physical_name, torch_name
from headroom.plan.layout import DevicePlan
from headroom.plan.lines import StagePlace
from headroom.plan.plan import Plan
from headroom.split.model import Model


@dataclass(frozen=True, slots=True, eq=False)
class DraftFiles:
    """A draft model whose weights the last stage loads, beside its own layers."""

    config: DraftConfig
    tensors: Mapping[str, TensorInfo]
    earlier: tuple[StageFeatures, ...]  # features that stages before the last one keep


def load_model(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    plan: Plan,
    device: DevicePlan,
    count: Callable[[str, int], None],  # told the plan's line and the bytes of each allocation
    placement: ExpertPlacement | None = None,
    tap: RouterTap | None = None,
    embedding: Embedding | None = None,
    draft: DraftFiles | None = None,
) -> Model:
    """Load the weights of one stage to its device of the plan and build its layers.

    `placement` says which experts are hot; without one the device holds all experts. `tap` records
    or replaces the picks of all routers. `embedding` is that of the first stage, which a prediction
    head or a draft on a later one reads, too. `draft` is loaded to the last stage.
    """
    settings = device.settings
    torch_device = torch_name(device.name)
    place = StagePlace.of(device.layers, len(config.layers))
    # Kernels of other backends take their scratch from torch: it is planned, but not allocated.
    allocates_scratch = settings.kernels == "native" or settings.uses_arena
    workspace = open_workspace(
        config,
        place,
        settings,
        device.allocated["workspace"] if allocates_scratch else 0,
        count,
        torch_device,
    )
    # No step runs while weights are loaded, so the upload may use the scratch for its buffers.
    lent = workspace.scratch if settings.uses_arena else None
    with open_upload(torch_device, device.allocated["workspace"], lent) as upload:
        source = open_weights(
            tensors, physical_name(device.name), settings, count, config.norm_offset, upload
        )
        builder = _StageBuilder(config, source, plan, device, place, workspace, tap)
        return builder.build(placement, embedding, draft)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer that is being built."""

    index: int
    config: LayerConfig
    get: WeightSource  # returns the layer's weights on the planned device, by their short names


class _StageBuilder:
    """Builds all layers of a stage, and what they share: routing counts, caches, cold experts."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        plan: Plan,
        device: DevicePlan,
        place: StagePlace,
        workspace: Workspace,
        tap: RouterTap | None = None,
    ) -> None:
        self._config, self._source, self._workspace = config, source, workspace
        self._plan, self._settings, self._device = plan, device.settings, device
        self._place = place
        self._eps = config.norm_eps
        self._cold_experts: ColdExperts | None = None  # None if no expert is cold
        self._per_layer_inputs: LayerInputs | None = None
        self._routing: RoutingStats | None = None
        self._router_tap = tap
        self._tap: StageTap | None = None
        self._pages: dict[int, KvPages] = {}  # by the layer that owns the cache
        self._states: list[torch.Tensor] = []  # [state slots, ...]
        # Those of a draft network, beside those of the layers.
        self._draft_pages: list[KvPages] = []
        self._keepers: list[Keeper] = []  # parts that have to know which guesses stay

    def build(
        self,
        placement: ExpertPlacement | None,
        embedding: Embedding | None,
        draft: DraftFiles | None,
    ) -> Model:
        """Load all weights, in the order in which a step uses them."""
        config, source = self._config, self._source
        first, last = self._device.layers
        layers = [
            _Layer(index, config.layers[index], source.at(f"layers.{index}."))
            for index in range(first, last + 1)
        ]
        if placement is not None:
            # Before anything is read, so that memory that cannot be had is refused at once.
            self._cold_experts = self._open_cold_experts(layers, placement)
        table = self._load_token_table() if self._place.begins else None
        self._per_layer_inputs = self._open_per_layer_inputs()
        self._routing = self._open_routing()
        if self._router_tap is not None and self._routing is not None:
            self._tap = self._router_tap.open(self._tap_site(self._routing))
        blocks = [self._build_layer(layer) for layer in layers]
        own = None if table is None else Embedding(table, source.case, config.embed_scale)
        head, features = None, self._open_features()
        network: DraftNetwork | None = None
        if self._place.ends:
            vocabulary, norm = self._load_vocabulary(table), self._final_norm()
            head = self._head(norm, vocabulary)
            if self._settings.mtp:
                network = self._open_mtp_head(vocabulary, norm, own or embedding)
            elif draft is not None:
                kept = draft.earlier if features is None else (*draft.earlier, features)
                network = self._open_draft(draft, kept, head, own or embedding)
        caches = self._open_caches()
        return Model(
            embedding=own,
            blocks=blocks,
            head=head,
            workspace=self._workspace,
            next_layer=last + 1,
            per_layer_inputs=self._per_layer_inputs,
            routing=self._routing,
            tap=self._tap,
            cold_experts=self._cold_experts,
            caches=caches,
            features=features,
            guesses=Guesses([*self._keepers, *self._pages.values()])
            if self._settings.verify_rows
            else None,
            draft_network=network,
        )

    def _open_features(self) -> StageFeatures | None:
        """Return memory for the output rows of some layers; None if none of them is here."""
        request, device = self._plan.problem.request.features, self._device
        own = () if request is None else request.within(device.layers)
        if request is None or not own:
            return None
        rows, hidden = self._settings.stream_rows, self._config.hidden
        features = StageFeatures(own, request.type, rows, hidden, torch_name(device.name))
        self._source.count("features", features.nbytes)
        return features

    def _open_caches(self) -> StageCaches:
        """Return the caches of all layers, with host memory for snapshots and pages."""
        settings = self._settings
        caches = StageCaches(
            [*self._pages.values(), *self._draft_pages],
            self._states,
            settings.snapshots,
            settings.host_pages,
            pin=self._device.kind == "cuda" and settings.pin_experts,
        )
        if caches.nbytes:
            self._source.count("snapshots", caches.nbytes)
        if caches.host_nbytes:
            self._source.count("host_pages", caches.host_nbytes)
        return caches

    def _load_token_table(self) -> Weight:
        """Load the table of token embeddings; a tied head on this device reads it, too."""
        embeddings = self._source.at("", "embeddings")
        if self._config.tied and self._place.ends:
            return embeddings("embed")
        on_device = "embeddings" in self._device.allocated
        return embeddings.table("embed", pinned=not on_device)

    def _load_vocabulary(self, table: Weight | None) -> Weight:
        """Load the vocabulary matrix, which may be the token table."""
        if self._config.tied:
            return self._source.at("", "head")("embed") if table is None else table
        return self._source.at("", "head")("head")

    def _final_norm(self) -> RmsNorm:
        """Load the final norm."""
        return RmsNorm(self._source.norm("norm"), self._eps, self._source.case)

    def _head(self, norm: RmsNorm, vocabulary: Weight) -> Head:
        return Head(norm, vocabulary, self._source.case, self._config.softcap)

    def _open_mtp_head(
        self, vocabulary: Weight, final_norm: RmsNorm, embedding: Embedding | None
    ) -> MtpHead:
        """Load the layer that predicts further ahead, and allocate what it keeps of sequences."""
        config, settings, device = self._config, self._settings, self._source.case.torch_device
        assert config.mtp is not None
        assert isinstance(config.mtp.mixer, AttentionConfig)
        assert embedding is not None, "all stages are in this process"
        count = self._source.count
        get = replace(
            self._source.at(f"layers.{len(config.layers)}."),
            count=lambda line, size_bytes: count("draft_weights", size_bytes),
        )
        pages = allocate_kv(config.mtp.mixer, settings, device, drafts=True)
        states = HiddenStates(settings, config.hidden, device)
        self._source.count("draft_kv", pages.nbytes)
        self._source.count("draft_state", states.nbytes)
        head = MtpHead(
            get,
            self._eps,
            embedding=embedding,
            final_norm=final_norm,
            head=self._head(RmsNorm(get.norm("mtp.norm"), self._eps, get.case), vocabulary),
            attention=Attention(config.mtp.mixer, self._eps, get, pages),
            ffn=self._mtp_ffn(config.mtp, get),
            pages=pages,
            states=states,
            logits_for=self._workspace.logits_for,
        )
        self._draft_pages.append(pages)
        self._states.append(states.last)
        self._keepers += (head, pages)
        return head

    def _open_draft(
        self,
        draft: DraftFiles,
        kept: Sequence[StageFeatures],
        head: Head,
        embedding: Embedding | None,
    ) -> DFlashNetwork:
        """Load a draft model, and allocate what it keeps of sequences."""
        config, settings = self._config, self._settings
        request, count = self._plan.problem.request.features, self._source.count
        assert request is not None, "the plan keeps the features that the draft reads"
        assert embedding is not None, "all stages are in this process"
        features, logits_for = ModelFeatures(request, kept), self._workspace.logits_for
        weights = open_weights(
            draft.tensors,
            physical_name(self._device.name),
            settings,
            lambda line, size_bytes: count("draft_weights", size_bytes),
        )

        def embed(tokens: torch.Tensor) -> torch.Tensor:
            return embedding(tokens, torch.empty(len(tokens), config.hidden))

        target = Target(
            embed=embed,
            score=lambda rows: head.product(rows, logits_for(len(rows))),
            logits_rows=settings.logits_rows,
            features=lambda first, rows: features.read(rows, "cpu", first),
        )
        network = DFlashNetwork(draft.config, weights, settings, target)
        count("draft_kv", sum(pages.nbytes for pages in network.pages))
        count("draft_state", network.state_bytes)
        self._draft_pages += network.pages
        self._keepers.append(network)
        return network

    def _mtp_ffn(self, layer: LayerConfig, get: WeightSource) -> Ffn:
        """Build the feed-forward part of the layer that predicts further ahead.

        Choices of its experts are counted apart: they say nothing of the experts of other layers.
        """
        experts = layer.experts
        if experts is None:
            return Mlp(get, _dense(layer).activation)
        counts = RoutingStats(1, experts.experts, get.case.torch_device).of_layer(0).decode
        return ExpertsFfn(experts, get, counts, self._workspace.scratch)

    def _open_cold_experts(self, layers: list[_Layer], placement: ExpertPlacement) -> ColdExperts:
        """Allocate memory for the experts of all layers, hot and cold."""
        settings, cold_speeds = self._settings, self._device.cold_speeds
        assert cold_speeds is not None
        layouts: list[BlobLayout | None] = [None] * len(self._config.layers)
        for layer in layers:
            if layer.config.experts is not None:
                tiles = _runs_cuda(layer)
                layouts[layer.index] = blob_layout(layer.config.experts, layer.get, tiles=tiles)
        request = StoreRequest(
            placement=placement,
            cold=settings.cold,
            speeds=cold_speeds,
            pin=settings.pin_experts,
            keep_copy=settings.keep_host_copy,
            policy=settings.expert_policy,
            staging_bytes=self._device.allocated.get("expert_staging", 0),
        )
        device = physical_name(self._device.name)
        store = open_store(layouts, request, device, self._source.count)
        return ColdExperts(store, device, cold_speeds, settings.cold)

    def _open_per_layer_inputs(self) -> LayerInputs | None:
        """Open the per-layer inputs of a model that has them.

        The first stage loads their table; the others get their inputs from the stage before.
        """
        layers, rows = self._config.layers, self._settings.stream_rows
        if not (width := layers[0].per_layer_width):
            return None
        if self._place.begins:
            hosted = any(line.name == "embeddings" for line in self._plan.host.lines)
            table = self._source.at("", "embeddings").table("per_layer.embed", pinned=hosted)
            return PerLayerInputs(table, self._source, self._eps, rows)
        first = self._device.layers.first
        inputs = LayerInputs(
            rows, first, len(layers) - first, width, self._source.case.torch_device
        )
        self._source.count("staging", inputs.values.nbytes)
        return inputs

    def _open_routing(self) -> RoutingStats | None:
        """Return empty counts of all layers; None if this stage has no experts."""
        layers = self._config.layers
        first, last = self._device.layers
        if not any(layer.experts for layer in layers[first : last + 1]):
            return None
        experts = max(layer.experts.experts for layer in layers if layer.experts)
        return RoutingStats(len(layers), experts, torch_name(self._device.name))

    def _tap_site(self, routing: RoutingStats) -> TapSite:
        """Return what a tap on this stage's routers needs to know."""
        first, last = self._device.layers
        return TapSite(
            layers=tuple(
                TracedLayer(number, layer.experts.experts, layer.experts.used)
                for number, layer in enumerate(self._config.layers)
                if layer.experts is not None and first <= number <= last
            ),
            routing=routing,
            device=torch_name(self._device.name),
            rows=max(self._settings.rows, DECODE_ROWS),
            sequences=self._settings.parallel,
        )

    def _build_layer(self, layer: _Layer) -> Block:
        """Build a layer for the fastest backend that runs it: CUDA, C++, or single operations."""
        if _runs_cuda(layer):
            return self._cuda_block(layer)
        mixer = self._mixer_or_native(layer)
        if isinstance(mixer, NativeBlock):
            return mixer
        if layer.config.post_norms:
            return self._sandwich_block(layer, mixer)
        return PreNormBlock(
            mixer_norm=self._norm(layer, "attn.norm"),
            mixer=mixer,
            ffn_norm=self._norm(layer, "ffn.norm"),
            ffn=self._ffn(layer),
        )

    # Layers of CUDA parts

    def _cuda_block(self, layer: _Layer) -> CudaBlock:
        config, get = layer.config, layer.get
        parts: list[CudaPart] = []
        if isinstance(config.mixer, DeltaNetConfig):
            state = self._state(config.mixer, get)
            parts.append(CudaDeltaNet(config.mixer, self._eps, get, state))
        else:
            post_norm = self._row_norm(layer, "attn.post_norm") if config.post_norms else None
            pages = self._kv_pages(config.mixer, layer)
            parts.append(CudaAttention(config.mixer, self._eps, get, pages, post_norm))
        parts.append(self._cuda_ffn(layer))
        if self._per_layer_inputs is not None:
            inputs = self._per_layer_inputs
            parts.append(CudaPerLayerPart(inputs, layer.index, get, self._eps))
        if config.scaled:
            parts.append(CudaScale(get.vector("scale")))
        return CudaBlock(*parts)

    def _cuda_ffn(self, layer: _Layer) -> CudaPart:
        """Build the feed-forward part: dense, routed experts, or the sum of both."""
        config, get = layer.config, layer.get
        experts = config.experts
        if experts is not None and not config.post_norms:
            counts, stored = self._counts(experts, layer.index), self._stored_layer(layer.index)
            tap = self._layer_tap(layer.index)
            return CudaExpertsFfn(experts, self._eps, get, counts, stored, tap)
        ffn = _dense(config)
        if experts is not None:
            dense = CudaMlp(ffn, self._eps, get, self._row_norm(layer, "ffn.dense_post_norm"))
            counts, stored = self._counts(experts, layer.index), self._stored_layer(layer.index)
            tap = self._layer_tap(layer.index)
            return CudaDenseAndExpertsFfn(dense, experts, self._eps, get, counts, stored, tap)
        post_norm = self._row_norm(layer, "ffn.post_norm") if config.post_norms else None
        return CudaMlp(ffn, self._eps, get, post_norm)

    # Layers of single operations, and whole layers in C++

    def _mixer_or_native(self, layer: _Layer) -> Mixer | NativeBlock:
        """Build the mixer with its cache, or the whole layer if the C++ module runs it."""
        config, get = layer.config, layer.get
        if isinstance(config.mixer, DeltaNetConfig):
            kept = self._kept_rows(config.mixer, get)
            state = self._state(config.mixer, get)
            mixer = DeltaNet(config.mixer, self._eps, get, state, kept)
            if kept is not None:
                self._keepers.append(mixer)
            return mixer
        pages = self._kv_pages(config.mixer, layer)
        if config.plain and refuses_native_block(config.mixer, get, pages) is None:
            return NativeBlock(config.mixer, self._eps, get, pages, self._workspace.scratch)
        return Attention(config.mixer, self._eps, get, pages)

    def _sandwich_block(self, layer: _Layer, mixer: Mixer) -> SandwichBlock:
        """Build a layer whose parts have norms before and after them."""
        get = layer.get
        parts: list[Ffn] = [self._sandwiched_ffn(layer)]
        if self._per_layer_inputs is not None:
            parts.append(PerLayerPart(self._per_layer_inputs, layer.index, get, self._eps))
        return SandwichBlock(
            NormedMixer(self._norm(layer, "attn.norm"), mixer, self._norm(layer, "attn.post_norm")),
            parts,
            get.vector("scale") if layer.config.scaled else None,
        )

    def _sandwiched_ffn(self, layer: _Layer) -> Ffn:
        """Build a feed-forward part with norms around it: dense, or dense and routed experts."""
        get, experts = layer.get, layer.config.experts
        dense = Mlp(get, _dense(layer.config).activation)
        before, after = self._norm(layer, "ffn.norm"), self._norm(layer, "ffn.post_norm")
        if experts is None:
            return NormedFfn(before, dense, after)
        normed = NormedFfn(before, dense, self._norm(layer, "ffn.dense_post_norm"))
        decode_counts = self._counts(experts, layer.index).decode
        both = DenseAndExpertsFfn(
            normed,
            experts,
            get,
            self._eps,
            decode_counts,
            self._workspace.scratch,
            self._layer_store(layer.index),
            self._layer_tap(layer.index),
        )
        return PostNormed(both, after)

    def _ffn(self, layer: _Layer) -> Ffn:
        """Build a feed-forward part: dense, or routed experts."""
        experts = layer.config.experts
        if experts is None:
            return Mlp(layer.get, _dense(layer.config).activation)
        decode_counts = self._counts(experts, layer.index).decode
        scratch, store = self._workspace.scratch, self._layer_store(layer.index)
        tap = self._layer_tap(layer.index)
        return ExpertsFfn(experts, layer.get, decode_counts, scratch, store, tap)

    # What the layers of all backends need

    def _state(self, mixer: DeltaNetConfig, get: WeightSource) -> RecurrentState:
        state = allocate_state(mixer, self._settings, get.case.torch_device)
        get.count("recurrent_state", state.nbytes)
        self._states += (state.memory, state.inputs)
        return state

    def _kept_rows(self, mixer: DeltaNetConfig, get: WeightSource) -> KeptRows | None:
        """Return memory for the rows of a recurrent layer in steps with guesses, if there are."""
        if not self._settings.verify_rows:
            return None
        rows, device = self._settings.verify_rows, get.case.torch_device
        kept = KeptRows(rows, mixer.channels, mixer.value_heads, device)
        get.count("verify_scratch", kept.nbytes)
        return kept

    def _kv_pages(self, mixer: AttentionConfig, layer: _Layer) -> KvPages:
        """Return the layer's own KV pages, or those of the layer whose cache it shares."""
        if mixer.shares is not None:
            return self._pages[mixer.shares]
        pages = allocate_kv(mixer, self._settings, layer.get.case.torch_device)
        layer.get.count("kv", pages.nbytes)
        self._pages[layer.index] = pages
        return pages

    def _layer_store(self, index: int) -> LayerStore | None:
        """Return where a layer's experts are; None if none of them is cold."""
        return None if self._cold_experts is None else self._cold_experts.store.layers[index]

    def _stored_layer(self, index: int) -> StoredLayer | None:
        """Return a layer's experts before they are loaded; None if all of them are hot."""
        return None if self._cold_experts is None else self._cold_experts.layer(index)

    def _counts(self, experts: ExpertsConfig, index: int) -> RouterCounts:
        """Return the counts that the layer's router adds to."""
        counts = self._routing
        if self._tap is not None and self._tap.own_counts is not None:
            counts = self._tap.own_counts
        assert counts is not None
        return counts.of_layer(index, experts.experts)

    def _layer_tap(self, index: int) -> LayerTap | None:
        return None if self._tap is None else self._tap.of_layer(index)

    def _norm(self, layer: _Layer, name: str) -> RmsNorm:
        return RmsNorm(layer.get.norm(name), self._eps, layer.get.case)

    def _row_norm(self, layer: _Layer, name: str) -> RowNorm:
        return RowNorm(layer.get.norm(name), self._eps)


def _runs_cuda(layer: _Layer) -> bool:
    """Return whether fused CUDA kernels run a layer."""
    config, get = layer.config, layer.get
    if not fits_cuda(config.mixer, get):
        return False
    return config.experts is None or experts_fit(config.experts, get)


def _dense(layer: LayerConfig) -> FfnConfig:
    assert layer.ffn is not None, "a layer without routed experts has a dense network"
    return layer.ffn
