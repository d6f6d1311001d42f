"""Feed-forward parts with routed experts, built from separate operations for any device.

A `Router` picks each row's experts. Their outputs are computed by `RoutedExperts`, where one device
holds all experts, or by `StoredExperts`, where some are cold.
"""

import time
from dataclasses import dataclass, replace

import torch

from headroom.experts.layer_store import LayerStore
from headroom.experts.store import drop_cold, fill_rows
from headroom.experts.traces.taps import LayerTap
from headroom.families.config import ExpertsConfig
from headroom.kernels.ops import ExpertsOp, Picks, RouteOp, RouterRule
from headroom.kernels.reference.elementwise import sigmoid
from headroom.kernels.reference.matmul import matmul
from headroom.kernels.reference.norms import gated_activation
from headroom.kernels.registry import pick
from headroom.kernels.weight import PLAIN_TYPES, Weight
from headroom.layers.block import Ffn
from headroom.layers.modules import Linear, Mlp, RmsNorm
from headroom.layers.step_timing import part_of_step
from headroom.layers.weights import WeightSource


def router_rule(config: ExpertsConfig) -> RouterRule:
    """Return the rule by which a family turns router logits into picks and weights."""
    return RouterRule(
        used=config.used,
        scores=config.scores,
        normalise=config.normalise,
        scale=config.scale,
        softcap=config.softcap,
    )


class Router:
    """Scores all experts in float32 and picks the top k by the family's rule."""

    def __init__(
        self,
        config: ExpertsConfig,
        get: WeightSource,
        counts: torch.Tensor,
        tap: LayerTap | None = None,
    ) -> None:
        exact = replace(get.case, dtype="f32")
        bias = get.vector("ffn.router_bias") if config.biases else None
        self._logits = Linear(get.float32("ffn.router"), exact, bias)
        self._rule = router_rule(config)
        self._bias = get.vector("ffn.score_bias") if config.bias else None
        self._scales = get.vector("ffn.experts_scale") if config.expert_scales else None
        self._counts = counts  # int64 [experts]: this layer's row of RoutingStats
        self._route: RouteOp = pick("route", exact).run
        self._tap = tap

    def __call__(self, x: torch.Tensor) -> Picks:
        """Return the picked experts of rows, and count the picks."""
        ids, weights = self._route(self._logits(x), self._rule, self._bias, self._counts)
        if self._scales is not None:
            weights = weights * self._scales[ids]
        return Picks(ids if self._tap is None else self._tap(ids), weights)


@dataclass(frozen=True, slots=True, eq=False)
class PickPositions:
    """Positions of picks in a tensor `[rows, used]`."""

    row: torch.Tensor
    rank: torch.Tensor  # among the row's picks

    @classmethod
    def where(cls, mask: torch.Tensor) -> "PickPositions":
        """Return the positions at which a mask `[rows, used]` is true."""
        return cls(*torch.nonzero(mask, as_tuple=True))

    def __len__(self) -> int:
        return len(self.row)


class StoredExperts:
    """The experts of one layer, some of them cold, in the file's format.

    For formats and GPUs without fused kernels. A row's outputs are summed on the same device in the
    same order whatever is hot, so that placement does not change the tokens.
    """

    def __init__(self, config: ExpertsConfig, get: WeightSource, store: LayerStore) -> None:
        fill_rows(store, get)
        self._store, self._activation, self._dtype = store, config.activation, get.case.dtype
        # Entry n: of n cold picks of a row, those whose experts are copied to the GPU.
        self._copied = torch.tensor(store.choice.in_place, device=get.case.torch_device)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's experts; `ids` and `weights` `[rows, used]`."""
        drops = self._store.path == "drop"
        if drops:
            weights = drop_cold(ids, weights, self._store.is_hot)
        outputs = torch.zeros(*ids.shape, x.shape[1], device=x.device)
        copied = self._is_copied(ids)
        for expert in torch.bincount(ids.flatten()).nonzero().flatten().tolist():
            own = ids == expert
            slot, cold = self._store.slot_of(expert), self._store.cold_of(expert)
            if slot is not None:
                self._fill(outputs, x, PickPositions.where(own), slot)
            elif not drops and cold is not None:
                if len(on_gpu := PickPositions.where(own & copied)):
                    self._fill(outputs, x, on_gpu, self._store.bring(cold))
                if len(on_cpu := PickPositions.where(own & ~copied)):
                    self._fill_by_cpu(outputs, x, on_cpu, cold)
        out = torch.zeros_like(x)
        for output, weight in zip(outputs.unbind(1), weights.unbind(1), strict=True):
            out += weight[:, None] * output
        return out

    def _is_copied(self, ids: torch.Tensor) -> torch.Tensor:
        """Return, for each pick, whether its expert is cold and is copied to the GPU."""
        cold = self._store.is_hot[ids] == 0
        return cold & (cold.cumsum(1) <= self._copied[cold.sum(1)][:, None])

    def _fill(
        self, outputs: torch.Tensor, x: torch.Tensor, picks: PickPositions, blob: torch.Tensor
    ) -> None:
        """Write one expert's outputs for some picks, computed on the device of its bytes."""
        outputs[picks.row, picks.rank] = self._run(x[picks.row], blob).to(x.device)

    def _fill_by_cpu(
        self, outputs: torch.Tensor, x: torch.Tensor, picks: PickPositions, blob: torch.Tensor
    ) -> None:
        """Write a cold expert's outputs, computed by the CPU, and count what that costs."""
        started, counts = time.perf_counter(), self._store.counts
        self._fill(outputs, x, picks, blob)
        counts.cpu_bytes += self._store.expert_bytes
        counts.cpu_s += time.perf_counter() - started

    def _run(self, x: torch.Tensor, blob: torch.Tensor) -> torch.Tensor:
        """Return one expert's outputs for rows, on the device of its bytes."""
        here = x.to(blob.device)
        gate, up, down = self._weights(blob)
        inner = gated_activation(
            matmul(here, gate, self._dtype), matmul(here, up, self._dtype), self._activation
        )
        return matmul(inner, down, self._dtype)

    def _weights(self, blob: torch.Tensor) -> list[Weight]:
        layout = self._store.blobs
        parts = zip(self._store.parts(blob), layout.kinds, layout.shapes, strict=True)
        return [
            Weight(part.view(PLAIN_TYPES.get(kind.name, torch.uint8)).view(rows, -1), kind, rows, n)
            for part, kind, (rows, n) in parts
        ]


