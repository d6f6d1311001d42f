"""Taps on the routers of a model: one records their picks as a trace, one imposes a trace on them.

A tap is given to a model before it is loaded, because captured steps contain it. Without a tap,
routers run exactly as they would without this file.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from headroom.experts.stats import RoutingStats
from headroom.experts.traces.trace import Ids, RoutingTrace, TracedLayer
from headroom.kernels.cuda.sizes import is_decode
from headroom.layers.batch import Batch, GpuBatch
from headroom.plan.shape import ModelShape


@dataclass(frozen=True, slots=True, eq=False)
class TapSite:
    """The stage whose routers are tapped."""

    layers: tuple[TracedLayer, ...]
    routing: RoutingStats  # the counts of the stage
    device: str  # torch's name
    rows: int  # most rows of a step
    sequences: int  # most sequences that run together


class LayerTap(Protocol):
    """What the router of one layer calls with the ids `[rows, used]` that it picked."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the ids that the layer is to use."""


class StageTap(Protocol):
    """A tap on the routers of one stage."""

    # Where routers count their own picks; None: in the stage's counts, as without a tap.
    own_counts: RoutingStats | None

    def of_layer(self, layer: int) -> LayerTap:
        """Return the part for the router of a layer, by its number in the model."""

    def begin_step(self, batch: Batch) -> None:
        """Prepare the rows of a step before its first layer; a captured step contains this."""

    def end_step(self, batch: Batch) -> None:
        """Take what a step left, after it was launched; captures and warm-ups do not call this."""


class RouterTap(Protocol):
    """A tap on all routers of a model."""

    def open(self, site: TapSite) -> StageTap:
        """Return the part for one stage, before its layers are built; the first stage comes first.

        A stage without experts gets none.
        """


def traced_layers(shape: ModelShape) -> tuple[TracedLayer, ...]:
    """Return the layers of a model that a trace has."""
    return tuple(
        TracedLayer(number, layer.experts, layer.experts_used)
        for number, layer in enumerate(shape.layers)
        if layer.experts
    )


class TraceRecorder:
    """Records the picks of all rows that steps compute, sequence by sequence.

    Reading them waits for each step. A sequence that is preempted and computed again is recorded
    again, as another sequence.
    """

    def __init__(self) -> None:
        self._stages: list[StageRecorder] = []

    def open(self, site: TapSite) -> "StageRecorder":
        """Return the recorder of one stage."""
        self._stages.append(StageRecorder(site))
        return self._stages[-1]

    def trace(self, model: str, source: str) -> RoutingTrace | None:
        """Return all that was recorded; None if no step ran. Call this when no step runs."""
        by_stage = [stage.end_all() for stage in self._stages]
        lengths = [sum(map(len, pieces)) for pieces in by_stage[0]] if by_stage else []
        if not lengths:
            return None
        starts = tuple(int(first) for first in np.cumsum([0, *lengths[:-1]]))
        ids = [np.concatenate([x for pieces in ended for x in pieces]) for ended in by_stage]
        layers = tuple(layer for stage in self._stages for layer in stage.layers)
        return RoutingTrace(model, source, layers, np.concatenate(ids, axis=1), starts)


class StageRecorder:
    """Records the picks of one stage's routers."""

    own_counts: RoutingStats | None = None

    def __init__(self, site: TapSite) -> None:
        self.layers = site.layers
        self._columns: dict[int, slice] = {}  # of a layer, by its number, in `_ids`
        width = 0
        for layer in site.layers:
            self._columns[layer.layer] = slice(width, width := width + layer.used)
        # int32 [rows, sum of used], of the step that runs
        self._ids = torch.zeros(site.rows, width, dtype=torch.int32, device=site.device)
        self._ended: list[list[Ids]] = []  # the pieces of each sequence, in the order of their ends
        self._running: dict[int, list[Ids]] = {}  # by state slot

    def of_layer(self, layer: int) -> LayerTap:
        """Return what copies the picks of one layer."""
        own = self._ids[:, self._columns[layer]]

        def record(ids: torch.Tensor) -> torch.Tensor:
            own[: len(ids)].copy_(ids)
            return ids

        return record

    def begin_step(self, batch: Batch) -> None:
        """Do nothing: a step's picks replace those of the step before."""

    def end_step(self, batch: Batch) -> None:
        """Add the picks of a step to the sequences that its rows belong to."""
        ids = self._ids[: len(batch.tokens)].cpu().numpy().astype(np.uint16)
        for span in batch.spans:
            if span.start == 0:  # another sequence had this slot before
                self._end(span.state_slot)
            rows = ids[span.first_row : span.first_row + span.rows]
            self._running.setdefault(span.state_slot, []).append(rows)

    def end_all(self) -> list[list[Ids]]:
        """Return the pieces of all sequences, which end here."""
        for slot in list(self._running):
            self._end(slot)
        return self._ended

    def _end(self, slot: int) -> None:
        if pieces := self._running.pop(slot, None):
            self._ended.append(pieces)


