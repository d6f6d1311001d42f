"""The prefill path of cold experts: in steps of many rows they are copied to the GPU.

Copies go through two staging buffers while the GPU computes. If a step has few enough rows, it
first waits for its picks: then only picked experts are copied, and the CPU computes those with the
fewest picks. Experts are summed in the same groups whatever is cold, so that copied experts give
the same bits as hot ones; experts that the CPU computes are rounded as its kernels round.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from headroom.experts.cache import RULES
from headroom.experts.copies import (
    BouncedCopies,
    CopyQueue,
    CudaCopies,
    PinnedBuffer,
    StagingRing,
    WaitClock,
    on_device,
    pinned_empty,
    read_back,
)
from headroom.experts.layer_store import NOWHERE, SPARE, LayerStore, Residency
from headroom.experts.prompt_speeds import PromptSpeeds
from headroom.experts.store import runs
from headroom.experts.telemetry import ColdCosts
from headroom.kernels.cuda import expert_cache, experts_prefill, scratch
from headroom.kernels.cuda.buffers import ALIGNMENT, Buffer
from headroom.kernels.cuda.expert_cache import COUNTERS
from headroom.kernels.cuda.experts import NO_ADDENDS, Addends, ExpertTiles
from headroom.kernels.cuda.experts_prefill import (
    ChosenRows,
    ExpertGroup,
    SomeExperts,
    group_bounds,
    unpack_some,
)
from headroom.kernels.cuda.matmul import NarrowRows, as_narrow
from headroom.kernels.native.experts import PanelTable, experts_into, scratch_bytes
from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import Picks
from headroom.plan.cost_model import (
    ColdLayer,
    ColdSpeeds,
    ExpertSize,
    expert_operations,
    left_to_cpu,
    most_counted_rows,
    prefill_cpu_seconds,
)
from headroom.plan.experts import STREAM_BUFFERS, buffer_bytes

# If a speed changes by this factor, a layer asks anew which steps should wait for their picks: that
# takes the host about a millisecond.
CHANGED_SPEED = 1.25


@dataclass(frozen=True, slots=True, eq=False)
class CpuLayer:
    """The table of one layer's experts in host memory, for the CPU's kernels."""

    table: PanelTable
    activation: str


class PrefillCpu:
    """Computes cold experts of prefill steps on the CPU, in a separate thread.

    Layers use it one after another. All layers share the memory of its answers: before a caller
    asks again, it must wait for the device to have read the last answers. Nothing here runs on
    torch's threads: they spin for a while after every operation, on the cores that the threads of
    the C++ kernels need.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "cold-prompts")  # starts with the first request
        self._answers = PinnedBuffer()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def ask(
        self,
        x: torch.Tensor,  # float32 [rows, hidden]
        picks: Picks,
        experts: CpuLayer,
    ) -> Future[tuple[torch.Tensor, float]]:
        """Start to compute the weighted sums of rows; the result has them and the seconds taken."""
        # After the main thread has ended, an executor refuses work, although requests may still
        # run.
        if not threading.main_thread().is_alive():
            done: Future[tuple[torch.Tensor, float]] = Future()
            done.set_result(self._compute(x, picks, experts))
            return done
        return self._thread.submit(self._compute, x, picks, experts)

    def _compute(
        self, x: torch.Tensor, picks: Picks, experts: CpuLayer
    ) -> tuple[torch.Tensor, float]:
        began = time.perf_counter()
        needed = scratch_bytes(picks.ids, experts.table)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        (out,) = self._answers.views_like([x])
        experts_into(out, x, picks, experts.table, experts.activation, "int24", self._scratch)
        return out, time.perf_counter() - began


@dataclass(frozen=True, slots=True, eq=False)
class BufferLoad:
    """Cold experts that are copied to one staging buffer."""

    which: torch.Tensor  # int32 on the GPU: their numbers, counted from the group's first expert
    sources: tuple[torch.Tensor, ...]  # runs of neighbours in cold memory


@dataclass(frozen=True, slots=True, eq=False)
class GroupExperts:
    """The experts of one group, which kernels unpack and multiply at once."""

    hot: torch.Tensor  # int32 on the GPU: numbers of hot ones, counted from the group's first
    loads: tuple[BufferLoad, ...]  # the cold ones


@dataclass(frozen=True, slots=True, eq=False)
class _Locations:
    """Where a layer's experts lie; valid until an exchange moves one."""

    residency: Residency  # for which the rest was found
    hot: list[bool]  # by expert
    rows: dict[int, int]  # of cold memory, by cold expert


