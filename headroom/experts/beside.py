"""BesideExperts: a dense part and routed experts that read the same residual stream."""

import torch

from headroom.experts.experts_ffn import routed_experts
from headroom.experts.router import Router
from headroom.experts.store import LayerStore
from headroom.families.config import ExpertsConfig
from headroom.layers.block import Ffn
from headroom.layers.norm import RmsNorm
from headroom.layers.parts import part_of_step
from headroom.layers.weights import WeightSource


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
