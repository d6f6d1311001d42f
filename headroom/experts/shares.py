"""ShareKeeper: between steps, tables on the GPU follow how fast the CPU computes cold experts.

A captured step reads from a table of its layer how many of its cold experts the GPU reads over the
link; the CPU computes the others. Every READ_EVERY_S the keeper copies the GPU's counters to host
memory, hands them to the controller when they have arrived, and copies changed tables to the GPU.
The host waits for neither copy. Both run in the order of steps, so that no step sees a part of one.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headroom.experts.controller import GroupShape, GroupTotals, ShareController
from headroom.experts.copies import Mark, pinned_empty
from headroom.experts.decode import DecodeWorker
from headroom.experts.layer_store import LayerStore, copy_bytes
from headroom.experts.store import ExpertStore
from headroom.kernels.cuda.handover import COUNTS, MOST_ROWS
from headroom.kernels.native.cold import LayerCounts
from headroom.plan.cost_model import ColdSpeeds, decode_speeds

log = logging.getLogger(__name__)

READ_EVERY_S = 0.05
# A change of the CPU's share by so much is logged, at most once in this time.
LOGGED_CHANGE, LOGGED_EVERY_S = 0.15, 10.0


def most_misses(experts: int, used: int) -> int:
    """Return the most distinct cold experts that a decode step can choose in a layer."""
    return min(experts, MOST_ROWS * used)


@dataclass(frozen=True, slots=True)
class CpuShare:
    """How cold experts of decode steps are shared now."""

    share: float  # of cold experts that the CPU is expected to compute, 0 to 1
    pace: float  # the CPU's speed as a share of its speed when it was calibrated


class LinkTables:
    """The tables of some layers with equal tables, in one tensor on the GPU.

    A layer's table is int32 `[most + 1]`: of n cold experts of a step, how many cross the link.
    """

    def __init__(self, layers: int, first: Sequence[int], device: torch.device) -> None:
        self._tables = torch.tensor([first] * layers, dtype=torch.int32, device=device)
        self._host = pinned_empty((layers, len(first)), torch.int32)
        self._read: Mark | None = None  # when the GPU has read `_host`

    def of_layer(self, layer: int) -> torch.Tensor:
        """Return a layer's table, which later changes are written to."""
        return self._tables[layer]

    def write(self, tables: Sequence[Sequence[int]], mark: Callable[[], Mark]) -> bool:
        """Change the tables of all layers for steps that are launched from now on.

        Return False, and change nothing, while the GPU still reads an earlier change.
        """
        if self._read is not None and not self._read.query():
            return False
        self._host.copy_(torch.tensor(tables, dtype=torch.int32))
        copy_bytes(self._tables, self._host)
        self._read = mark()
        return True


@dataclass(slots=True, eq=False)
class _Group:
    """Layers of the step that have one table, and what was written of it."""

    layers: list[int]  # among those that ask the CPU, in the order of a step
    tables: LinkTables
    probes: int = 0  # made so far; each is made by the next layer
    written: tuple[tuple[int, ...], bool] | None = None  # the table, and whether a layer probes


class ShareTables:
    """The tables of all layers of one GPU that ask the CPU."""

    def __init__(self, store: ExpertStore, speeds: ColdSpeeds, cold: str) -> None:
        asking = [
            layer
            for layer in store.layers
            if layer is not None and layer.path == "cpu" and layer.blobs.tiles
        ]
        usable = decode_speeds(speeds, cold, store.pinned)
        follows = cold == "auto" and bool(usable.cpu and usable.link)
        by_shape: dict[tuple[int, int, int, bool], list[int]] = {}
        for index, layer in enumerate(asking):
            by_shape.setdefault(_size_of(layer), []).append(index)
        hit_rates = [
            store.placement.hit_rate(store.layers.index(layer), layer.experts) for layer in asking
        ]
        shapes = [
            GroupShape(
                expert_bytes,
                used,
                most,
                hit_rate=sum(hit_rates[index] for index in layers) / len(layers),
                fills=fills,
            )
            for (expert_bytes, used, most, fills), layers in by_shape.items()
        ]
        self.controller = ShareController(shapes, usable) if follows and shapes else None
        self.groups: list[_Group] = []
        self._by_layer: dict[LayerStore, torch.Tensor] = {}
        for number, (shape, layers) in enumerate(zip(shapes, by_shape.values(), strict=True)):
            # A fixed way gives the CPU all of them.
            first = (0,) * (shape.most + 1)
            if self.controller is not None:
                first = self.controller.groups[number].table
            tables = LinkTables(len(layers), first, asking[layers[0]].is_hot.device)
            self.groups.append(_Group(layers, tables, written=(first, False)))
            for row, index in enumerate(layers):
                self._by_layer[asking[index]] = tables.of_layer(row)

    def of_layer(self, layer: LayerStore) -> torch.Tensor:
        """Return the table of a layer that asks the CPU."""
        return self._by_layer[layer]


