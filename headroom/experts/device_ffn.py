"""Routed experts on a GPU: instead of a dense part, or beside one."""

from dataclasses import replace
from functools import partial

import torch

from headroom.experts.cold import ExpertSteps, Hybrid, Picks, ReadInPlace
from headroom.experts.decode import ColdPart
from headroom.experts.ffn import router_rule
from headroom.experts.store import LayerStore
from headroom.families.config import ExpertsConfig
from headroom.kernels.cuda import experts as cuda_experts
from headroom.kernels.cuda import norms, scratch
from headroom.kernels.cuda import route as cuda_route
from headroom.kernels.cuda.buffers import floats
from headroom.kernels.cuda.experts import NO_OTHERS, ExpertTiles, Others, OwnTiles
from headroom.kernels.cuda.matmul import TILES, Gates, RowNorm, narrow_type
from headroom.kernels.cuda.route import Unchosen
from headroom.kernels.cuda.route_scratch import can_score_with_norm
from headroom.kernels.cuda.sizes import EXPERT_STEP, tile_bytes
from headroom.layers.batch import GpuBatch
from headroom.layers.cuda_block import CudaMlp
from headroom.layers.cuda_rows import (
    CudaRows,
    MergedLinear,
    gated_rows,
    is_decode,
    load_merged,
    normed_rows,
)
from headroom.layers.step_timing import part_of_step
from headroom.layers.weights import WeightSource

Place = tuple[Hybrid, LayerStore]
Counts = tuple[torch.Tensor, torch.Tensor]  # of choices, in steps of few rows and of many


def experts_fit(config: ExpertsConfig, get: WeightSource) -> bool:
    """Tell whether a GPU's fused kernels run a layer's experts."""
    table = get.experts_from_file(config.experts)
    if cuda_experts.refuses(replace(get.case, experts=table.kinds)) is not None:
        return False
    if cuda_experts.refuses_sizes(table.gate[0].rows, table.gate[0].columns) is not None:
        return False
    return config.experts <= cuda_route.MAX_EXPERTS and config.used <= cuda_route.MAX_USED


class DeviceRouter:
    """Scores all experts, and an expert that every row visits where it has a score."""

    def __init__(self, config: ExpertsConfig, get: WeightSource, counts: Counts) -> None:
        self._counts = counts
        self.weight = get.vector("ffn.router")
        if config.shared_gate:  # scored with the experts, in one go
            shared = get.vector("ffn.shared.router").view(1, -1)
            self.weight = torch.cat((self.weight, shared))
        self._rule = router_rule(config)
        self._bias = get.vector("ffn.score_bias") if config.bias else None
        self._scales = get.vector("ffn.experts_scale") if config.expert_scales else None

    def __call__(self, logits: torch.Tensor, batch: GpuBatch) -> Picks:
        """Return ids and weights `[rows, used]` of rows by their logits."""
        ids, weights = self._unchosen(logits, batch).made()
        # Rows of padding have ids of -1 and weights of 0: any scale will do for them.
        return ids, weights if self._scales is None else weights * self._scales[ids]

    def later(self, logits: torch.Tensor, batch: GpuBatch) -> Picks | Unchosen:
        """Return the same, or where others can do it what they are to be chosen by."""
        return self._unchosen(logits, batch) if self._scales is None else self(logits, batch)

    def _unchosen(self, logits: torch.Tensor, batch: GpuBatch) -> Unchosen:
        counts = self._counts[not is_decode(len(logits))]
        return Unchosen(logits, self._rule, self._bias, counts, batch.tables[0].sequence)


def scored_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: RowNorm,
    seen: torch.Tensor,
    narrow: torch.dtype,
) -> tuple[CudaRows, torch.Tensor]:
    """Return rows after a norm, and their logits for a router's weight after that of the router.

    `norm.out` gets the rows in float32 where it is given.
    """
    if is_decode(len(x)) and can_score_with_norm(x.shape[1]):
        few, logits = cuda_route.scored_rows(x, weight, norm, seen)
        again = partial(norms.rms_norm, x, norm.weight, norm.eps)
        return CudaRows(len(x), decode=few, floats=again), logits
    rows = normed_rows(x, norm, narrow)
    if norm.out is not None and seen is norm.weight:
        return rows, cuda_route.score(norm.out, weight)
    return rows, cuda_route.score(norms.rms_norm(x, seen, norm.eps), weight)


def open_steps(
    config: ExpertsConfig, get: WeightSource, place: Place | None
) -> tuple[ExpertSteps, ColdPart | None]:
    """Load the experts of a layer, all to GPU memory or as a store places them.

    Return how steps run on them, and what else is done about cold ones.
    """
    if place is not None:
        hybrid, stored = place
        return hybrid.load(stored, config, get)
    tiles = upload_experts(get, config.experts)
    get.count("hot_experts", tiles.nbytes)
    return ReadInPlace(tiles, config.activation), None


