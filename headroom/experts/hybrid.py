"""Hybrid: what the layers of a GPU do together about their cold experts."""

from headroom.experts.cold import ColdCompute, ColdPart
from headroom.experts.expert_steps import (
    ExpertSteps,
    ReadInPlace,
    Streamed,
    WithoutCold,
    stored_tiles,
)
from headroom.experts.load_store import fill_tiles
from headroom.experts.store import ExpertStore, LayerStore
from headroom.experts.stream import open_stream
from headroom.experts.stream_rule import ColdRates
from headroom.experts.telemetry import JoinedMeter
from headroom.families.config import ExpertsConfig
from headroom.layers.weights import WeightSource
from headroom.plan.cold_speeds import ColdSpeeds


class Hybrid:
    """One CPU worker and one stream of copies for all layers; they are added in a step's order."""

    def __init__(self, store: ExpertStore, device: str, speeds: ColdSpeeds, cold: str) -> None:
        self.store = store
        self._compute = ColdCompute(device)
        # Who asks for the GPU, or leaves cold experts out, wants nothing of the CPU.
        rates = ColdRates(speeds.copy, speeds.cpu, speeds.cpu_flops)
        if cold not in ("auto", "cpu"):
            rates = rates.without_cpu
        # Layers without fused kernels bring experts one by one; what is left out does not come.
        self._stream = None
        tiles = any(layer is not None and layer.blobs.tiles for layer in store.layers)
        if tiles and cold != "drop":
            most = store.largest, store.most_experts
            self._stream = open_stream(store.staging, most, store.pinned, rates)

    def load(
        self, layer: LayerStore, config: ExpertsConfig, get: WeightSource
    ) -> tuple[ExpertSteps, ColdPart | None]:
        """Bring a layer's experts to their places; return how its steps run on them."""
        fill_tiles(layer, get, self.store.staging)
        tiles, activation = stored_tiles(layer), config.activation
        if layer.path == "drop":
            return WithoutCold(tiles, activation, layer.is_hot), None
        assert self._stream is not None
        hits = self.store.placement.hit_rate(self.store.layers.index(layer), layer.experts)
        cold_picks = layer.blobs.used * (1.0 - hits)
        stream = self._stream.add(tiles, layer, activation, cold_picks)
        steps: ReadInPlace = Streamed(tiles, activation, stream)
        if layer.path == "gpu":
            return steps, None
        return steps, self._compute.add(layer, layer.blobs.used, activation, layer.choice)

    def start(self) -> ColdCompute | None:
        """Start the CPU's worker once all layers are there; None where no layer asks it."""
        if not self._compute.asks:
            return None
        self._compute.start()
        return self._compute

    @property
    def same_bits(self) -> bool:
        """Whether hot and cold give the same bits: where a GPU's kernels alone compute them."""
        on_gpu = all(layer is None or layer.path == "gpu" for layer in self.store.layers)
        return on_gpu and (self._stream is None or not self._stream.rates.asks_cpu)

    @property
    def meter(self) -> JoinedMeter:
        """What cold experts have cost so far."""
        worker = self._compute.counts if self._compute.asks else None
        layers, stream = self.store.layers, self._stream
        in_place = tuple(
            x.expert_bytes if x is not None and x.path == "gpu" and x.blobs.tiles else 0
            for x in layers
        )
        counts = [x.counts for x in layers if x is not None and not x.blobs.tiles]
        if stream is not None:
            counts.append(stream.counts)

        def brought() -> int:
            return sum(x.streamed_bytes for x in counts)

        def by_cpu() -> tuple[int, float]:
            return sum(x.cpu_bytes for x in counts), sum(x.cpu_s for x in counts)

        by_plain = any(
            x is not None and not x.blobs.tiles and x.path not in ("gpu", "drop") for x in layers
        )
        asks_cpu = by_plain or (stream is not None and stream.rates.asks_cpu)
        waits = None if stream is None else stream.waits
        copies_s = None if waits is None else waits.seconds
        return JoinedMeter(worker, brought, by_cpu if asks_cpu else None, in_place, copies_s)