class RoutedExperts:
    """The experts of one layer, all on one device."""

    def __init__(self, config: ExpertsConfig, get: WeightSource, scratch: torch.Tensor) -> None:
        mapped = get.experts_from_file(config.experts)
        if config.biases:
            mapped = replace(mapped, biases=get.expert_biases())
        case = replace(get.case, experts=mapped.kinds, biases=config.biases)
        kernel = pick("experts", case)
        # Experts stay packed whatever other weights do: they move, and most are seldom read.
        with torch.device(get.case.torch_device):  # where a table takes its memory
            self._table = kernel.prepare(mapped)
        get.count("hot_experts", self._table.nbytes)
        self._activation, self._dtype = config.activation, get.case.dtype
        self._scratch = scratch if scratch.numel() else None
        self._experts: ExpertsOp = kernel.run

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's experts; `ids` and `weights` `[rows, used]`."""
        return self._experts(
            x, ids, weights, self._table, self._activation, self._dtype, self._scratch
        )


def routed_experts(
    config: ExpertsConfig, get: WeightSource, scratch: torch.Tensor, store: LayerStore | None
) -> "RoutedExperts | StoredExperts":
    """Return the experts of a layer: all on one device, or where a store holds them."""
    if store is None:
        return RoutedExperts(config, get, scratch)
    return StoredExperts(config, get, store)


class SharedExpert:
    """The expert that every row visits; its output is multiplied by its gate, if it has one."""

    def __init__(self, config: ExpertsConfig, get: WeightSource) -> None:
        self._mlp = Mlp(get, config.activation, "ffn.shared.")
        exact = replace(
            get.case, dtype="f32", reference=True
        )  # one row would waste the panels of the C++ kernels
        self._gate = Linear(get.row("ffn.shared.router"), exact) if config.shared_gate else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the expert's output for normed rows."""
        out = self._mlp(x)
        return out if self._gate is None else out * sigmoid(self._gate(x))


class ExpertsFfn:
    """The feed-forward part of a layer with routed experts."""

    def __init__(
        self,
        config: ExpertsConfig,
        get: WeightSource,
        counts: torch.Tensor,  # this layer's row of RoutingStats
        scratch: torch.Tensor,  # of the stage; layers use it one after another
        store: LayerStore | None = None,  # if some of the experts are cold
        tap: LayerTap | None = None,
    ) -> None:
        self._router = Router(config, get, counts, tap)
        self._experts = routed_experts(config, get, scratch, store)
        self._shared = SharedExpert(config, get) if config.shared_width else None

    @part_of_step("experts")
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for normed rows."""
        out = self._experts(x, *self._router(x))
        return out if self._shared is None else out.add_(self._shared(x))


class DenseAndExpertsFfn:
    """The sum of a dense part and of routed experts, each with its own norms."""

    def __init__(
        self,
        dense: Ffn,  # with its norms
        config: ExpertsConfig,
        get: WeightSource,
        eps: float,
        counts: torch.Tensor,  # this layer's row of RoutingStats
        scratch: torch.Tensor,  # of the stage; layers use it one after another
        store: LayerStore | None = None,  # if some of the experts are cold
        tap: LayerTap | None = None,
    ) -> None:
        self._dense = dense
        # The router's scale and 1 / sqrt(width) together act as the weight of its norm.
        scale = get.vector("ffn.router_scale")
        self._router_norm = RmsNorm(scale.mul_(len(scale) ** -0.5), eps, get.case)
        self._router = Router(config, get, counts, tap)
        self._before = RmsNorm(get.norm("ffn.experts_norm"), eps, get.case)
        self._experts = routed_experts(config, get, scratch, store)
        self._after = RmsNorm(get.norm("ffn.experts_post_norm"), eps, get.case)

    @part_of_step("experts")
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both parts for rows of the residual stream."""
        ids, weights = self._router(self._router_norm(x))
        routed = self._after(self._experts(self._before(x), ids, weights))
        return routed.add_(self._dense(x))