class ImposedTrace:
    """Replaces the picks of routers by those of a trace; the weights stay the router's.

    A row at position p of its sequence gets the picks of token p of the trace. Each of the
    sequences that run together begins at another token, and the trace begins anew after its last.
    `move` lets what follows begin at a later token.
    """

    def __init__(self, trace: RoutingTrace) -> None:
        self._trace = trace
        self._stages: list[ImposedStage] = []

    @property
    def nbytes(self) -> int:
        """The bytes of the devices that the trace takes beside the plan."""
        return sum(stage.nbytes for stage in self._stages)

    def open(self, site: TapSite) -> "ImposedStage":
        """Copy the trace of one stage's layers to its device."""
        self._stages.append(ImposedStage(self._trace, site))
        return self._stages[-1]

    def move(self, tokens: int) -> None:
        """Let position 0 of every sequence stand for a later token of the trace.

        Otherwise each request would choose what the request before it chose, which a cache of
        experts holds. Captured steps read the new value. Call this when no request runs.
        """
        for stage in self._stages:
            stage.move(tokens)


class ImposedStage:
    """Replaces the picks of one stage's routers by those of a trace."""

    def __init__(self, trace: RoutingTrace, site: TapSite) -> None:
        layers, known = site.layers, {layer.layer: at for at, layer in enumerate(trace.layers)}
        rows = [known[layer.layer] for layer in layers]  # of these layers, in the trace
        assert [trace.layers[at] for at in rows] == list(layers)
        self._routing = site.routing
        self.own_counts: RoutingStats | None = site.routing.like()
        self._on_cpu = torch.device(site.device).type == "cpu"
        table = np.full(
            (len(layers), trace.tokens, max(layer.used for layer in layers)), -1, np.int32
        )
        for index, (layer, at) in enumerate(zip(layers, rows, strict=True)):
            table[index, :, : layer.used] = trace.of_layer(at)
        # int32 [layers, tokens, most used]
        self._table = torch.from_numpy(table).to(site.device)
        # By the number of a layer: its index here, and the experts that a token visits.
        self._places = {layer.layer: (at, layer.used) for at, layer in enumerate(layers)}
        self._numbers = torch.tensor(list(self._places)).to(site.device)  # in the model
        # Tokens of the trace between the beginnings of two sequences.
        self._apart = trace.tokens // site.sequences
        # int64: tokens by which all sequences begin later
        self._moved = torch.zeros((), dtype=torch.int64).to(site.device)
        self._ids = torch.empty(0)  # int32 [layers, rows, most used], of the step that runs

    @property
    def nbytes(self) -> int:
        """The bytes of the device that the trace takes."""
        return self._table.nbytes

    def move(self, tokens: int) -> None:
        """Let position 0 of every sequence stand for a later token of the trace."""
        self._moved.add_(tokens)

    def of_layer(self, layer: int) -> LayerTap:
        """Return what hands the trace's picks to one layer."""
        index, used = self._places[layer]

        def impose(ids: torch.Tensor) -> torch.Tensor:
            # A copy only if layers differ in how many experts a token visits.
            return self._ids[index, : len(ids), :used].contiguous()

        return impose

    def begin_step(self, batch: Batch) -> None:
        """Look up the picks of all rows for all layers, and count them."""
        if isinstance(batch, GpuBatch):
            tables = batch.tables[0]
            positions, sequence = tables.positions.long(), tables.sequence.long()
            slots = tables.state_slots.index_select(0, sequence.clamp(min=0)).long()
        else:
            positions = batch.positions
            sequence = slots = torch.tensor(
                [span.state_slot for span in batch.spans for _ in range(span.rows)]
            )
        tokens = (positions + self._apart * slots + self._moved).remainder(self._table.shape[1])
        picks = self._table.index_select(1, tokens)
        self._ids = picks.masked_fill_((sequence < 0)[None, :, None], -1)  # padding
        decode = self._on_cpu or is_decode(len(tokens))
        self._routing.add(self._numbers, self._ids, decode=decode)

    def end_step(self, batch: Batch) -> None:
        """Do nothing."""
