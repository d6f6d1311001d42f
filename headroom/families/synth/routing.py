"""Skewed routing: routers that send a given share of all choices to a few hot experts.

Most routers have no bias, so that the skew must come from the hidden state. The first channels of
every token's embedding hold one constant, the beacon, and the residual stream keeps it. Norms hide
the beacon from mixers and from the head; routers read it and raise the logits of hot experts. The
hot experts of each layer are drawn at random: if they had the lowest ids, a placement without
statistics would keep them in GPU memory by chance.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headroom.errors import OptionError
from headroom.families.dims import Dims
from headroom.families.family import Recipe
from headroom.families.registry import FAMILIES, find_family
from headroom.families.synth.blocks import Floats, random_source

CHANNELS = 256  # of the beacon; whole blocks of every type
BEACON_POWER = 8.0  # mean square of the beacon over all channels; that of the others is 1
BEACON = 0.25  # value of the beacon behind the norm that routers and experts read
_TOKENS = 4096  # random tokens by which the head start is measured
_STEPS = 30  # bisection steps of that measurement
_SCATTER = 0x5CA77E12  # keeps these random numbers apart from those of a model's values

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Skew:
    """How a synthesised model is changed so that its routers pick hot experts more often."""

    bias: str  # the tensor of a layer's router bias; "": a beacon in the embeddings instead
    hot: int  # experts of each layer
    start: float  # head start of their logits, or of their scores where routers have a bias
    width: int  # channels of the residual stream
    channels: int = CHANNELS
    quiet: float = 1.0  # factor of what layers add to the residual stream
    quieted: tuple[str, ...] = ("attn_output", "ssm_out", "ffn_down")

    @property
    def by_bias(self) -> bool:
        """Whether the router's bias is changed, and not the embeddings."""
        return bool(self.bias)

    @property
    def beacon(self) -> float:
        """The value of the beacon's channels in the embedding."""
        return float((BEACON_POWER * self.width / self.channels) ** 0.5)

    @property
    def rms(self) -> float:
        """Root mean square of the residual stream."""
        return float((BEACON_POWER + 1 - self.channels / self.width) ** 0.5)

    def changed(self, name: str, values: Floats, seed: int) -> Floats:
        """Return the values of a norm, router or bias as the skew changes them."""
        if self.by_bias:
            biased = name.endswith(self.bias)
            return self._plus_start(values, self._hot_of(name, values, seed)) if biased else values
        if name.endswith(("attn_norm.weight", "output_norm.weight")):
            return self._norm(values, 0.0)
        if name.endswith(("ffn_norm.weight", "post_attention_norm.weight")):
            return self._norm(values, BEACON)
        if name.endswith("ffn_gate_inp.weight"):
            return self._router(values, self._hot_of(name, values, seed))
        return values

    def _norm(self, values: Floats, shown: float) -> Floats:
        """Return a norm whose output is `shown` in the beacon's channels, spread 1 elsewhere."""
        changed = values * np.float32(self.rms)
        changed[: self.channels] = shown * self.rms / self.beacon
        return changed

    def _hot_of(self, name: str, values: Floats, seed: int) -> Places:
        """Return the hot experts of the layer that a router or bias belongs to."""
        return hot_experts(seed, int(name.split(".")[1]), len(values), self.hot)

    def _router(self, values: Floats, hot: Places) -> Floats:
        """Return a router whose rows of hot experts read the beacon."""
        changed = values.copy()
        changed[:, : self.channels] = 0
        changed[hot, : self.channels] = self.start / (self.channels * BEACON)
        return changed

    def _plus_start(self, values: Floats, hot: Places) -> Floats:
        changed = values.copy()
        changed[hot] += np.float32(self.start)
        return changed


def hot_experts(seed: int, layer: int, experts: int, hot: int) -> Places:
    """Return the ids of a layer's hot experts in ascending order, drawn by the seed."""
    return np.sort(random_source(seed, layer, _SCATTER).permutation(experts)[:hot])


def make_skew(recipe: Recipe, share: float, hot_share: float) -> Skew:
    """Return the skew that sends `share` of all choices to `hot_share` of the experts."""
    dims, family = recipe.dims, recipe.family
    synthesis = find_family(family).synthesis
    skew = synthesis.skew
    able = {name: found.synthesis.skew for name, found in FAMILIES.items()}
    if not skew:
        raise OptionError(
            f"--routing-skew does not work for {family}.",
            hint=f"It works for {', '.join(name for name, way in able.items() if way)}.",
            param="routing_skew",
        )
    hot = round(hot_share * dims.experts)
    if not dims.experts_used <= hot < dims.experts or not 0 < share < 1:
        raise OptionError(
            f"{share:g} of the choices cannot go to {hot} of {dims.experts} experts.",
            hint=f"Choose --routing-skew between 0 and 1, and --skew-hot so that "
            f"{dims.experts_used} to {dims.experts - 1} experts are hot.",
            param="routing_skew",
        )
    if skew == "beacon" and (dims.hidden < 2 * CHANNELS or dims.tied):
        biased = next(name for name, way in able.items() if way == "bias")
        raise OptionError(
            f"--routing-skew needs a model that is {2 * CHANNELS} wide at least and has a head of "
            f"its own; this one is {dims.hidden} wide.",
            hint=f"Try --size {_wide_model(family)} --layers 4, or the family {biased}, "
            "which needs neither.",
            param="routing_skew",
        )
    by_bias = skew == "bias"
    start = find_start(dims, hot, share, by_bias)
    quiet = 1.0 if by_bias else (2 * dims.layers) ** -0.5
    return Skew(synthesis.router_bias if by_bias else "", hot, start, dims.hidden, quiet=quiet)


def _wide_model(family: str) -> str:
    """Return a known model of a family that is wide enough for a beacon."""
    return next(
        name
        for name, dims in find_family(family).known.items()
        if dims.hidden >= 2 * CHANNELS and not dims.tied
    )


def find_start(dims: Dims, hot: int, share: float, by_bias: bool) -> float:
    """Return the head start that hot experts need, measured with random logits.

    Routers with a bias add it to sigmoid scores.
    """
    spread = 0.5
    if not by_bias:  # the beacon's channels are equal for all tokens
        spread *= (1 - CHANNELS / dims.hidden) ** 0.5
    logits = spread * random_source(hot, dims.experts).standard_normal((_TOKENS, dims.experts))
    if by_bias:
        logits = 1 / (1 + np.exp(-logits)) + 0.02 * random_source(1).standard_normal(dims.experts)
    low, high = -8.0, 8.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        started = logits + middle * (np.arange(dims.experts) < hot)
        chosen = np.argpartition(-started, dims.experts_used - 1, axis=1)[:, : dims.experts_used]
        low, high = (middle, high) if np.mean(chosen < hot) < share else (low, middle)
    return (low + high) / 2
