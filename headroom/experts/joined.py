"""The experts of several stages as those of one model.

Each stage counts, stores and measures the experts of its own layers. The classes of this module
present the experts of all stages together, so that upkeep and reports do not depend on how a model
is split.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from headroom.experts.layer_store import LayerStore
from headroom.experts.placement import ExpertPlacement
from headroom.experts.store import ExpertStore
from headroom.experts.telemetry import (
    CacheTotals,
    ColdFigures,
    ColdPaces,
    ColdReading,
    Meter,
    PolicyState,
)
from headroom.plan.cost_model import ColdPath


class ModelRouting(Protocol):
    """How often each expert was picked, here or in other processes."""

    def counts(self) -> torch.Tensor:
        """Return all choices so far, `[layers, experts]`, copied to host memory."""

    def counts_with_decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all choices so far, and those of decode steps alone."""


class ColdLayer(Protocol):
    """What is known of a layer with cold experts, here or in another process."""

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert."""

    @property
    def link_copies(self) -> int:
        """How many times an exchange sends the bytes of an expert over the link."""

    @property
    def path(self) -> ColdPath:
        """Who computes the cold experts in decode steps."""


class ModelStore(Protocol):
    """Where each expert of a model is, here or in other processes."""

    @property
    def layers(self) -> Sequence[ColdLayer | None]:
        """All layers of the model; None: dense, or all hot."""

    @property
    def is_cached(self) -> bool:
        """Whether steps of some layers change which experts are in slots."""

    @property
    def pinned(self) -> bool:
        """Whether GPUs can read all cold experts in place."""

    @property
    def source(self) -> str:
        """Where the placement came from."""

    @property
    def cold_bytes(self) -> int:
        """Bytes of all experts in host memory."""

    def current_placement(self, *, ask: bool = True) -> ExpertPlacement:
        """Return which experts are hot now; may wait for GPUs, unless they are lost (no `ask`)."""


class JoinedRouting:
    """The counts of several stages; a layer has counts in one of them, and zeros in the others."""

    def __init__(self, parts: Sequence[ModelRouting]) -> None:
        self._parts = tuple(parts)

    def counts(self) -> torch.Tensor:
        """Return all choices so far, `[layers, experts]`, copied to host memory."""
        return self.counts_with_decode()[0]

    def counts_with_decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all choices so far, and those of decode steps alone."""
        every, decode = zip(*(part.counts_with_decode() for part in self._parts), strict=True)
        return torch.stack(every).sum(0), torch.stack(decode).sum(0)


class JoinedStore:
    """The stores of several stages; a layer is in one of them at most."""

    def __init__(self, parts: Sequence[ExpertStore]) -> None:
        self._parts = tuple(parts)

    @property
    def layers(self) -> tuple[LayerStore | None, ...]:
        """All layers of the model; None: dense, or all hot."""
        return tuple(
            next((layer for layer in found if layer is not None), None)
            for found in zip(*(part.layers for part in self._parts), strict=True)
        )

    @property
    def is_cached(self) -> bool:
        """Whether steps of some layers change which experts are in slots."""
        return any(part.is_cached for part in self._parts)

    @property
    def pinned(self) -> bool:
        """Whether GPUs can read all cold experts in place."""
        return all(part.pinned for part in self._parts)

    @property
    def source(self) -> str:
        """Where the placement came from."""
        return self._parts[0].source

    @property
    def cold_bytes(self) -> int:
        """Bytes of all experts in host memory."""
        return sum(part.cold_bytes for part in self._parts)

    def current_placement(self, *, ask: bool = True) -> ExpertPlacement:
        """Return which experts are hot now; may wait for GPUs, unless they are lost (no `ask`)."""
        placements = [part.current_placement(ask=ask) for part in self._parts]
        hot = list(placements[0].hot)
        for part, placement in zip(self._parts, placements, strict=True):
            for index, layer in enumerate(part.layers):
                if layer is not None:
                    hot[index] = placement.hot[index]
        return replace(placements[0], hot=tuple(hot))


