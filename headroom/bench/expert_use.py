"""What a model's routed experts did while a figure was measured, and where they were."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headroom.llm import OpenedModel
from headroom.split.upkeep import ExpertTelemetry, ExpertUpkeep


@dataclass(frozen=True, slots=True)
class ExpertLocations:
    """Which experts are hot, and who computes the cold ones; one entry for each layer."""

    experts: tuple[int, ...]  # number of experts; 0: a dense layer
    hot: tuple[int, ...]  # number of experts in the device's memory
    expert_bytes: tuple[int, ...]  # bytes of one expert
    paths: tuple[str, ...]  # of cold experts in decode: "gpu", "cpu" or "drop"; "": none is cold
    source: str = ""  # where the placement came from; "": no expert is cold
    pinned: bool = False  # whether the host memory of cold experts is pinned

    @property
    def cold(self) -> int:
        """The number of cold experts in all layers."""
        return sum(self.experts) - sum(self.hot)

    @property
    def cold_bytes(self) -> int:
        """The bytes of all cold experts."""
        rows = zip(self.experts, self.hot, self.expert_bytes, strict=True)
        return sum((all_of - hot) * size for all_of, hot, size in rows)

    @property
    def layers_by_path(self) -> dict[str, int]:
        """The number of layers on each decode path."""
        return {path: self.paths.count(path) for path in sorted(set(self.paths) - {""})}


def find_locations(opened: OpenedModel) -> ExpertLocations | None:
    """Return where a loaded model's experts are; None if it has no experts."""
    layers = opened.shape.layers
    experts = tuple(layer.experts for layer in layers)
    if not any(experts):
        return None
    sizes = tuple(layer.expert_bytes if layer.experts else 0 for layer in layers)
    store = opened.pipeline.store
    if store is None:
        return ExpertLocations(experts, experts, sizes, ("",) * len(layers))
    return ExpertLocations(
        experts,
        tuple(len(ids) for ids in store.current_placement().hot),
        tuple(
            size if layer is None else layer.expert_bytes
            for size, layer in zip(sizes, store.layers, strict=True)
        ),
        tuple("" if layer is None else layer.path for layer in store.layers),
        store.source,
        store.pinned,
    )


@dataclass(frozen=True, slots=True)
class TelemetryReading:
    """All expert counters at one moment; reading them waits for running steps, which takes time."""

    began: float  # when the reading began, in seconds of time.perf_counter
    ended: float  # when it ended
    totals: ExpertTelemetry


def read_experts(upkeep: ExpertUpkeep) -> TelemetryReading:
    """Read the counters; only the engine's thread may do so while requests run."""
    began = time.perf_counter()
    totals = upkeep.read()
    return TelemetryReading(began, time.perf_counter(), totals)


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """What experts did in a span of time."""

    change: ExpertTelemetry  # of the counters
    seconds: float
    read_bytes: Mapping[str, int]  # bytes of cold experts, by path: "gpu", "cpu", "stream"

    @property
    def tokens(self) -> int:
        """Rows that went through the routers, at least 1."""
        return max(1, self.change.tokens)

    def summary(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return {
            "hit_rate": self.change.hit_rate,
            "tokens": self.change.tokens,
            "seconds": self.seconds,
            "cold_picks_per_token": self.change.cold_picks / self.tokens,
            "cold_bytes_per_token": {x: n / self.tokens for x, n in self.read_bytes.items()},
            "cold_bytes_per_s": {x: n / self.seconds for x, n in self.read_bytes.items()},
            "ms_per_token": {x: 1e3 * s / self.tokens for x, s in self.change.seconds.items()},
        }


def use_between(
    before: TelemetryReading, after: TelemetryReading, seconds: float | None = None
) -> ExpertUse:
    """Return what experts did between two readings; `seconds` replaces the time between them."""
    change = after.totals.since(before.totals)
    taken = after.began - before.ended if seconds is None else seconds
    read = {path: size for path, size in change.cold_bytes.items() if size}
    return ExpertUse(change, max(1e-9, taken), read)


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """The experts of a whole run, and the bandwidth of the paths to the cold ones."""

    locations: ExpertLocations
    totals: ExpertTelemetry  # of all prompts and answers
    # Bytes per second by path: "gpu" kernels read host memory over the link, "cpu" threads read
    # host memory, "stream" copies over the link. Empty if no expert is cold.
    bandwidths: Mapping[str, float]

    def shares(self, use: ExpertUse) -> dict[str, float]:
        """Return the share of each path's bandwidth that was used."""
        return {
            path: size / use.seconds / self.bandwidths[path]
            for path, size in use.read_bytes.items()
            if self.bandwidths.get(path)
        }

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        where = self.locations
        return {
            **self.totals.summary(),
            "hot": sum(where.hot),
            "cold": where.cold,
            "cold_bytes": where.cold_bytes,
            "hot_by_layer": where.hot,
            "paths": where.paths,
            "layers_by_path": where.layers_by_path,
            "placement": where.source,
            "pinned": where.pinned,
            "bandwidths": dict(self.bandwidths),
        }

    def use_json(self, use: ExpertUse | None) -> dict[str, Any] | None:
        """Return the expert use of one figure as JSON."""
        if use is None:
            return None
        return use.summary() | {"bandwidth_share": self.shares(use)}
