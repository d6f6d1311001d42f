"""DeviceExperts: routed experts on a GPU, with the expert that every row visits."""

import torch

from headroom.kernels.cuda import experts as cuda_experts
from headroom.kernels.cuda import route as cuda_route
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.experts import Others
from headroom.kernels.cuda.matmul import RowNorm
from headroom.kernels.ops import RouterRule
from headroom.layers.config import ExpertsConfig
from headroom.layers.device_block import DeviceBatch
from headroom.layers.device_rows import DeviceRows, gated_rows, normed_rows, stack
from headroom.layers.weights import WeightSource


class DeviceExperts:
    """The feed-forward part of a layer with routed experts; all of them in GPU memory."""

    def __init__(
        self, config: ExpertsConfig, eps: float, get: WeightSource, counts: torch.Tensor
    ) -> None:
        self._config, self._eps, self._counts = config, eps, counts
        self._norm = get.norm("ffn.norm")
        router = get.vector("ffn.router")
        if config.shared_gate:  # scored with the experts, in one go
            router = torch.cat((router, get.vector("ffn.shared.router").view(1, -1)))
        self._router = router
        self._rule = RouterRule(
            used=config.used,
            scores=config.scores,
            normalise=config.normalise,
            scale=config.scale,
            softcap=config.softcap,
        )
        self._bias = get.vector("ffn.score_bias") if config.bias else None
        self._table = cuda_experts.prepare(get.experts(config.experts))
        get.count("hot_experts", self._table.nbytes)
        self._shared = None
        if config.shared_width:
            self._shared = (
                stack(get, ["ffn.shared.gate", "ffn.shared.up"]),
                stack(get, ["ffn.shared.down"]),
            )

    def __call__(self, x: torch.Tensor, batch: DeviceBatch) -> None:
        """Add the answers of each row's experts."""
        normed = scratch.empty(*x.shape, device=x.device)
        rows = normed_rows(x, RowNorm(self._norm, self._eps, normed))
        logits = cuda_route.score(normed, self._router)
        sequence = batch.tables[0].sequence
        ids, weights = cuda_route.route(logits, self._rule, self._bias, self._counts, sequence)
        others = Others(
            residual=x,
            shared=self._shared_answers(rows),
            shared_logits=logits[:, self._config.experts :] if self._config.shared_gate else None,
        )
        activation = self._config.activation
        if rows.few is not None:
            cuda_experts.few_rows(rows.few, ids, weights, self._table, activation, others, x)
        else:
            assert rows.many is not None
            cuda_experts.many_rows(rows.many, ids, weights, self._table, activation, others, x)

    def _shared_answers(self, rows: DeviceRows) -> torch.Tensor | None:
        if self._shared is None:
            return None
        both, down = self._shared
        gate, up = both(rows)
        return down(gated_rows(gate, up, self._config.activation))[0]