LocalStore = ExpertStore | JoinedStore  # of stages in this process


class JoinedMeter:
    """Reads what the cold experts of several stages cost."""

    def __init__(self, parts: Sequence[Meter]) -> None:
        self._parts = tuple(parts)

    def read(self) -> ColdReading:
        """Return the totals of all stages."""
        return join_readings([part.read() for part in self._parts])


def join_routing(parts: Sequence[ModelRouting]) -> ModelRouting | None:
    """Return the counts of all stages that have experts; None if no stage has any."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return JoinedRouting(parts)


def join_stores(parts: Sequence[ExpertStore]) -> LocalStore | None:
    """Return the stores of all stages with cold experts; None if no stage has any."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return JoinedStore(parts)


def join_meters(parts: Sequence[Meter]) -> Meter | None:
    """Return a meter of all stages with cold experts; None if no stage has any."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return JoinedMeter(parts)


def join_readings(parts: Sequence[ColdReading]) -> ColdReading:
    """Return what cold experts cost in several stages together."""
    caches = [part.cache for part in parts if part.cache is not None]
    paces = [part.paces for part in parts if part.paces is not None]
    policies = [part.policy for part in parts if part.policy is not None]
    return ColdReading(
        figures=_sum_figures([part.figures for part in parts]),
        pick_bytes=_by_layer([part.pick_bytes for part in parts]),
        cache=_sum_caches(caches) if caches else None,
        cache_bytes=_by_layer([part.cache_bytes for part in parts]),
        paces=_mean_paces(paces) if paces else None,
        policy=_join_policies(policies) if policies else None,
    )


def _by_layer(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sum of numbers by layer, which are zero for the layers of other stages."""
    return tuple(map(sum, zip(*(row for row in rows if row), strict=True)))


def _sum_figures(figures: Sequence[ColdFigures]) -> ColdFigures:
    read_bytes: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for one in figures:
        for path, size in one.read_bytes.items():
            read_bytes[path] += size
        for what, taken_s in one.seconds.items():
            seconds[what] = seconds.get(what, 0.0) + taken_s
    return ColdFigures(
        dict(read_bytes),
        seconds,
        linked=sum(one.linked for one in figures),
        by_cpu=sum(one.by_cpu for one in figures),
    )


def _sum_caches(caches: Sequence[CacheTotals]) -> CacheTotals:
    def sums(of: Callable[[CacheTotals], tuple[int, ...]]) -> tuple[int, ...]:
        return _by_layer([of(cache) for cache in caches])

    def together(causes: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
        return {name: sum(one[name] for one in causes) for name in causes[0]}

    return CacheTotals(
        used=tuple(map(any, zip(*(cache.used for cache in caches), strict=True))),
        hits=sums(lambda cache: cache.hits),
        causes=tuple(map(together, zip(*(cache.causes for cache in caches), strict=True))),
        linked=sums(lambda cache: cache.linked),
        filled=sums(lambda cache: cache.filled),
    )


def _join_policies(states: Sequence[PolicyState]) -> PolicyState:
    """Return the policies of all stages, each named once, and the mean of their hit rates."""
    compared = [state.hit_rates for state in states if state.hit_rates]
    rates = {
        policy: sum(rates[policy] for rates in compared) / len(compared)
        for policy in (compared[0] if compared else ())
    }
    return PolicyState(", ".join(dict.fromkeys(state.policy for state in states)), rates)


def _mean_paces(paces: Sequence[ColdPaces]) -> ColdPaces:
    count = len(paces)
    return ColdPaces(
        cpu_share=sum(x.cpu_share for x in paces) / count,
        cpu=sum(x.cpu for x in paces) / count,
        cpu_prompts=sum(x.cpu_prompts for x in paces) / count,
        link=sum(x.link for x in paces) / count,
    )
