"""Feed-forward parts with routed experts on a GPU, built from fused CUDA kernels.

`CudaExpertsFfn` has experts instead of a dense part, `CudaDenseAndExpertsFfn` has both.
"""

from dataclasses import replace
from functools import partial

import torch

from headroom.experts.cold import LayerPaths, ReadInPlace, StoredLayer
from headroom.experts.ffn import router_rule
from headroom.experts.stats import RouterCounts
from headroom.experts.traces.taps import LayerTap
from headroom.families.config import ExpertsConfig
from headroom.kernels.cuda import experts as cuda_experts
from headroom.kernels.cuda import norms, scratch
from headroom.kernels.cuda import route as cuda_route
from headroom.kernels.cuda.buffers import floats
from headroom.kernels.cuda.experts import NO_ADDENDS, Addends, ExpertTiles, SharedExpertTiles
from headroom.kernels.cuda.experts_scratch import runs_with_routed
from headroom.kernels.cuda.matmul import TILES, RowNorm, narrow_type
from headroom.kernels.cuda.route import RouterLogits
from headroom.kernels.cuda.route_scratch import can_score_with_norm
from headroom.kernels.cuda.sizes import is_decode, tile_bytes
from headroom.kernels.ops import Picks
from headroom.layers.batch import GpuBatch
from headroom.layers.cuda_block import CudaMlp
from headroom.layers.cuda_rows import (
    CudaRows,
    MergedLinear,
    gated_rows,
    load_merged,
    normed_rows,
)
from headroom.layers.step_timing import part_of_step
from headroom.layers.weights import WeightSource


def experts_fit(config: ExpertsConfig, get: WeightSource) -> bool:
    """Return whether the fused CUDA kernels run a layer's experts."""
    table = get.experts_from_file(config.experts)
    if cuda_experts.refuses(replace(get.case, experts=table.kinds)) is not None:
        return False
    if cuda_experts.refuses_sizes(table.gate[0].rows, table.gate[0].columns) is not None:
        return False
    return config.experts <= cuda_route.MAX_EXPERTS and config.used <= cuda_route.MAX_USED


class CudaRouter:
    """Picks each row's experts; the gate of a shared expert is scored together with them."""

    def __init__(
        self,
        config: ExpertsConfig,
        get: WeightSource,
        counts: RouterCounts,
        tap: LayerTap | None = None,
    ) -> None:
        self._counts, self._tap = counts, tap
        self.weight = get.vector("ffn.router")
        if config.shared_gate:
            shared = get.vector("ffn.shared.router").view(1, -1)
            self.weight = torch.cat((self.weight, shared))
        self._rule = router_rule(config)
        self._bias = get.vector("ffn.score_bias") if config.bias else None
        self._scales = get.vector("ffn.experts_scale") if config.expert_scales else None

    def __call__(self, logits: torch.Tensor, batch: GpuBatch) -> Picks:
        """Return ids and weights `[rows, used]` for the router logits of rows; count the picks."""
        ids, weights = self._top_k(logits, batch).top_k()
        if self._scales is not None:
            # Padding rows have ids of -1 and weights of 0, so that their scale does not matter.
            weights = weights * self._scales[ids]
        return Picks(ids if self._tap is None else self._tap(ids), weights)

    def picks_or_logits(self, logits: torch.Tensor, batch: GpuBatch) -> Picks | RouterLogits:
        """Return the top-k picks, or the logits if a fused kernel will do the top-k itself."""
        fused = self._scales is None and self._tap is None  # a tap needs the picks themselves
        return self._top_k(logits, batch) if fused else self(logits, batch)

    def _top_k(self, logits: torch.Tensor, batch: GpuBatch) -> RouterLogits:
        counts = self._counts.decode if is_decode(len(logits)) else self._counts.prefill
        return RouterLogits(logits, self._rule, self._bias, counts, batch.tables[0].sequence)


