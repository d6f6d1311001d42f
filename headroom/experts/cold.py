"""How a GPU's steps run the experts of its layers, wherever the experts are.

`ColdExperts` holds what the layers of one GPU share: the store, the CPU thread of the decode path
and the copies of the prefill path. Each layer gets its `LayerPaths` from there.
"""

from dataclasses import dataclass
from typing import TypeGuard

import torch

from headroom.experts.copies import on_device
from headroom.experts.decode import DecodeResolver, DecodeWorker
from headroom.experts.layer_store import LayerStore
from headroom.experts.policies import PolicyKeeper
from headroom.experts.prefill import StreamedLayer, open_stream
from headroom.experts.shares import ShareKeeper, ShareTables
from headroom.experts.store import ExpertStore, fill_tiles
from headroom.experts.telemetry import CacheTotals, ColdMeter, ColdPaces, PolicyState, cache_totals
from headroom.families.config import ExpertsConfig
from headroom.kernels.cuda import expert_cache, experts_prefill, handover
from headroom.kernels.cuda import experts as cuda_experts
from headroom.kernels.cuda.experts import Addends, ExpertTiles
from headroom.kernels.cuda.experts_scratch import does_top_k, shares_picks
from headroom.kernels.cuda.matmul import HalfRows, NarrowRows
from headroom.kernels.cuda.route import RouterLogits
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.ops import Picks
from headroom.layers.batch import Batch
from headroom.layers.weights import WeightSource
from headroom.plan.cost_model import ColdSpeeds, prefill_speeds

# Last tokens of a prompt whose experts fill slots, because the answer's first tokens are likely to
# pick them again: 16 raise the hit rate of the next 32 tokens by 4 points (replayed, 2026-11).
END_ROWS = 16