def _size_of(layer: LayerStore) -> tuple[int, int, int, bool]:
    used = layer.blobs.used
    return layer.expert_bytes, used, most_misses(layer.experts, used), layer.is_cached


class ShareKeeper:
    """Keeps the tables of one GPU's layers in step with the speed of its CPU.

    Only the engine's thread calls `follow`, between steps. `now` may be read by any thread.
    """

    def __init__(
        self,
        worker: DecodeWorker,
        tables: ShareTables,
        mark: Callable[[], Mark],  # of all that was enqueued on the GPU so far
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert tables.controller is not None
        self._worker, self._groups, self._mark, self._clock = worker, tables.groups, mark, clock
        self._controller = tables.controller
        self._counts = worker.box.counts
        self._host = pinned_empty(tuple(self._counts.shape), torch.int64)
        self._arrived: Mark | None = None  # of a reading that is under way
        self._read_at_s = self._logged_at_s = float("-inf")
        self._steps, self._done = 0, worker.steps
        self.now = self._state()
        self._logged = self.now.share

    def follow(self) -> None:
        """Take a reading that has arrived, or begin one that is due; waits for nothing."""
        now_s = self._clock()
        if self._arrived is None:
            if now_s - self._read_at_s >= READ_EVERY_S:
                copy_bytes(self._host, self._counts)
                self._arrived, self._read_at_s = self._mark(), now_s
            return
        if not self._arrived.query():
            return
        self._arrived = None
        by_gpu, by_cpu = self._host.tolist(), self._worker.layer_counts()
        done = self._worker.steps
        self._steps, self._done = self._steps + (done - self._done) % (1 << 32), done
        self._controller.update(
            self._read_at_s,
            [_totals(self._steps, group.layers, by_gpu, by_cpu) for group in self._groups],
        )
        self._write()
        self.now = self._state()
        self._log(now_s)

    def _write(self) -> None:
        """Write the tables that differ from what the GPU has."""
        for group, control in zip(self._groups, self._controller.groups, strict=True):
            wanted = control.table, control.probing
            if wanted == group.written:
                continue
            rows = [control.table] * len(group.layers)
            if control.probing:
                rows[group.probes % len(rows)] = control.probe_table
            if group.tables.write(rows, self._mark):
                group.probes += control.probing
                group.written = wanted

    def _state(self) -> CpuShare:
        control = self._controller
        return CpuShare(control.share, control.pace)

    def _log(self, now_s: float) -> None:
        share = self.now.share
        if abs(share - self._logged) < LOGGED_CHANGE or now_s - self._logged_at_s < LOGGED_EVERY_S:
            return
        log.info(
            "experts: the CPU computes %.0f %% of the cold experts of decode steps now, %.0f %% "
            "before; it reaches %.0f %% of its calibrated speed",
            100 * share,
            100 * self._logged,
            100 * self.now.pace,
        )
        self._logged, self._logged_at_s = share, now_s


def _totals(
    steps: int,
    layers: Sequence[int],
    by_gpu: Sequence[Sequence[int]],
    by_cpu: Sequence[LayerCounts],
) -> GroupTotals:
    """Return what the layers of a group have counted together."""

    def total(name: str) -> int:
        column = COUNTS.index(name)
        return sum(by_gpu[layer][column] for layer in layers)

    return GroupTotals(
        steps=steps * len(layers),
        requests=sum(by_cpu[layer].requests for layer in layers),
        cpu_experts=sum(by_cpu[layer].experts for layer in layers),
        cpu_s=sum(by_cpu[layer].busy_ns for layer in layers) / 1e9,
        gpu_s=total("hot_ns") / 1e9,
        gpu_experts=total("gpu_picks"),
        lates=total("lates"),
        late_s=total("late_ns") / 1e9,
    )
