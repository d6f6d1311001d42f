"""ExpertsFfn: a router, the experts it chooses, and one that every row visits."""

from dataclasses import replace

import torch

from headroom.experts.router import Router
from headroom.experts.split_experts import SplitExperts
from headroom.experts.store import LayerStore
from headroom.families.config import ExpertsConfig
from headroom.kernels.ops import Experts
from headroom.kernels.registry import pick
from headroom.layers.linear import Linear
from headroom.layers.mlp import Mlp
from headroom.layers.parts import part_of_step
from headroom.layers.weights import WeightSource


class RoutedExperts:
    """The experts of one layer, all on one device."""

    def __init__(self, config: ExpertsConfig, get: WeightSource, scratch: torch.Tensor) -> None:
        mapped = get.experts(config.experts)
        kernel = pick("experts", replace(get.case, experts=mapped.kinds))
        # Experts stay packed whatever other weights do: they move, and most are seldom read.
        with torch.device(get.case.place):  # where a table takes its memory
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
        return out if self._gate is None else out * self._gate(x).sigmoid()


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
