"""ExpertUse: what a model's experts did while a figure was measured, and where they lay."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headroom.bench.opening import Opened
from headroom.split.upkeep import ExpertTelemetry, ExpertUpkeep


@dataclass(frozen=True, slots=True)
class Residency:
    """Where experts are, and who computes the cold ones; one entry for each layer."""

    experts: tuple[int, ...]  # 0: a dense layer
    hot: tuple[int, ...]  # in the device's memory
    expert_bytes: tuple[int, ...]  # of each
    paths: tuple[str, ...]  # "gpu", "cpu" or "drop" in steps of few rows; "": none is cold
    source: str = ""  # of the placement; "" where none is cold
    pinned: bool = False  # the memory of cold experts

    @property
    def cold(self) -> int:
        """Cold experts of all layers."""
        return sum(self.experts) - sum(self.hot)

    @property
    def cold_bytes(self) -> int:
        """Their bytes."""
        rows = zip(self.experts, self.hot, self.expert_bytes, strict=True)
        return sum((all_of - hot) * size for all_of, hot, size in rows)

    @property
    def layers_by_path(self) -> dict[str, int]:
        """How many layers go each way."""
        return {path: self.paths.count(path) for path in sorted(set(self.paths) - {""})}


def find_residency(opened: Opened) -> Residency | None:
    """Return where a loaded model's experts are; None where it has none."""
    layers = opened.shape.layers
    experts = tuple(layer.experts for layer in layers)
    if not any(experts):
        return None
    sizes = tuple(layer.expert_bytes if layer.experts else 0 for layer in layers)
    store = opened.pipeline.store
    if store is None:
        return Residency(experts, experts, sizes, ("",) * len(layers))
    return Residency(
        experts,
        tuple(len(ids) for ids in store.residence().hot),
        tuple(
            size if layer is None else layer.expert_bytes
            for size, layer in zip(sizes, store.layers, strict=True)
        ),
        tuple("" if layer is None else layer.path for layer in store.layers),
        store.source,
        store.pinned,
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """All totals at one moment; reading them takes time, since steps that run are waited for."""

    began: float  # seconds of the process's clock
    ended: float
    totals: ExpertTelemetry


def read_experts(upkeep: ExpertUpkeep) -> Reading:
    """Read now; by the engine's thread, or while no request runs."""
    began = time.perf_counter()
    totals = upkeep.read()
    return Reading(began, time.perf_counter(), totals)


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """What happened to experts in some time."""

    change: ExpertTelemetry
    seconds: float
    read_bytes: Mapping[str, int]  # of cold experts, by path: "gpu", "cpu", "stream"

    @property
    def tokens(self) -> int:
        """Rows that went through the routers."""
        return max(1, self.change.tokens)

    def summary(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "hit_rate": self.change.hit_rate,
            "tokens": self.change.tokens,
            "seconds": self.seconds,
            "cold_picks_per_token": self.change.cold_picks / self.tokens,
            "cold_bytes_per_token": {x: n / self.tokens for x, n in self.read_bytes.items()},
            "cold_bytes_per_s": {x: n / self.seconds for x, n in self.read_bytes.items()},
            "ms_per_token": {x: 1e3 * s / self.tokens for x, s in self.change.seconds.items()},
        }


def use_between(before: Reading, after: Reading, seconds: float | None = None) -> ExpertUse:
    """Return what experts did between two readings; in all of that time where none is given."""
    change = after.totals.since(before.totals)
    taken = after.began - before.ended if seconds is None else seconds
    read = {path: size for path, size in change.cold_bytes.items() if size}
    return ExpertUse(change, max(1e-9, taken), read)


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """Experts over a whole run, and what the ways to the cold ones allow."""

    residency: Residency
    totals: ExpertTelemetry  # of all prompts and answers
    # Bytes per second, by path: kernels that read over the link, a CPU that reads its memory,
    # copies over the link; empty where none is cold.
    bandwidths: Mapping[str, float]

    def shares(self, use: ExpertUse) -> dict[str, float]:
        """Return the share of each path's bandwidth that was used."""
        return {
            path: size / use.seconds / self.bandwidths[path]
            for path, size in use.read_bytes.items()
            if self.bandwidths.get(path)
        }

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        where = self.residency
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
        """Return one figure's use as plain data."""
        if use is None:
            return None
        return use.summary() | {"bandwidth_share": self.shares(use)}
