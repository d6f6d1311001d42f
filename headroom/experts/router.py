"""Router: which experts each row visits, and with what weights."""

from dataclasses import replace

import torch

from headroom.families.config import ExpertsConfig
from headroom.kernels.ops import Route, RouterRule
from headroom.kernels.registry import pick
from headroom.layers.linear import Linear
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
        self._logits = Linear(get.exact("ffn.router"), exact)
        self._rule = router_rule(config)
        self._bias = get.vector("ffn.score_bias") if config.bias else None
        self._scales = get.vector("ffn.experts_scale") if config.expert_scales else None
        self._counts = counts  # int64 [experts]: this layer's row of RoutingStats
        self._route: Route = pick("route", exact).run

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and weights `[rows, used]` for rows as the router sees them; count them."""
        ids, weights = self._route(self._logits(x), self._rule, self._bias, self._counts)
        return ids, weights if self._scales is None else weights * self._scales[ids]
