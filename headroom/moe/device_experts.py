"""Routed experts on a GPU: instead of a dense part, or beside one."""

from dataclasses import replace
from typing import Protocol

import torch

from headroom.errors import PlanError
from headroom.kernels.cuda import experts as cuda_experts
from headroom.kernels.cuda import route as cuda_route
from headroom.kernels.cuda import scratch, small
from headroom.kernels.cuda.experts import NO_OTHERS, ExpertTiles, Others
from headroom.kernels.cuda.matmul import HalfRows, RowNorm
from headroom.kernels.cuda.narrow import NarrowRows, narrow_type
from headroom.kernels.ops import RouterRule
from headroom.layers.config import ExpertsConfig
from headroom.layers.device_block import DeviceBatch, DeviceMlp
from headroom.layers.device_rows import DeviceRows, few_rows, gated_rows, normed_rows, stack
from headroom.layers.parts import part_of_step
from headroom.layers.weights import WeightSource
from headroom.moe.cold import ColdPart
from headroom.moe.load_store import fill_tiles
from headroom.moe.store import LayerStore

Picks = tuple[torch.Tensor, torch.Tensor]  # ids and weights [rows, used]
Place = tuple[LayerStore, torch.Tensor]  # and the buffers for cold experts on their way


def experts_fit(config: ExpertsConfig, get: WeightSource) -> bool:
    """Tell whether a GPU's fused kernels run a layer's experts."""
    kinds = get.experts(config.experts).kinds
    if cuda_experts.refuses(replace(get.case, experts=kinds)) is not None:
        return False
    return config.experts <= cuda_route.MAX_EXPERTS and config.used <= cuda_route.MAX_USED