class ReadInPlace:
    """Runs a layer's experts: the GPU reads them in place, in its memory or over its link.

    Picks with a negative id are skipped. `out` may be the residual of `addends`.
    """

    def __init__(self, tiles: ExpertTiles, activation: str) -> None:
        self._tiles, self._activation = tiles, activation

    def decode(
        self, x: HalfRows, picks: Picks | RouterLogits, addends: Addends, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of the experts and addends of few rows, in a captured step."""
        tiles, activation = self._tiles, self._activation
        if isinstance(picks, RouterLogits):
            if does_top_k(x.rows) and not shares_picks(x.rows, over_link=tiles.over_link):
                return cuda_experts.choose_few_rows(x, picks, tiles, activation, addends, out)
            picks = picks.top_k()
        ids, weights = picks
        return cuda_experts.few_rows(x, ids, weights, tiles, activation, addends, out)

    def prefill(
        self, x: NarrowRows, picks: Picks, addends: Addends, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of the experts and addends of many rows; never captured.

        Each expert that was picked is read once.
        """
        return experts_prefill.many_rows(x, *picks, self._tiles, self._activation, addends, out)


class Streamed(ReadInPlace):
    """Reads experts in place in decode steps; copies cold ones to the GPU in prefill steps."""

    def __init__(self, tiles: ExpertTiles, activation: str, stream: StreamedLayer) -> None:
        super().__init__(tiles, activation)
        self._stream = stream

    def prefill(
        self, x: NarrowRows, picks: Picks, addends: Addends, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of many rows; each cold expert is copied at most once."""
        return self._stream.many_rows(x, picks, addends, out)


class WithoutCold(ReadInPlace):
    """Runs hot experts only, which changes the model's answers."""

    def __init__(self, tiles: ExpertTiles, activation: str, is_hot: torch.Tensor) -> None:
        super().__init__(tiles, activation)
        self._is_hot = is_hot

    def decode(
        self, x: HalfRows, picks: Picks | RouterLogits, addends: Addends, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of the hot experts of few rows; their weights grow."""
        chosen = picks.top_k() if isinstance(picks, RouterLogits) else picks
        handover.drop(*chosen, self._is_hot)
        return super().decode(x, chosen, addends, out)

    def prefill(
        self, x: NarrowRows, picks: Picks, addends: Addends, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of the hot experts of many rows; their weights grow."""
        handover.drop(*picks, self._is_hot)
        return super().prefill(x, picks, addends, out)


@dataclass(frozen=True, slots=True, eq=False)
class LayerPaths:
    """Who computes the experts of a layer."""

    gpu: ReadInPlace
    # Resolves the picks of decode steps; None if the GPU computes all and no expert moves in steps.
    resolver: DecodeResolver | None = None


def stored_tiles(store: LayerStore) -> ExpertTiles:
    """Return a store's table of experts for kernels; exchanges and caches change its addresses."""
    memory = tuple(part for part in (store.slots, store.cold) if len(part))
    nbytes, filling = sum(part.nbytes for part in memory), store.lookup.filling
    sizes = store.width, store.hidden
    return ExpertTiles(store.addresses, store.kinds, *sizes, nbytes, memory, filling)


class ColdExperts:
    """The experts of one GPU, some of them cold, and what computes the cold ones.

    All layers share one CPU thread and one stream of copies; they are loaded in a step's order.
    """

    def __init__(self, store: ExpertStore, device: str, speeds: ColdSpeeds, cold: str) -> None:
        self.store = store
        self._worker = DecodeWorker(device)
        self._tables = ShareTables(store, speeds, cold)
        self.shares: ShareKeeper | None = None  # if the CPU's share follows its speed
        self.policies: PolicyKeeper | None = None  # if shadows choose how slots change hands
        if store.is_cached and store.chooses_policy:
            self.policies = PolicyKeeper(store, store.first_policy, store.spare.copies.mark)
        # Layers without fused kernels copy experts one by one; dropped experts are never copied.
        self._stream = None
        tiles = any(layer is not None and layer.blobs.tiles for layer in store.layers)
        if tiles and cold != "drop":
            self._stream = open_stream(
                store.staging,
                store.largest,
                store.most_experts,
                pinned=store.pinned,
                speeds=prefill_speeds(speeds, cold),
                follows=cold == "auto",
            )

    def layer(self, index: int) -> "StoredLayer | None":
        """Return a layer of which some experts are cold; None for any other layer."""
        store = self.store.layers[index]
        return None if store is None else StoredLayer(self, store)

    def load(self, layer: LayerStore, config: ExpertsConfig, get: WeightSource) -> LayerPaths:
        """Load a layer's experts to their places; return what computes them."""
        fill_tiles(layer, get, self.store.staging)
        tiles, activation = stored_tiles(layer), config.activation
        if layer.path == "drop":
            return LayerPaths(WithoutCold(tiles, activation, layer.is_hot))
        assert self._stream is not None
        hits = self.store.placement.hit_rate(self.store.layers.index(layer), layer.experts)
        cold_picks = layer.blobs.used * (1.0 - hits)
        stream = self._stream.add(tiles, layer, activation, cold_picks)
        by_gpu = Streamed(tiles, activation, stream)
        if layer.path == "gpu":
            return LayerPaths(by_gpu, DecodeResolver(layer.lookup) if layer.is_cached else None)
        link = self._tables.of_layer(layer)
        by_cpu = self._worker.add(layer, layer.blobs.used, activation, link)
        return LayerPaths(by_gpu, DecodeResolver(layer.lookup, by_cpu))

    def begin_prompt(self, batch: Batch) -> None:
        """Prepare a step of the prefill path."""
        self.store.take_places()  # by which cold experts are copied
        if self._stream is not None and self.store.is_cached:
            ends = torch.tensor(prompt_ends(batch), dtype=torch.int64)
            self._stream.ends = on_device(ends, self.store.staging.device) if len(ends) else None

    def end_step(self, rows: int) -> None:
        """End a step of the decode path; a captured step contains this."""
        if self.policies is not None:
            self.policies.end_step(rows)

    def restart(self) -> None:
        """Begin anew with the placement, after steps that only warmed the GPU up."""
        self.store.restore()
        if self.policies is not None:
            self.policies.restart()

    @property
    def keepers(self) -> tuple[ShareKeeper | PolicyKeeper, ...]:
        """What follows measurements between steps, once all layers are loaded."""
        return tuple(x for x in (self.shares, self.policies) if x is not None)

    def start(self) -> DecodeWorker | None:
        """Start the CPU thread after all layers are loaded; None if no layer asks the CPU."""
        if not self._worker.has_layers:
            return None
        self._worker.start()
        if self._tables.controller is not None:
            mark = self.store.spare.copies.mark
            self.shares = keeper = ShareKeeper(self._worker, self._tables, mark)
            if self._stream is not None:
                self._stream.speeds.decode_pace = lambda: keeper.now.pace
        return self._worker

    @property
    def same_bits(self) -> bool:
        """Whether hot and cold experts give the same bits: only if GPU kernels compute them all."""
        on_gpu = all(layer is None or layer.path == "gpu" for layer in self.store.layers)
        return on_gpu and not self._prefill_asks_cpu

    @property
    def meter(self) -> ColdMeter:
        """The meter that reads the costs of cold experts since the start."""
        layers, stream = [x for x in self.store.layers if x is not None], self._stream
        plain = [layer for layer in layers if not layer.blobs.tiles]
        costs = [layer.counts for layer in plain]
        if stream is not None:
            costs.append(stream.counts)
        plain_asks_cpu = any(layer.path == "cpu" for layer in plain)
        return ColdMeter(
            worker=self._worker.counts if self._worker.has_layers else None,
            costs=tuple(costs),
            cpu_costs=plain_asks_cpu or self._prefill_asks_cpu,
            pick_bytes=tuple(
                x.expert_bytes if _reads_alone(x) and not x.is_cached else 0
                for x in self.store.layers
            ),
            copies_s=None if stream is None or stream.waits is None else stream.waits.seconds,
            cache=self._cache_totals if self.store.is_cached else None,
            cache_bytes=tuple(
                x.expert_bytes if _reads_alone(x) and x.is_cached else 0 for x in self.store.layers
            ),
            paces=self._paces if self.shares is not None else None,
            policy=self._policy if self.store.is_cached else None,
        )

    def _cache_totals(self) -> CacheTotals:
        """Return what the caches of all layers have counted; waits for the GPU."""
        return cache_totals(self.store.cache_counts.cpu(), expert_cache.COUNTERS)

    def _policy(self) -> PolicyState:
        """Return by which policy slots change hands now."""
        if self.policies is not None:
            return self.policies.now
        return PolicyState(self.store.first_policy, {})

    def _paces(self) -> ColdPaces:
        """Return how cold experts are shared now."""
        assert self.shares is not None
        now, prompts = self.shares.now, None if self._stream is None else self._stream.speeds
        return ColdPaces(
            cpu_share=now.share,
            cpu=now.pace,
            cpu_prompts=1.0 if prompts is None else prompts.cpu_pace,
            link=1.0 if prompts is None else prompts.link_pace,
        )

    @property
    def _prefill_asks_cpu(self) -> bool:
        return self._stream is not None and self._stream.speeds.cpu_takes_prefill


def prompt_ends(batch: Batch) -> list[int]:
    """Return the last rows of each sequence that draws a token in this step, ascending.

    There are at most DECODE_ROWS, END_ROWS of a sequence; none if more sequences draw tokens.
    """
    outputs = set(batch.output_rows.tolist())
    ends = [x for x in batch.spans if x.first_row + x.rows - 1 in outputs]
    if not 0 < len(ends) <= DECODE_ROWS:
        return []
    each = min(END_ROWS, DECODE_ROWS // len(ends))
    return [
        row
        for span in ends
        for row in range(span.first_row + max(0, span.rows - each), span.first_row + span.rows)
    ]


def _reads_alone(layer: LayerStore | None) -> TypeGuard[LayerStore]:
    """Return whether the GPU alone computes a layer's cold experts, by fused kernels."""
    return layer is not None and layer.path == "gpu" and layer.blobs.tiles


@dataclass(frozen=True, slots=True, eq=False)
class StoredLayer:
    """A layer of which some experts are cold, before it is loaded."""

    cold_experts: ColdExperts
    store: LayerStore

    def load(self, config: ExpertsConfig, get: WeightSource) -> LayerPaths:
        """Bring the layer's experts to their places; return who computes them."""
        return self.cold_experts.load(self.store, config, get)