@dataclass(frozen=True, slots=True, eq=False)
class _StreamPlan:
    """How all cold experts of a layer are streamed."""

    locations: _Locations
    bounds: list[tuple[int, int]]
    groups: list[GroupExperts]


class LayerLoads:
    """Cuts the cold experts of one layer into loads of the staging buffers."""

    def __init__(self, tiles: ExpertTiles, store: LayerStore, most: int) -> None:
        self._tiles, self._store = tiles, store
        self._most = most  # experts that a buffer holds
        self._locations: _Locations | None = None
        self._all: _StreamPlan | None = None

    def all_groups(self) -> list[GroupExperts]:
        """Return the groups that stream all cold experts."""
        locations, bounds, plan = self._find_locations(), group_bounds(self._tiles), self._all
        if plan is None or plan.locations is not locations or plan.bounds != bounds:
            plan = _StreamPlan(locations, bounds, self._groups(locations.rows, bounds))
            self._all = plan
        return plan.groups

    def some_groups(self, cold: Mapping[int, int]) -> list[GroupExperts]:
        """Return the groups that stream some cold experts, given with their cold-memory rows."""
        return self._groups(cold, group_bounds(self._tiles))

    def rows(self) -> Mapping[int, int]:
        """Return each cold expert's row of cold memory; SPARE after a failed exchange."""
        return self._find_locations().rows

    def _find_locations(self) -> _Locations:
        """Return where experts lie now; found anew after an expert has moved."""
        now = self._store.residency
        if self._locations is None or self._locations.residency is not now:
            hot, rows = now.is_hot.tolist(), now.row.tolist()
            cold = {
                expert: row for expert, row in enumerate(rows) if not hot[expert] and row != NOWHERE
            }
            self._locations = _Locations(now, hot, cold)
        return self._locations

    def _groups(
        self, cold: Mapping[int, int], bounds: Sequence[tuple[int, int]]
    ) -> list[GroupExperts]:
        """Return groups with all hot experts and the given cold ones."""
        is_hot = self._find_locations().hot
        by_row = {row: expert for expert, row in cold.items()}
        lists: list[list[int]] = []  # of experts; one copy brings all lists to the GPU
        rows: list[list[list[int]]] = []  # of cold memory, by group and load
        for first, count in bounds:
            lists.append([expert for expert in range(count) if is_hot[first + expert]])
            group = [cold[expert] for expert in range(first, first + count) if expert in cold]
            rows.append(cut_loads(group, self._most))
            lists += [[by_row[row] - first for row in part] for part in rows[-1]]
        on_gpu = iter(self._on_gpu(lists))
        groups = []
        for parts in rows:
            hot = next(on_gpu)
            loads = tuple(BufferLoad(next(on_gpu), self._sources(part, by_row)) for part in parts)
            groups.append(GroupExperts(hot, loads))
        return groups

    def _sources(self, rows: Sequence[int], by_row: Mapping[int, int]) -> tuple[torch.Tensor, ...]:
        sources = []
        for first, end in runs(rows):
            blobs = self._store.cold[first:end]
            if first == SPARE:
                found = self._store.cold_of(by_row[SPARE])
                assert found is not None
                blobs = found
            sources.append(blobs)
        return tuple(sources)

    def _on_gpu(self, lists: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
        flat = torch.tensor([number for numbers in lists for number in numbers], dtype=torch.int32)
        moved = on_device(flat, self._tiles.addresses.device)
        return torch.split(moved, [len(numbers) for numbers in lists])


def loads_of(groups: Sequence[GroupExperts]) -> list[BufferLoad]:
    """Return the loads of all groups in the order of their use."""
    return [load for group in groups for load in group.loads]


class ColdStream:
    """Copies a GPU's cold experts through its staging buffers; layers use it one after another."""

    def __init__(
        self,
        staging: torch.Tensor,  # uint8 on the GPU
        expert_bytes: int,  # of the largest expert of any layer
        experts: int,  # the most of any layer
        queue: CopyQueue,
        speeds: PromptSpeeds,
    ) -> None:
        planned = buffer_bytes(expert_bytes, experts)
        size = min(planned, len(staging) // STREAM_BUFFERS // ALIGNMENT * ALIGNMENT)
        assert size >= expert_bytes
        self.buffer_bytes = size
        self.downs = staging[STREAM_BUFFERS * size :]
        self.speeds = speeds
        self.layers: list[StreamedLayer] = []  # in the order of the model
        self.counts = ColdCosts()
        # Times how long the computing waits for copies; None without a GPU.
        self.waits = WaitClock(staging.device) if staging.is_cuda else None
        self.cpu, self.read_room = PrefillCpu(), PinnedBuffer()
        buffers = staging[: STREAM_BUFFERS * size].view(STREAM_BUFFERS, -1)
        self._ring = StagingRing(queue, buffers.unbind())
        self._coming: deque[BufferLoad] = deque()  # not yet unpacked, in the order of their use
        self._sent = 0  # how many of them are in buffers or being copied
        self._rooms: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}  # of downs
        # int64 on the GPU: rows of a step whose picks fill slots, as the next tokens are likely to
        # pick the same experts; None: no prompt ends in this step.
        self.ends: torch.Tensor | None = None
        self.uncounted = torch.zeros(len(COUNTERS), dtype=torch.int64, device=staging.device)

    def add(
        self, tiles: ExpertTiles, store: LayerStore, activation: str, cold_picks: float
    ) -> "StreamedLayer":
        """Add the next layer of a step; its first copies begin while the layer before computes.

        `cold_picks` is the expected number of cold picks of a row.
        """
        layer = StreamedLayer(self, tiles, store, activation, cold_picks)
        if self.layers:
            self.layers[-1].following = layer
        self.layers.append(layer)
        return layer

    def begin(self, loads: Sequence[BufferLoad], ahead: Sequence[BufferLoad]) -> None:
        """Start the copies of a layer's loads, unless they run, then those of the next layer."""
        known = len(self._coming) == len(loads) and all(
            a is b for a, b in zip(self._coming, loads, strict=True)
        )
        if not known:
            self._ring.forget()
            self._coming, self._sent = deque(loads), 0
        self._coming.extend(ahead)
        self._send()

    def unpack(
        self,
        load: BufferLoad,
        tiles: ExpertTiles,
        group: ExpertGroup,
        rooms: Sequence[torch.Tensor],
    ) -> None:
        """Unpack the load that comes next, and start the copy of a later one to its buffer."""
        assert self._coming[0] is load
        gates_and_ups, downs = rooms
        first = self._ring.first
        some = SomeExperts(load.which, first() if self.waits is None else self.waits.timed(first))
        unpack_some(tiles, some, group, gates_and_ups, downs)
        self._ring.release()
        self._coming.popleft()
        self._sent -= 1
        self._send()

    def room_for_downs(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a group's unpacked downs; groups use it one after another."""
        if (found := self._rooms.get((shape, dtype))) is not None:
            return found
        room = self.downs.view(dtype)[: prod(shape)]
        if len(room) < prod(shape):  # more than planned, which the scratch reports
            return scratch.take(Buffer(shape, scratch.name_of(dtype)), room.device)
        self._rooms[shape, dtype] = room.view(shape)
        return self._rooms[shape, dtype]

    def _send(self) -> None:
        while self._ring.has_room and self._sent < len(self._coming):
            load = self._coming[self._sent]
            self._ring.send(load.sources)
            self._sent += 1
            self.counts.streamed_bytes += sum(source.numel() for source in load.sources)


class StreamedLayer:
    """One layer's experts, some or all of them cold, in prefill steps."""

    def __init__(
        self,
        stream: ColdStream,
        tiles: ExpertTiles,
        store: LayerStore,
        activation: str,
        cold_picks: float,  # expected of a row
    ) -> None:
        self.following: StreamedLayer | None = None  # the next layer of a step
        self._size = ExpertSize(store.expert_bytes, expert_operations(tiles.width, tiles.hidden))
        self._stream, self._activation = stream, activation
        self._tiles, self._store = tiles, store
        self._loads = LayerLoads(tiles, store, stream.buffer_bytes // store.expert_bytes)
        # Exchanges keep the number of cold experts and lower the number of cold picks, so this
        # stays an upper bound.
        self._cold = ColdLayer(
            size=self._size,
            experts=len(self._loads.rows()),
            picks=cold_picks,
            ahead_bytes=STREAM_BUFFERS * stream.buffer_bytes,
        )
        self._counted_by = stream.speeds.now  # the speeds that `_counted_rows` was found for
        self._counted_rows = most_counted_rows(self._cold, self._counted_by)
        self._first_counted_rows = self._counted_rows

    @property
    def counted_rows(self) -> int:
        """The most rows of a step that waits for its picks; found anew when speeds have changed."""
        now, then = self._stream.speeds.now, self._counted_by
        if _differ(now.cpu, then.cpu) or _differ(now.copy, then.copy):
            self._counted_rows, self._counted_by = most_counted_rows(self._cold, now), now
        return self._counted_rows

    def many_rows(
        self,
        x: torch.Tensor | NarrowRows,  # [rows, hidden]
        picks: Picks,
        addends: Addends = NO_ADDENDS,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts and addends."""
        rows = as_narrow(x)
        chosen = ChosenRows(rows.values, *picks, rows.powers)
        if self._waits_for_picks(len(picks.ids)):
            out = self._counted(chosen, addends, out)
        else:
            out = self._streamed(chosen, self._loads.all_groups(), addends, out)
        self._fill_slots(picks)
        return out

    def _fill_slots(self, picks: Picks) -> None:
        """Let the picks of the ends of prompts fill slots, if the layer has a cache."""
        if (ends := self._stream.ends) is None:
            return
        table = self._store.lookup
        if table.filling is None:
            return
        last = Picks(picks.ids.index_select(0, ends), picks.weights.index_select(0, ends))
        uncounted = replace(table, counts=self._stream.uncounted, seen=None)
        expert_cache.resolve(last, uncounted, RULES, None, expert_cache.FILLED_AHEAD)
        expert_cache.fill(table.filling)

    def _waits_for_picks(self, rows: int) -> bool:
        """Return whether a step of so many rows waits for its picks before it copies experts."""
        if rows <= self.counted_rows:
            return True
        # At the CPU's starting speed this step would wait; one layer does, to measure whether the
        # CPU has recovered.
        return rows <= self._first_counted_rows and self._stream.speeds.probe_due

    def _streamed(
        self,
        chosen: ChosenRows,
        groups: Sequence[GroupExperts],
        addends: Addends,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        stream, tiles = self._stream, self._tiles
        stream.begin(loads_of(groups), self._ahead(len(chosen.ids)))
        arriving = _Arriving(stream, tiles, groups, chosen.x.dtype)
        return experts_prefill.sum_groups(chosen, tiles, self._activation, arriving, addends, out)

    def _ahead(self, rows: int) -> list[BufferLoad]:
        """Return the loads of the next layer; none if that layer waits for its picks."""
        following = self.following
        if following is None or rows <= following.counted_rows:
            return []
        return loads_of(following._loads.all_groups())

    def _counted(
        self, chosen: ChosenRows, addends: Addends, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Wait for the picks; copy some of the picked experts, and leave others to the CPU."""
        stream, tiles, cold = self._stream, self._tiles, self._loads.rows()
        read = [chosen.ids]
        speeds = stream.speeds.now
        if speeds.cpu_takes_prefill:
            read += [_floats(chosen), chosen.weights]
        ids, *rows = read_back(read, stream.read_room)
        by_expert = count_picks(ids, len(tiles.addresses))
        used = {expert: by_expert[expert] for expert in cold if by_expert[expert]}
        left = left_to_cpu(used, self._size, speeds)
        if not left and used and stream.speeds.probe_due:
            left = frozenset({min(used, key=lambda expert: (used[expert], expert))})
        streamed = {expert: cold[expert] for expert in used if expert not in left}
        if not left:
            return self._streamed(chosen, self._loads.some_groups(streamed), addends, out)
        by_cpu = torch.zeros(len(by_expert), dtype=torch.bool)
        by_cpu[list(left)] = True
        x, weights = rows
        asked = stream.cpu.ask(x, Picks(_only(ids, by_cpu), weights), self._on_cpu())
        # The CPU computes while the GPU's work is launched and runs.
        try:
            groups = self._loads.some_groups(streamed)
            gpus = _without(chosen.ids, on_device(by_cpu, chosen.ids.device))
            kept = ChosenRows(chosen.x, gpus, chosen.weights, chosen.powers)
            out = self._streamed(kept, groups, addends, out)
        finally:  # if the step fails, too: exchanges and the next step change what the CPU reads
            wait([asked])
        answers, took_s = asked.result()
        stream.counts.cpu_bytes += len(left) * self._size.bytes
        stream.counts.cpu_s += took_s
        stream.speeds.cpu_took(
            prefill_cpu_seconds([used[expert] for expert in left], self._size, stream.speeds.start),
            took_s,
        )
        return out.add_(answers.to(out.device, non_blocking=True))

    def _on_cpu(self) -> CpuLayer:
        """Return the table of cold experts for the CPU's kernels."""
        tiles, store = self._tiles, self._store
        width, hidden = tiles.width, tiles.hidden
        shapes = [(width, hidden), (width, hidden), (hidden, width)]
        table = PanelTable(store.host_addresses, tiles.kinds, shapes, store.cold, tiles=True)
        return CpuLayer(table, self._activation)


class _Arriving:
    """Unpacks a group's hot experts from their slots, and its cold ones from the buffers."""

    def __init__(
        self,
        stream: ColdStream,
        tiles: ExpertTiles,
        groups: Sequence[GroupExperts],
        dtype: torch.dtype,  # of unpacked weights
    ) -> None:
        self._stream, self._tiles, self._dtype = stream, tiles, dtype
        self._left = deque(groups)
        self._downs: torch.Tensor | None = None

    def gates_and_ups(self, group: ExpertGroup) -> torch.Tensor:
        """Unpack all experts of a group, and return their gates and ups."""
        tiles, experts = self._tiles, self._left.popleft()
        plain = experts_prefill.empty_gates_and_ups(tiles, group, self._dtype)
        shape = group.size, tiles.hidden, tiles.width
        self._downs = downs = self._stream.room_for_downs(shape, self._dtype)
        if len(experts.hot):
            unpack_some(tiles, SomeExperts(experts.hot), group, plain, downs)
        for load in experts.loads:
            self._stream.unpack(load, tiles, group, (plain, downs))
        return plain

    def downs(self, group: ExpertGroup) -> torch.Tensor:
        """Return the downs of a group, which `gates_and_ups` has unpacked."""
        assert self._downs is not None
        return self._downs


def open_stream(
    staging: torch.Tensor,
    expert_bytes: int,
    experts: int,
    *,
    pinned: bool,
    speeds: ColdSpeeds,
    follows: bool = False,
) -> ColdStream:
    """Return a stream of copies to the GPU that holds the staging buffers.

    `expert_bytes` and `experts` are the largest of any layer; `pinned` is the cold memory. With
    `follows`, what the CPU computes follows the measured speeds of both sides.
    """
    usable = speeds if MODULE is not None else speeds.without_cpu
    now = PromptSpeeds(usable, follows=follows)
    queue: CopyQueue = CudaCopies(staging.device, now.copied if follows else None)
    if not pinned:
        size = buffer_bytes(expert_bytes, experts)
        buffers = [pinned_empty((size,), torch.uint8) for _ in range(STREAM_BUFFERS)]
        queue = BouncedCopies(queue, buffers)
    return ColdStream(staging, expert_bytes, experts, queue, now)


def _differ(now: float, then: float) -> bool:
    """Return whether a speed has changed so much that a rule should be asked again."""
    return max(now, then) > CHANGED_SPEED * min(now, then)


def count_picks(ids: torch.Tensor, experts: int) -> list[int]:
    """Return how often each expert is picked by ids in host memory; ids of padding do not count.

    By numpy: counting on the GPU would take several launches, and torch's threads spin.
    """
    flat = ids.numpy().ravel()
    counts: list[int] = np.bincount(
        flat[(flat >= 0) & (flat < experts)], minlength=experts
    ).tolist()
    return counts


def _floats(chosen: ChosenRows) -> torch.Tensor:
    """Return rows for the CPU: in float32, times their powers if they have powers."""
    x = chosen.x.float()
    return x if chosen.powers is None else x * chosen.powers[:, None]


def _without(ids: torch.Tensor, passed_over: torch.Tensor) -> torch.Tensor:
    """Return ids with -1 for picks of the experts to skip; ids of -1 stay -1."""
    return ids.masked_fill(passed_over[ids.long()], -1)


def _only(ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return ids in host memory with -1 for picks of all experts that are not kept.

    By numpy: torch's threads spin after an operation, on the cores that the CPU's experts need;
    with them, 512 rows took the CPU up to three times as long (16 cores, 2026-11-16).
    """
    found = ids.numpy()
    return torch.from_numpy(np.where(kept.numpy()[found], found, -1))


def cut_loads(rows: Sequence[int], most: int) -> list[list[int]]:
    """Cut rows of cold memory, in ascending order, into loads of at most so many."""
    ordered = sorted(rows)
    return [ordered[first : first + most] for first in range(0, len(ordered), most)]