class DeviceRouter:
    """Scores all experts, and an expert that every row visits where it has a score."""

    def __init__(self, config: ExpertsConfig, get: WeightSource, counts: torch.Tensor) -> None:
        self._counts = counts
        self._weight = get.vector("ffn.router")
        if config.shared_gate:  # scored with the experts, in one go
            shared = get.vector("ffn.shared.router").view(1, -1)
            self._weight = torch.cat((self._weight, shared))
        self._rule = RouterRule(
            used=config.used,
            scores=config.scores,
            normalise=config.normalise,
            scale=config.scale,
            softcap=config.softcap,
        )
        self._bias = get.vector("ffn.score_bias") if config.bias else None
        self._scales = get.vector("ffn.experts_scale") if config.expert_scales else None

    def __call__(
        self, x: torch.Tensor, batch: DeviceBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids and weights `[rows, used]` of rows as the router sees them, and its logits."""
        logits = cuda_route.score(x, self._weight)
        sequence = batch.tables[0].sequence
        ids, weights = cuda_route.route(logits, self._rule, self._bias, self._counts, sequence)
        # Rows of padding have ids of -1 and weights of 0: any scale will do for them.
        return ids, weights if self._scales is None else weights * self._scales[ids], logits


class ExpertSteps(Protocol):
    """How steps run on the experts of a layer, wherever those are.

    `picks` are ids and weights `[rows, used]`; `out` may be the residual of `others`.
    """

    def few_rows(
        self, x: HalfRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts and others, inside a captured step."""
        ...

    def many_rows(
        self, x: NarrowRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same for more rows; never captured."""
        ...


class ReadInPlace:
    """The GPU reads experts where they lie, in its own memory or over its link."""

    def __init__(self, tiles: ExpertTiles, activation: str) -> None:
        self._tiles, self._activation = tiles, activation

    def few_rows(
        self, x: HalfRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts and others."""
        return cuda_experts.few_rows(x, *picks, self._tiles, self._activation, others, out)

    def many_rows(
        self, x: NarrowRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same; each expert that was chosen is read once."""
        return cuda_experts.many_rows(x, *picks, self._tiles, self._activation, others, out)


def open_steps(config: ExpertsConfig, get: WeightSource, place: Place | None) -> ExpertSteps:
    """Load the experts of a layer, all to GPU memory or as a store places them."""
    if place is None:
        tiles = upload_experts(get, config.experts)
        get.count("hot_experts", tiles.nbytes)
        return ReadInPlace(tiles, config.activation)
    store, staging = place
    fill_tiles(store, get, staging)
    if store.path == "gpu":
        return ReadInPlace(stored_tiles(store), config.activation)
    raise PlanError(
        f"Cold experts cannot go the way --cold {store.path} in {get.case.dtype} yet.",
        hint="Leave out --cold and --no-pin, or choose --dtype f32.",
    )


def stored_tiles(store: LayerStore) -> ExpertTiles:
    """Return the experts of a store as kernels find them; exchanges change what they find."""
    memory = (store.slots, store.cold)
    nbytes = sum(piece.nbytes for piece in memory)
    return ExpertTiles(store.addresses, store.kinds, store.width, store.hidden, nbytes, memory)


class _Table:
    """A layer's experts, for rows as the layer has them."""

    def __init__(self, config: ExpertsConfig, get: WeightSource, place: Place | None) -> None:
        self._steps = open_steps(config, get, place)

    def __call__(
        self,
        rows: DeviceRows,
        picks: Picks,
        others: Others = NO_OTHERS,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts and what else it gets."""
        if rows.few is not None:
            return self._steps.few_rows(rows.few, picks, others, out)
        assert rows.many is not None
        return self._steps.many_rows(rows.many, picks, others, out)


class DeviceExperts:
    """The feed-forward part of a layer with routed experts, and one that every row visits."""

    def __init__(
        self,
        config: ExpertsConfig,
        eps: float,
        get: WeightSource,
        counts: torch.Tensor,
        place: Place | None = None,  # where some of the experts are cold
    ) -> None:
        self._config, self._eps, self._narrow = config, eps, narrow_type(get.case.dtype)
        self.cold: ColdPart | None = None  # what is done about cold experts, but reading them
        self._norm = get.norm("ffn.norm")
        self._router = DeviceRouter(config, get, counts)
        self._experts = _Table(config, get, place)
        self._shared = None
        if config.shared_width:
            self._shared = (
                stack(get, ["ffn.shared.gate", "ffn.shared.up"]),
                stack(get, ["ffn.shared.down"]),
            )

    @part_of_step("experts")
    def __call__(self, x: torch.Tensor, batch: DeviceBatch) -> None:
        """Add the answers of each row's experts."""
        normed = scratch.empty(*x.shape, device=x.device)
        rows = normed_rows(x, RowNorm(self._norm, self._eps, normed), self._narrow)
        ids, weights, logits = self._router(normed, batch)
        cold = self.cold if rows.few is not None else None
        if cold is not None:  # before all else that a CPU can run beside
            cold.before(normed, ids, weights)
        others = Others(
            residual=x,
            shared=self._shared_answers(rows),
            shared_logits=logits[:, self._config.experts :] if self._config.shared_gate else None,
        )
        self._experts(rows, (ids, weights), others, x)
        if cold is not None:
            cold.after(x)

    def _shared_answers(self, rows: DeviceRows) -> torch.Tensor | None:
        if self._shared is None:
            return None
        both, down = self._shared
        gate, up = both(rows)
        return down(gated_rows(gate, up, self._config.activation, self._narrow))[0]


def upload_experts(get: WeightSource, count: int) -> ExpertTiles:
    """Bring all experts of a layer to the GPU in tiles."""
    assert get.upload is not None
    parts = get.found_experts(count)
    gate = parts[0][0]
    kinds = tuple(part[0].quant for part in parts)
    pieces = [get.upload.tiles(part).view(count, -1) for part in parts]
    return cuda_experts.table_of(pieces, kinds, gate.rows, gate.columns)


class DeviceBeside:
    """A dense part and routed experts that read the same stream, each with norms of its own."""

    def __init__(
        self,
        dense: DeviceMlp,  # with its norms
        config: ExpertsConfig,
        eps: float,
        get: WeightSource,
        counts: torch.Tensor,
        place: Place | None = None,  # where some of the experts are cold
    ) -> None:
        self._dense, self._eps, self._narrow = dense, eps, narrow_type(get.case.dtype)
        self.cold: ColdPart | None = None  # what is done about cold experts, but reading them
        # What the router's scale and the root of the width do is a norm's weight.
        scale = get.vector("ffn.router_scale")
        self._router_norm = scale.mul_(len(scale) ** -0.5)
        self._router = DeviceRouter(config, get, counts)
        self._before = get.norm("ffn.experts_norm")
        self._experts = _Table(config, get, place)
        self._experts_after = get.norm("ffn.experts_post_norm")
        self._after = get.norm("ffn.post_norm")

    def __call__(self, x: torch.Tensor, batch: DeviceBatch) -> None:
        """Add the normed sum of both; the router sees the stream as it is."""
        seen = small.rms_norm(x, self._router_norm, self._eps)
        ids, weights, _ = self._router(seen, batch)
        cold = self.cold if few_rows(len(x)) else None
        answers = scratch.empty(*x.shape, device=x.device)
        # What the CPU is to read lies where the answers will.
        before = RowNorm(self._before, self._eps, None if cold is None else answers)
        rows = normed_rows(x, before, self._narrow)
        if cold is not None:
            cold.before(answers, ids, weights)
        routed = self._experts(rows, (ids, weights), out=answers)
        dense = self._dense.answers(x)
        if cold is not None:
            cold.after(routed)
        total = small.norm_add(dense, routed, self._experts_after, self._eps)
        small.norm_add(x, total, self._after, self._eps)