def scored_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: RowNorm,
    router_norm: torch.Tensor,
    narrow: torch.dtype,
) -> tuple[CudaRows, torch.Tensor]:
    """Return the normed rows for the experts, and the logits of a router's `weight`.

    The router sees rows normed with the weight `router_norm`, the experts rows normed by `norm`.
    If `norm.out` is given, the experts' rows are written there in float32, too.
    """
    if is_decode(len(x)) and can_score_with_norm(x.shape[1]):
        few, logits = cuda_route.scored_rows(x, weight, norm, router_norm)
        again = partial(norms.rms_norm, x, norm.weight, norm.eps)
        return CudaRows(len(x), decode=few, floats=again), logits
    rows = normed_rows(x, norm, narrow)
    if norm.out is not None and router_norm is norm.weight:
        return rows, cuda_route.score(norm.out, weight)
    return rows, cuda_route.score(norms.rms_norm(x, router_norm, norm.eps), weight)


def load_paths(config: ExpertsConfig, get: WeightSource, stored: StoredLayer | None) -> LayerPaths:
    """Load the experts of a layer, all to GPU memory or as a store places them.

    Return what computes them.
    """
    if stored is not None:
        return stored.load(config, get)
    tiles = upload_experts(get, config.experts)
    get.count("hot_experts", tiles.nbytes)
    return LayerPaths(ReadInPlace(tiles, config.activation))


