"""Traffic: the bytes that a decode step must move, which limit its speed."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.plan.cost_model import cache_read_bytes, state_move_bytes
from headroom.plan.lines import (
    core_bytes,
    embed_bytes,
    head_bytes,
    kv_token_bytes,
    lookup_bytes,
    norm_bytes,
)
from headroom.plan.settings import PlanSettings
from headroom.plan.shape import LayerShape, ModelShape

VisitRates = Sequence[Sequence[float]]  # by layer and expert: the share of tokens that visit it


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one step; bytes that several rows share are counted once."""

    weights: float  # all weights but routed experts and embedding tables
    experts: float  # routed experts that at least one row visits
    rows: float  # rows of the embedding table and of other lookup tables
    cache: float  # cached keys and values that are read, and new ones that are written
    state: float  # states of recurrent layers, read and written

    @property
    def total(self) -> float:
        """All bytes of the step."""
        return self.weights + self.experts + self.rows + self.cache + self.state


def step_traffic(
    model: ModelShape,
    settings: PlanSettings,
    contexts: Sequence[float],
    rates: VisitRates | None = None,
) -> Traffic:
    """Return the bytes of a step in which each sequence decodes one token.

    `contexts` has the number of cached tokens of each sequence. Without `rates` all experts of a
    layer count as equally likely.
    """
    if settings.kernels == "native":
        model = model.in_panels()
    elif settings.uses_arena:
        model = model.in_tiles()
    batch, last = len(contexts), (embed_bytes if model.tied else head_bytes)(model, settings)
    tables = embed_bytes(model, settings) + lookup_bytes(model, settings)
    return Traffic(
        weights=core_bytes(model.layers, settings) + norm_bytes(model, settings) + last,
        experts=sum(
            visited_experts(layer, batch, rates[index] if rates else None) * layer.expert_bytes
            for index, layer in enumerate(model.layers)
        ),
        rows=batch * tables / model.vocab,
        cache=sum(_cache_bytes(layer, settings, context)
                  for layer in model.layers for context in contexts),
        state=batch * sum(state_move_bytes(layer) for layer in model.layers),
    )  # fmt: skip


def visited_experts(layer: LayerShape, rows: int, rates: Sequence[float] | None = None) -> float:
    """Return how many experts of a layer `rows` independent rows are expected to visit."""
    if not layer.experts:
        return 0.0
    if rates is None:
        rates = [layer.experts_used / layer.experts] * layer.experts
    return sum(1 - (1 - min(1.0, rate)) ** rows for rate in rates)


def _cache_bytes(layer: LayerShape, settings: PlanSettings, context: float) -> float:
    """Return the bytes of keys and values that one row reads and writes in a layer."""
    written = kv_token_bytes(layer, settings.k_type, settings.v_type)
    return cache_read_bytes(layer, settings, context + 1) + written
