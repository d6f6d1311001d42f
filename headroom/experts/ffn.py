"""Router: which experts each row visits, and with what weights."""

import time
from dataclasses import replace

import torch

from headroom.experts.store import LayerStore, drop_cold, fill_rows
from headroom.families.config import ExpertsConfig
from headroom.kernels.ops import Experts, Route, RouterRule
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
    """Return how a family turns scores into weights."""
    return RouterRule(
        used=config.used,
        scores=config.scores,
        normalise=config.normalise,
        scale=config.scale,
        softcap=config.softcap,
    )


class Router:
    """Scores all experts in float32 and chooses the best by the family's rule."""

    def __init__(self, config: ExpertsConfig, get: WeightSource, counts: torch.Tensor) -> None:
        exact = replace(get.case, dtype="f32")
        self._logits = Linear(get.float32("ffn.router"), exact)
        self._rule = router_rule(config)
        self._bias = get.vector("ffn.score_bias") if config.bias else None
        self._scales = get.vector("ffn.experts_scale") if config.expert_scales else None
        self._counts = counts  # int64 [experts]: this layer's row of RoutingStats
        self._route: Route = pick("route", exact).run

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and weights `[rows, used]` for rows as the router sees them; count them."""
        ids, weights = self._route(self._logits(x), self._rule, self._bias, self._counts)
        return ids, weights if self._scales is None else weights * self._scales[ids]


Places = tuple[torch.Tensor, torch.Tensor]  # of picks: rows, and ranks among a row's


class SplitExperts:
    """The experts of one layer as their file has them, for types without a GPU's own kernels.

    Every answer is summed where all-hot experts would be: the same tokens, whatever is hot.
    """

    def __init__(self, config: ExpertsConfig, get: WeightSource, store: LayerStore) -> None:
        fill_rows(store, get)
        self._store, self._activation, self._dtype = store, config.activation, get.case.dtype
        # Of so many cold picks of a row, those whose experts come to the GPU.
        self._left = torch.tensor(store.choice.in_place, device=get.case.torch_device)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's experts; `ids` and `weights` `[rows, used]`."""
        drops = self._store.path == "drop"
        if drops:
            weights = drop_cold(ids, weights, self._store.is_hot)
        answers = torch.zeros(*ids.shape, x.shape[1], device=x.device)
        comes = self._comes(ids)
        for expert in torch.bincount(ids.flatten()).nonzero().flatten().tolist():
            own, slot, cold = ids == expert, *self._places(expert)
            if slot is not None:
                self._answer(answers, x, _places(own), slot)
            elif not drops and cold is not None:
                if len((here := _places(own & comes))[0]):
                    self._answer(answers, x, here, self._store.bring(cold))
                if len((there := _places(own & ~comes))[0]):
                    self._answer_by_cpu(answers, x, there, cold)
        out = torch.zeros_like(x)
        for answer, weight in zip(answers.unbind(1), weights.unbind(1), strict=True):
            out += weight[:, None] * answer
        return out

    def _places(self, expert: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self._store.slot_of(expert), self._store.cold_of(expert)

    def _comes(self, ids: torch.Tensor) -> torch.Tensor:
        """Whether a cold pick `[rows, used]` is one whose expert comes to the GPU."""
        cold = self._store.is_hot[ids] == 0
        return cold & (cold.cumsum(1) <= self._left[cold.sum(1)][:, None])

    def _answer(
        self, answers: torch.Tensor, x: torch.Tensor, picks: Places, blob: torch.Tensor
    ) -> None:
        """Fill in one expert's answers for some picks, computed where it lies."""
        row, rank = picks
        answers[row, rank] = self._answers(x[row], blob).to(x.device)

    def _answer_by_cpu(
        self, answers: torch.Tensor, x: torch.Tensor, picks: Places, blob: torch.Tensor
    ) -> None:
        """Fill in a cold expert's answers where it lies, and count what that costs."""
        started, counts = time.perf_counter(), self._store.counts
        self._answer(answers, x, picks, blob)
        counts.cpu_bytes += self._store.expert_bytes
        counts.cpu_s += time.perf_counter() - started

    def _answers(self, x: torch.Tensor, blob: torch.Tensor) -> torch.Tensor:
        """One expert's answers, where it lies."""
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


def _places(picks: torch.Tensor) -> Places:
    row, rank = torch.nonzero(picks, as_tuple=True)
    return row, rank


class RoutedExperts:
    """The experts of one layer, all on one device."""

    def __init__(self, config: ExpertsConfig, get: WeightSource, scratch: torch.Tensor) -> None:
        mapped = get.experts_from_file(config.experts)
        kernel = pick("experts", replace(get.case, experts=mapped.kinds))
        # Experts stay packed whatever other weights do: they move, and most are seldom read.
        with torch.device(get.case.torch_device):  # where a table takes its memory
            self._table = kernel.prepare(mapped)
        get.count("hot_experts", self._table.nbytes)
        self._activation, self._dtype = config.activation, get.case.dtype
        self._scratch = scratch if scratch.numel() else None
        self._experts: Experts = kernel.run

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's experts; `ids` and `weights` `[rows, used]`."""
        return self._experts(
            x, ids, weights, self._table, self._activation, self._dtype, self._scratch
        )


def routed_experts(
    config: ExpertsConfig, get: WeightSource, scratch: torch.Tensor, store: LayerStore | None
) -> "RoutedExperts | SplitExperts":
    """Return the experts of a layer: all on one device, or where a store holds them."""
    if store is None:
        return RoutedExperts(config, get, scratch)
    return SplitExperts(config, get, store)


class SharedExpert:
    """The expert that every row visits, weighted by a sigmoid of its own where it has one."""

    def __init__(self, config: ExpertsConfig, get: WeightSource) -> None:
        self._mlp = Mlp(get, config.activation, "ffn.shared.")
        exact = replace(get.case, dtype="f32", reference=True)  # one row is too little for panels
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
        store: LayerStore | None = None,  # where some of the experts are cold
    ) -> None:
        self._router = Router(config, get, counts)
        self._experts = routed_experts(config, get, scratch, store)
        self._shared = SharedExpert(config, get) if config.shared_width else None

    @part_of_step("experts")
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for normed rows."""
        out = self._experts(x, *self._router(x))
        return out if self._shared is None else out.add_(self._shared(x))


class BesideExperts:
    """The sum of a dense part and of routed experts, each with norms of its own."""

    def __init__(
        self,
        dense: Ffn,  # with its norms
        config: ExpertsConfig,
        get: WeightSource,
        eps: float,
        counts: torch.Tensor,  # this layer's row of RoutingStats
        scratch: torch.Tensor,  # of the stage; layers use it one after another
        store: LayerStore | None = None,  # where some of the experts are cold
    ) -> None:
        self._dense = dense
        # What the router's scale and the root of the width do is a norm's weight.
        scale = get.vector("ffn.router_scale")
        self._router_norm = RmsNorm(scale.mul_(len(scale) ** -0.5), eps, get.case)
        self._router = Router(config, get, counts)
        self._before = RmsNorm(get.norm("ffn.experts_norm"), eps, get.case)
        self._experts = routed_experts(config, get, scratch, store)
        self._after = RmsNorm(get.norm("ffn.experts_post_norm"), eps, get.case)

    @part_of_step("experts")
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum for rows of the residual stream, which the router sees as they are."""
        ids, weights = self._router(self._router_norm(x))
        routed = self._after(self._experts(self._before(x), ids, weights))
        return routed.add_(self._dense(x))
