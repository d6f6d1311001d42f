"""DeltaNet: gated linear attention, which keeps a recurrent state instead of keys and values."""

from collections.abc import Sequence

import torch

from headroom.families.config import DeltaNetConfig
from headroom.kernels.ops import DeltaNetOp, DeltaNetWeights, GatedNormOp, RecurrentState
from headroom.kernels.registry import pick
from headroom.layers.batch import Batch
from headroom.layers.guesses import Accepted, KeptRows
from headroom.layers.modules import Linear
from headroom.layers.step_timing import part_of_step
from headroom.layers.weights import WeightSource


class DeltaNet:
    """Projects rows, runs each through its sequence's state, then norms and gates the output."""

    def __init__(
        self,
        config: DeltaNetConfig,
        eps: float,
        get: WeightSource,
        state: RecurrentState,
        kept: KeptRows | None = None,  # None: steps have no guesses
    ) -> None:
        self._state, self._kept = state, kept
        self._qkv = Linear(get("delta.qkv"), get.case)
        self._z = Linear(get("delta.z"), get.case)
        self._beta = Linear(get("delta.beta"), get.case)
        self._alpha = Linear(get("delta.alpha"), get.case)
        self._out = Linear(get("delta.out"), get.case)
        self._norm = get.vector("delta.norm").flatten()  # has no offset in any file
        self._eps = eps
        self._weights = small_weights(config, get)
        self._delta_net: DeltaNetOp = pick("delta_net", get.case).run
        self._gated_norm: GatedNormOp = pick("gated_norm", get.case).run

    @part_of_step("recurrent")
    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the output for normed rows, and advance each sequence's state to its last row.

        States of guessed spans stay; `commit` advances them.
        """
        qkv, beta, alpha = self._qkv(x), self._beta(x), self._alpha(x)
        mixed = self._delta_net(qkv, beta, alpha, self._weights, self._state, batch.spans)
        if self._kept is not None and batch.guessed:
            self._kept.keep(qkv, beta, alpha)
        gate = self._z(x).view(mixed.shape)
        return self._out(self._gated_norm(mixed, gate, self._norm, self._eps).flatten(1))

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Advance the states of guessed spans by their accepted rows."""
        assert self._kept is not None, "a step with guesses was planned for"
        self._kept.run(self._delta_net, self._weights, self._state, accepted)


def small_weights(config: DeltaNetConfig, get: WeightSource) -> DeltaNetWeights:
    """Return the convolution, decay and bias of a recurrent layer, in float32."""
    decay = get.vector("delta.a").flatten()
    return DeltaNetWeights(
        conv=get.vector("delta.conv").view(config.channels, config.conv),
        decay=-decay.exp() if config.decay_is_log else decay,
        dt_bias=get.vector("delta.dt_bias").flatten(),
        key_heads=config.key_heads,
        tiled=config.tiled,
    )
