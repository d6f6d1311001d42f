"""ExpertSteps: how a GPU's steps run on the experts of a layer, wherever those are."""

from typing import Protocol

import torch

from headroom.experts.decode import ColdCompute, ColdPart
from headroom.experts.prefill import StreamedLayer, open_stream
from headroom.experts.store import ExpertStore, LayerStore, fill_tiles
from headroom.experts.telemetry import JoinedMeter
from headroom.families.config import ExpertsConfig
from headroom.kernels.cuda import experts as cuda_experts
from headroom.kernels.cuda import experts_prefill, handover
from headroom.kernels.cuda.experts import ExpertTiles, Others
from headroom.kernels.cuda.experts_scratch import CHOSEN_ROWS
from headroom.kernels.cuda.matmul import HalfRows, NarrowRows
from headroom.kernels.cuda.route import Unchosen
from headroom.layers.weights import WeightSource
from headroom.plan.cost_model import ColdSpeeds, prefill_speeds

Picks = tuple[torch.Tensor, torch.Tensor]  # ids and weights [rows, used]


class ExpertSteps(Protocol):
    """Runs a layer's experts; picks with a negative id are passed over.

    `out` may be the residual of `others`.
    """

    def few_rows(
        self, x: HalfRows, picks: Picks | Unchosen, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts and others, inside a captured step."""
        ...

    def many_rows(
        self, x: NarrowRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same for more rows; never captured."""
        ...


class ReadInPlace:
    """The GPU reads experts where they lie, in its own memory or over its link."""

    def __init__(self, tiles: ExpertTiles, activation: str) -> None:
        self._tiles, self._activation = tiles, activation

    def few_rows(
        self, x: HalfRows, picks: Picks | Unchosen, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts and others."""
        tiles, activation = self._tiles, self._activation
        if isinstance(picks, Unchosen):
            if x.rows <= CHOSEN_ROWS:
                return cuda_experts.choose_few_rows(x, picks, tiles, activation, others, out)
            picks = picks.made()
        ids, weights = picks
        return cuda_experts.few_rows(x, ids, weights, tiles, activation, others, out)

    def many_rows(
        self, x: NarrowRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same; each expert that was chosen is read once."""
        return experts_prefill.many_rows(x, *picks, self._tiles, self._activation, others, out)


class Streamed(ReadInPlace):
    """The same, but that many rows get cold experts through buffers on the GPU."""

    def __init__(self, tiles: ExpertTiles, activation: str, stream: StreamedLayer) -> None:
        super().__init__(tiles, activation)
        self._stream = stream

    def many_rows(
        self, x: NarrowRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same; each cold expert is copied at most once."""
        return self._stream.many_rows(x, picks, others, out)


class WithoutCold(ReadInPlace):
    """Only hot experts run, which changes what a model says."""

    def __init__(self, tiles: ExpertTiles, activation: str, is_hot: torch.Tensor) -> None:
        super().__init__(tiles, activation)
        self._is_hot = is_hot

    def few_rows(
        self, x: HalfRows, picks: Picks | Unchosen, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of each row's hot experts, whose weights grow, and others."""
        made = picks.made() if isinstance(picks, Unchosen) else picks
        handover.drop(*made, self._is_hot)
        return super().few_rows(x, made, others, out)

    def many_rows(
        self, x: NarrowRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same."""
        handover.drop(*picks, self._is_hot)
        return super().many_rows(x, picks, others, out)


def stored_tiles(store: LayerStore) -> ExpertTiles:
    """Return the experts of a store as kernels find them; exchanges change what they find."""
    memory = tuple(piece for piece in (store.slots, store.cold) if len(piece))
    nbytes = sum(piece.nbytes for piece in memory)
    return ExpertTiles(store.addresses, store.kinds, store.width, store.hidden, nbytes, memory)


class Hybrid:
    """One CPU worker and one stream of copies for all layers; they are added in a step's order."""

    def __init__(self, store: ExpertStore, device: str, speeds: ColdSpeeds, cold: str) -> None:
        self.store = store
        self._compute = ColdCompute(device)
        # Who asks for the GPU, or leaves cold experts out, wants nothing of the CPU.
        speeds = prefill_speeds(speeds, cold)
        # Layers without fused kernels bring experts one by one; what is left out does not come.
        self._stream = None
        tiles = any(layer is not None and layer.blobs.tiles for layer in store.layers)
        if tiles and cold != "drop":
            most = store.largest, store.most_experts
            self._stream = open_stream(store.staging, most, store.pinned, speeds)

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
        return on_gpu and (self._stream is None or not self._stream.speeds.cpu_takes_prefill)

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
        asks_cpu = by_plain or (stream is not None and stream.speeds.cpu_takes_prefill)
        waits = None if stream is None else stream.waits
        copies_s = None if waits is None else waits.seconds
        return JoinedMeter(worker, brought, by_cpu if asks_cpu else None, in_place, copies_s)
