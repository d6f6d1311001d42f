"""Make up routing traces whose statistics are those that others measured on real models.

A router picks the experts with the largest logits. Here each logit is a sum of normal variables
that live for different times: for all text, for a document, for some dozen tokens, for a few
tokens, and for one. How their variance is shared out decides how often experts are chosen again,
and after how long; so a model of routing is a few numbers, and fits any number of experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, sqrt

import numpy as np
import numpy.typing as npt

from headroom.experts.traces.trace import Ids, RoutingTrace, TracedLayer

_BLOCK_VALUES = 1 << 21  # logits that are computed together

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Drift:
    """A part of the logits that changes slowly from token to token."""

    share: float  # of the variance of a logit
    tokens: float  # after so many tokens it still resembles itself by 1/e


@dataclass(frozen=True, slots=True)
class RoutingModel:
    """How the variance of a logit is shared out; what is left of 1 is drawn for each token."""

    popular: float = 0.0  # the same in all text: some experts are chosen often everywhere
    document: float = 0.0  # the same in all tokens of a sequence
    drifts: tuple[Drift, ...] = ()

    @property
    def token(self) -> float:
        """The share that is drawn anew for each token."""
        return max(0.0, 1.0 - self.popular - self.document - sum(x.share for x in self.drifts))


@dataclass(frozen=True, slots=True)
class Preset:
    """A model of routing that was fitted to published statistics."""

    model: RoutingModel
    about: str  # what was measured, by whom
    experts: int  # of a layer of the model that was measured
    used: int


# Most numbers were fitted, by least squares over drawn traces of the size that was measured, to
# what `about` says; `tests/experts/traces/test_synth_trace.py` measures traces of the presets.
PRESETS: Mapping[str, Preset] = {
    "qwen3-30b-a3b": Preset(
        RoutingModel(0.175, 0.235, (Drift(0.19, 75.0), Drift(0.20, 3.6))),
        "strong memory, some experts popular everywhere (kekzl/imp PR 1359)",
        experts=128,
        used=8,
    ),
    "qwen3.8-flash-next": Preset(
        RoutingModel(0.04, 0.22, (Drift(0.21, 67.0), Drift(0.225, 4.4))),
        "some memory, no experts popular everywhere (llama.cpp PR 27861)",
        experts=512,
        used=10,
    ),
    "qwen3.8-flash-next-short": Preset(
        RoutingModel(0.04, 0.075, (Drift(0.025, 12.0), Drift(0.66, 2.0))),
        "weak memory, no experts popular everywhere (kekzl/imp PR 2061)",
        experts=512,
        used=10,
    ),
    # These two were chosen so that policies compare as was published; 256 experts are assumed.
    "deepseek-v4-flash": Preset(
        RoutingModel(popular=0.45),
        "no memory, few experts popular everywhere: a cache of 11 slots loses to a list "
        "(FreeToken issue 174)",
        experts=256,
        used=6,
    ),
    "laguna-s-2.1": Preset(
        RoutingModel(0.3, 0.1, (Drift(0.1, 30.0),)),
        "little memory, some experts popular everywhere: sparing what was hit often helps "
        "(TheTom/llama-cpp-turboquant PR 300)",
        experts=256,
        used=8,
    ),
    "skewed": Preset(
        RoutingModel(popular=0.2),
        "no memory, some experts popular everywhere: 60 % of the experts get 90 % of the choices",
        experts=256,
        used=8,
    ),
    "uniform": Preset(RoutingModel(), "every choice drawn alone and evenly", experts=256, used=8),
}


def synth_trace(
    layers: Sequence[TracedLayer],
    model: RoutingModel,
    *,
    tokens: int,
    sequences: int = 4,
    seed: int = 0,
    source: str = "",
) -> RoutingTrace:
    """Return a made-up trace of so many tokens, shared out evenly over documents.

    Equal arguments give the same trace.
    """
    assert 1 <= sequences <= tokens
    starts = [tokens * number // sequences for number in range(sequences)]
    ids = np.empty((tokens, sum(layer.used for layer in layers)), np.uint16)
    columns = _columns(layers)
    # Layers with the same numbers of experts are drawn together.
    kinds = list(dict.fromkeys((layer.experts, layer.used) for layer in layers))
    for kind, (experts, used) in enumerate(kinds):
        own = [i for i, x in enumerate(layers) if (x.experts, x.used) == (experts, used)]
        router = _Routers(len(own), experts, used, model, np.random.default_rng([seed, kind]))
        place = np.concatenate([columns[index] for index in own])
        for first, end in zip(starts, [*starts[1:], tokens], strict=True):
            begin = first
            for picks in router.document(end - first):
                ids[begin : begin + len(picks), place] = picks.reshape(len(picks), -1)
                begin += len(picks)
    return RoutingTrace("", source, tuple(layers), ids, tuple(starts))


def _columns(layers: Sequence[TracedLayer]) -> list[npt.NDArray[np.int64]]:
    """Return the columns of a trace's ids that each layer has."""
    ends = np.cumsum([layer.used for layer in layers])
    return [np.arange(end - layer.used, end) for end, layer in zip(ends, layers, strict=True)]


class _Routers:
    """The routers of some layers with the same number of experts."""

    def __init__(
        self,
        layers: int,
        experts: int,
        used: int,
        model: RoutingModel,
        random: np.random.Generator,
    ) -> None:
        self._shape = layers, experts
        self._used = used
        self._model = model
        self._random = random
        self._popular = self._draw(model.popular, 1)

    def document(self, tokens: int) -> Iterator[Ids]:
        """Yield the picks `[tokens, layers, used]` of one document in blocks, best first."""
        model = self._model
        base = self._popular + self._draw(model.document, 1)
        states = [self._draw(1.0, 1)[0] for _ in model.drifts]
        block = max(1, _BLOCK_VALUES // (self._shape[0] * self._shape[1]))
        for begin in range(0, tokens, block):
            size = min(block, tokens - begin)
            logits = base + self._draw(model.token, size)
            for drift, state in zip(model.drifts, states, strict=True):
                logits += self._drifted(drift, state, size)
            yield self._best(logits)

    def _drifted(self, drift: Drift, state: Logits, tokens: int) -> Logits:
        """Return the part of the logits of the next tokens that drifts, and move its state on."""
        kept = exp(-1.0 / drift.tokens)
        changes = self._draw(1.0 - kept**2, tokens)
        for change in changes:
            state *= kept
            state += change
            change[:] = state
        changes *= np.float32(sqrt(drift.share))
        return changes

    def _best(self, logits: Logits) -> Ids:
        """Return the experts with the largest logits, the best first."""
        used = self._used
        best = np.argpartition(-logits, min(used, logits.shape[2]) - 1, axis=2)[..., :used]
        order = np.argsort(-np.take_along_axis(logits, best, 2), axis=2, kind="stable")
        return np.take_along_axis(best, order, 2).astype(np.uint16)

    def _draw(self, variance: float, tokens: int) -> Logits:
        """Draw normal variables `[tokens, layers, experts]`."""
        shape = (tokens, *self._shape)
        if not variance:
            return np.zeros(shape, np.float32)
        drawn = self._random.standard_normal(shape, dtype=np.float32)
        drawn *= np.float32(sqrt(variance))
        return drawn