def _run(
    steps: ExpertSteps,
    rows: CudaRows,
    picks: Picks | Unchosen,
    others: Others = NO_OTHERS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, for rows as a layer has them."""
    if rows.decode is not None:
        return steps.few_rows(rows.decode, picks, others, out)
    assert rows.prefill is not None
    made = picks.made() if isinstance(picks, Unchosen) else picks
    return steps.many_rows(rows.prefill, made, others, out)


class DeviceExperts:
    """The feed-forward part of a layer with routed experts, and one that every row visits."""

    def __init__(
        self,
        config: ExpertsConfig,
        eps: float,
        get: WeightSource,
        counts: Counts,
        place: Place | None = None,  # where some of the experts are cold
    ) -> None:
        self._config, self._eps, self._narrow = config, eps, narrow_type(get.case.dtype)
        self._norm = get.norm("ffn.norm")
        self._router = DeviceRouter(config, get, counts)
        self._experts, self.cold = open_steps(config, get, place)
        self._shared, self._own = None, None
        if config.shared_width:
            apart = replace(get, to_compile=set())
            self._shared = (
                load_merged(apart, ["ffn.shared.gate", "ffn.shared.up"]),
                load_merged(apart, ["ffn.shared.down"]),
            )
            self._own = own_tiles(*self._shared)
            if self._own is None:  # else the experts' kernels run it beside the others
                get.to_compile.update(apart.to_compile, {Gates(config.activation)})

    @part_of_step("experts")
    def __call__(self, x: torch.Tensor, batch: GpuBatch) -> None:
        """Add the answers of each row's experts."""
        few = is_decode(len(x))
        cold = self.cold if few else None
        normed = scratch.take(floats(*x.shape), x.device)
        # Few rows need them for a CPU, or where they are too wide to be scored at once.
        wanted = not few or cold is not None or not can_score_with_norm(x.shape[1])
        norm = RowNorm(self._norm, self._eps, normed if wanted else None)
        rows, logits = scored_rows(x, self._router.weight, norm, self._norm, self._narrow)
        picks: Picks | Unchosen
        if cold is None:
            picks = self._router.later(logits, batch)
        else:  # before all else that a CPU can run beside
            picks = self._router(logits, batch)
            cold.before(normed, *picks)
        own = self._own if few else None
        others = Others(
            residual=x,
            shared=self._shared_answers(rows) if own is None else None,
            shared_logits=logits[:, self._config.experts :] if self._config.shared_gate else None,
            own=own,
        )
        _run(self._experts, rows, picks, others, x)
        if cold is not None:
            cold.after(x)

    def _shared_answers(self, rows: CudaRows) -> torch.Tensor | None:
        if self._shared is None:
            return None
        both, down = self._shared
        gate, up = both(rows)
        return down(gated_rows(gate, up, self._config.activation, self._narrow))[0]


def own_tiles(both: MergedLinear, down: MergedLinear) -> OwnTiles | None:
    """Return the expert that every row visits as kernels of few rows run it beside the others.

    None where it is not in tiles, so that it must be run by itself.
    """
    weights = (*both.weights, *down.weights)
    width = down.weights[0].columns
    if any(weight.layout != TILES for weight in weights) or width % EXPERT_STEP:
        return None
    gate = weights[0].data
    if len(both.weights) == 1:  # one after another
        up = gate[tile_bytes(weights[0].quant, width, weights[0].columns) :]
    else:
        up = weights[1].data
    kinds = (weights[0].quant, weights[-2].quant, weights[-1].quant)
    return OwnTiles(gate, up, weights[-1].data, kinds, width)


def upload_experts(get: WeightSource, count: int) -> ExpertTiles:
    """Bring all experts of a layer to the GPU in tiles."""
    assert get.upload is not None
    parts = get.locate_experts(count)
    gate = parts[0][0]
    kinds = tuple(part[0].quant for part in parts)
    pieces = [get.upload.tiles(part).view(count, -1) for part in parts]
    return cuda_experts.table_of(pieces, kinds, gate.rows, gate.columns)


class DeviceBeside:
    """A dense part and routed experts that read the same stream, each with norms of its own."""

    def __init__(
        self,
        dense: CudaMlp,  # with its norms
        config: ExpertsConfig,
        eps: float,
        get: WeightSource,
        counts: Counts,
        place: Place | None = None,  # where some of the experts are cold
    ) -> None:
        self._dense, self._eps, self._narrow = dense, eps, narrow_type(get.case.dtype)
        # What the router's scale and the root of the width do is a norm's weight.
        scale = get.vector("ffn.router_scale")
        self._router_norm = scale.mul_(len(scale) ** -0.5)
        self._router = DeviceRouter(config, get, counts)
        self._before = get.norm("ffn.experts_norm")
        self._experts, self.cold = open_steps(config, get, place)
        self._experts_after = get.norm("ffn.experts_post_norm")
        self._after = get.norm("ffn.post_norm")

    def __call__(self, x: torch.Tensor, batch: GpuBatch) -> None:
        """Add the normed sum of both; the router sees the stream as it is."""
        cold = self.cold if is_decode(len(x)) else None
        answers = scratch.take(floats(*x.shape), x.device)
        # What the CPU is to read lies where the answers will.
        before = RowNorm(self._before, self._eps, None if cold is None else answers)
        rows, logits = scored_rows(x, self._router.weight, before, self._router_norm, self._narrow)
        ids, weights = self._router(logits, batch)
        if cold is not None:
            cold.before(answers, ids, weights)
        routed = _run(self._experts, rows, (ids, weights), out=answers)
        dense = self._dense.outputs(x)
        if cold is not None:
            cold.after(routed)
        total = norms.norm_add(dense, routed, self._experts_after, self._eps)
        norms.norm_add(x, total, self._after, self._eps)