def _run(
    experts: ReadInPlace,
    rows: CudaRows,
    picks: Picks | RouterLogits,
    addends: Addends = NO_ADDENDS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, by the path that the rows are made for."""
    if rows.decode is not None:
        return experts.decode(rows.decode, picks, addends, out)
    assert rows.prefill is not None
    chosen = picks.top_k() if isinstance(picks, RouterLogits) else picks
    return experts.prefill(rows.prefill, chosen, addends, out)


class CudaExpertsFfn:
    """The feed-forward part of a layer with routed experts and, in some models, a shared one."""

    def __init__(
        self,
        config: ExpertsConfig,
        eps: float,
        get: WeightSource,
        counts: RouterCounts,
        stored: StoredLayer | None = None,  # if some of the experts are cold
        tap: LayerTap | None = None,
    ) -> None:
        self._config, self._eps, self._narrow = config, eps, narrow_type(get.case.dtype)
        self._norm = get.norm("ffn.norm")
        self._router = CudaRouter(config, get, counts, tap)
        paths = load_paths(config, get, stored)
        self._experts, self.resolver = paths.gpu, paths.resolver
        self._shared, self._shared_tiles = None, None
        if config.shared_width:
            self._shared = (
                load_merged(get, ["ffn.shared.gate", "ffn.shared.up"]),
                load_merged(get, ["ffn.shared.down"]),
            )
            self._shared_tiles = shared_expert_tiles(*self._shared)

    @part_of_step("experts")
    def __call__(self, x: torch.Tensor, batch: GpuBatch) -> None:
        """Add the outputs of each row's experts to the residual stream."""
        decoding = is_decode(len(x))
        resolver = self.resolver if decoding else None
        asks_cpu = resolver is not None and resolver.asks_cpu
        normed = scratch.take(floats(*x.shape), x.device)
        # Decode steps need them for the CPU, or if rows are too wide to be scored by one kernel.
        wanted = not decoding or asks_cpu or not can_score_with_norm(x.shape[1])
        norm = RowNorm(self._norm, self._eps, normed if wanted else None)
        rows, logits = scored_rows(x, self._router.weight, norm, self._norm, self._narrow)
        picks = self._router.picks_or_logits(logits, batch)
        if resolver is not None:  # first, so that the CPU computes while the following kernels run
            picks = resolver.resolve(normed if asks_cpu else None, picks)
        shared_tiles = self._shared_tiles if decoding else None
        addends = Addends(
            residual=x,
            shared_out=self._shared_answers(rows) if shared_tiles is None else None,
            shared_logits=logits[:, self._config.experts :] if self._config.shared_gate else None,
            shared_tiles=shared_tiles,
        )
        _run(self._experts, rows, picks, addends, x)
        if resolver is not None:
            resolver.add_answers(x)

    def _shared_answers(self, rows: CudaRows) -> torch.Tensor | None:
        if self._shared is None:
            return None
        both, down = self._shared
        gate, up = both(rows)
        return down(gated_rows(gate, up, self._config.activation, self._narrow))[0]


def shared_expert_tiles(both: MergedLinear, down: MergedLinear) -> SharedExpertTiles | None:
    """Return the shared expert in the form in which decode kernels run it with the routed ones.

    None if its weights are not in tiles: then other kernels must run it.
    """
    weights = (*both.weights, *down.weights)
    width = down.weights[0].columns
    if any(weight.layout != TILES for weight in weights) or not runs_with_routed(width):
        return None
    gate = weights[0].data
    if len(both.weights) == 1:  # gate and up lie one after another
        up = gate[tile_bytes(weights[0].quant, width, weights[0].columns) :]
    else:
        up = weights[1].data
    kinds = (weights[0].quant, weights[-2].quant, weights[-1].quant)
    return SharedExpertTiles(gate, up, weights[-1].data, kinds, width)


def upload_experts(get: WeightSource, count: int) -> ExpertTiles:
    """Copy all experts of a layer to GPU memory, in tiles."""
    assert get.upload is not None
    parts = get.locate_experts(count)
    gate = parts[0][0]
    kinds = tuple(part[0].quant for part in parts)
    pieces = [get.upload.tiles(part).view(count, -1) for part in parts]
    return cuda_experts.table_of(pieces, kinds, gate.rows, gate.columns)


class CudaDenseAndExpertsFfn:
    """A dense part and routed experts that read the same rows, each with its own norms."""

    def __init__(
        self,
        dense: CudaMlp,  # with its norms
        config: ExpertsConfig,
        eps: float,
        get: WeightSource,
        counts: RouterCounts,
        stored: StoredLayer | None = None,  # if some of the experts are cold
        tap: LayerTap | None = None,
    ) -> None:
        self._dense, self._eps, self._narrow = dense, eps, narrow_type(get.case.dtype)
        # The router's scale and 1 / sqrt(width) together act as the weight of its norm.
        scale = get.vector("ffn.router_scale")
        self._router_norm = scale.mul_(len(scale) ** -0.5)
        self._router = CudaRouter(config, get, counts, tap)
        self._before = get.norm("ffn.experts_norm")
        paths = load_paths(config, get, stored)
        self._experts, self.resolver = paths.gpu, paths.resolver
        self._experts_after = get.norm("ffn.experts_post_norm")
        self._after = get.norm("ffn.post_norm")

    def __call__(self, x: torch.Tensor, batch: GpuBatch) -> None:
        """Add the normed sum of both parts to the residual stream."""
        resolver = self.resolver if is_decode(len(x)) else None
        asks_cpu = resolver is not None and resolver.asks_cpu
        answers = scratch.take(floats(*x.shape), x.device)
        # The rows for the CPU are in the memory to which the output is written later.
        before = RowNorm(self._before, self._eps, answers if asks_cpu else None)
        rows, logits = scored_rows(x, self._router.weight, before, self._router_norm, self._narrow)
        picks: Picks | RouterLogits = self._router(logits, batch)
        if resolver is not None:
            picks = resolver.resolve(answers if asks_cpu else None, picks)
        routed = _run(self._experts, rows, picks, out=answers)
        dense = self._dense.outputs(x)
        if resolver is not None:
            resolver.add_answers(routed)
        total = norms.norm_add(dense, routed, self._experts_after, self._eps)
        norms.norm_add(x, total, self._after, self._eps)
