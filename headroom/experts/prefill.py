"""CpuSide: what a CPU computes of the cold experts of a step of many rows, beside the GPU.

Nothing here runs on torch's own threads: they spin for a while after every operation, on the cores
that the C++ kernels' threads need.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch

from headroom.experts.copies import (
    BouncedCopies,
    CopyQueue,
    CudaCopies,
    KeptHost,
    StagingRing,
    WaitClock,
    on_device,
    pinned_empty,
    read_back,
)
from headroom.experts.store import runs
from headroom.experts.telemetry import ColdCosts
from headroom.kernels.cuda import experts_prefill, scratch
from headroom.kernels.cuda.buffers import ALIGNMENT, Buffer
from headroom.kernels.cuda.experts import NO_OTHERS, ExpertTiles, Others
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
from headroom.plan.cost_model import (
    ColdLayer,
    ColdSpeeds,
    ExpertSize,
    expert_flops,
    left_to_cpu,
    most_counted_rows,
)
from headroom.plan.experts import BUFFERS, buffer_bytes


@dataclass(frozen=True, slots=True, eq=False)
class CpuExperts:
    """One layer's experts in host memory."""

    table: PanelTable
    activation: str


class CpuSide:
    """Computes in a thread of its own; layers use it one after another.

    The memory of its answers serves the next layer, too: who asks again must have waited for the
    device since it was told to read them.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "cold-prompts")  # starts when it is asked
        self._answers = KeptHost()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def ask(
        self,
        x: torch.Tensor,  # float32 [rows, hidden]
        picks: tuple[torch.Tensor, torch.Tensor],  # ids and weights; negative ids: none
        experts: CpuExperts,
    ) -> Future[tuple[torch.Tensor, float]]:
        """Let the sums of rows be computed; they come with the seconds that it took."""
        if not threading.main_thread().is_alive():  # executors take nothing then; others may go on
            done: Future[tuple[torch.Tensor, float]] = Future()
            done.set_result(self._compute(x, picks, experts))
            return done
        return self._thread.submit(self._compute, x, picks, experts)

    def _compute(
        self, x: torch.Tensor, picks: tuple[torch.Tensor, torch.Tensor], experts: CpuExperts
    ) -> tuple[torch.Tensor, float]:
        began = time.perf_counter()
        needed = scratch_bytes(picks[0], experts.table)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        (out,) = self._answers.like([x])
        experts_into(out, x, picks, experts.table, experts.activation, "f32", self._scratch)
        return out, time.perf_counter() - began


# A row of cold memory that is none, and no neighbour of one.
ELSEWHERE = -2


class ColdExperts(Protocol):
    """What is read of a layer's store."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: gate, up and down."""

    @property
    def cold(self) -> torch.Tensor:
        """The cold experts `[cold, expert_bytes]` in host memory."""

    @property
    def host_addresses(self) -> torch.Tensor:
        """Addresses `[experts, 3]` of cold experts; 0 of hot ones."""

    def cold_of(self, expert: int) -> torch.Tensor | None:
        """Return an expert's bytes in host memory; None where it has none."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Cold experts that are copied at once."""

    which: torch.Tensor  # int32, counted from their group's first, on the GPU
    sources: tuple[torch.Tensor, ...]  # runs of cold memory


@dataclass(frozen=True, slots=True, eq=False)
class GroupExperts:
    """The experts of one group."""

    hot: torch.Tensor  # int32, counted from its first, on the GPU
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Where a layer's experts lie, as long as they lie there."""

    lies: torch.Tensor  # the addresses that the rest was found for
    hot: list[bool]  # by expert
    rows: dict[int, int]  # of cold memory, by cold expert


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """How all cold experts of some places are streamed."""

    places: _Places
    bounds: list[tuple[int, int]]
    groups: list[GroupExperts]


class ColdPieces:
    """Cuts the cold experts of one layer into pieces of at most so many."""

    def __init__(self, tiles: ExpertTiles, store: ColdExperts, most: int) -> None:
        self._tiles, self._store, self._most = tiles, store, most
        self._places: _Places | None = None
        self._all: _Plan | None = None

    def all_groups(self) -> list[GroupExperts]:
        """Return how all cold experts are streamed."""
        places, bounds, plan = self._find_places(), group_bounds(self._tiles), self._all
        if plan is None or plan.places is not places or plan.bounds != bounds:
            plan = _Plan(places, bounds, self._groups(places.rows, bounds))
            self._all = plan
        return plan.groups

    def some_groups(self, cold: Mapping[int, int]) -> list[GroupExperts]:
        """Return how some cold experts are streamed, given with their rows of cold memory."""
        return self._groups(cold, group_bounds(self._tiles))

    def rows(self) -> Mapping[int, int]:
        """Where each cold expert lies in cold memory; ELSEWHERE after an exchange that failed."""
        return self._find_places().rows

    def _find_places(self) -> _Places:
        """Where experts lie now; found anew when some of them have moved."""
        lies, store = self._store.host_addresses, self._store
        if self._places is None or not torch.equal(lies, self._places.lies):
            size, first, end = store.expert_bytes, store.cold.data_ptr(), len(store.cold)
            addresses = lies[:, 0].tolist()
            found = {e: (at - first) // size for e, at in enumerate(addresses) if at}
            rows = {e: row if 0 <= row < end else ELSEWHERE for e, row in found.items()}
            self._places = _Places(lies.clone(), [not at for at in addresses], rows)
        return self._places

    def _groups(
        self, cold: Mapping[int, int], bounds: Sequence[tuple[int, int]]
    ) -> list[GroupExperts]:
        """Groups that stream the given cold experts; every expert not cold at all is hot."""
        is_hot = self._find_places().hot
        by_row = {row: expert for expert, row in cold.items()}
        lists: list[list[int]] = []  # of experts, brought to the GPU by one copy
        rows: list[list[list[int]]] = []  # of cold memory, by group and piece
        for first, count in bounds:
            lists.append([expert for expert in range(count) if is_hot[first + expert]])
            group = [cold[expert] for expert in range(first, first + count) if expert in cold]
            rows.append(cut_pieces(group, self._most))
            lists += [[by_row[row] - first for row in part] for part in rows[-1]]
        on_gpu = iter(self._on_gpu(lists))
        groups = []
        for parts in rows:
            hot = next(on_gpu)
            pieces = tuple(Piece(next(on_gpu), self._sources(part, by_row)) for part in parts)
            groups.append(GroupExperts(hot, pieces))
        return groups

    def _sources(self, rows: Sequence[int], by_row: Mapping[int, int]) -> tuple[torch.Tensor, ...]:
        sources = []
        for first, end in runs(rows):
            blobs = self._store.cold[first:end]
            if first == ELSEWHERE:
                found = self._store.cold_of(by_row[ELSEWHERE])
                assert found is not None
                blobs = found
            sources.append(blobs)
        return tuple(sources)

    def _on_gpu(self, lists: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
        flat = torch.tensor([number for numbers in lists for number in numbers], dtype=torch.int32)
        moved = on_device(flat, self._tiles.addresses.device)
        return torch.split(moved, [len(numbers) for numbers in lists])


def pieces_of(groups: Sequence[GroupExperts]) -> list[Piece]:
    """Return the pieces of all groups in the order of their use."""
    return [piece for group in groups for piece in group.pieces]


class ColdStream:
    """The way of a GPU's cold experts to it; its layers use it one after another."""

    def __init__(
        self,
        staging: torch.Tensor,  # uint8 on the GPU
        most: tuple[int, int],  # bytes of an expert, and experts, of any layer
        queue: CopyQueue,
        speeds: ColdSpeeds,
    ) -> None:
        size = min(buffer_bytes(*most), len(staging) // BUFFERS // ALIGNMENT * ALIGNMENT)
        assert size >= most[0]
        self.buffer_bytes = size
        self.downs = staging[BUFFERS * size :]
        self.speeds = speeds if MODULE is not None else speeds.without_cpu
        self.layers: list[StreamedLayer] = []  # in the order of the model
        self.counts = ColdCosts()
        # Of the computing, for copies; None where no GPU computes.
        self.waits = WaitClock(staging.device) if staging.is_cuda else None
        self.cpu, self.read_room = CpuSide(), KeptHost()
        self._ring = StagingRing(queue, staging[: BUFFERS * size].view(BUFFERS, -1).unbind())
        self._coming: deque[Piece] = deque()  # in the order of their use
        self._sent = 0  # of those
        self._rooms: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}  # of downs

    def add(
        self, tiles: ExpertTiles, store: ColdExperts, activation: str, cold_picks: float
    ) -> "StreamedLayer":
        """Return a further layer's experts; its first copies begin while the one before works.

        `cold_picks` are those that are expected of a row.
        """
        layer = StreamedLayer(self, tiles, store, activation, cold_picks)
        if self.layers:
            self.layers[-1].following = layer
        self.layers.append(layer)
        return layer

    def begin(self, pieces: Sequence[Piece], ahead: Sequence[Piece]) -> None:
        """Let a layer's pieces come, if they are not on their way yet, and then those ahead."""
        known = len(self._coming) == len(pieces) and all(
            a is b for a, b in zip(self._coming, pieces, strict=True)
        )
        if not known:
            self._ring.forget()
            self._coming, self._sent = deque(pieces), 0
        self._coming.extend(ahead)
        self._send()

    def unpack(
        self, piece: Piece, tiles: ExpertTiles, group: ExpertGroup, rooms: Sequence[torch.Tensor]
    ) -> None:
        """Unpack the piece that comes next, and let a later one take its buffer."""
        assert self._coming[0] is piece
        gates_and_ups, downs = rooms
        first = self._ring.first
        some = SomeExperts(piece.which, first() if self.waits is None else self.waits.timed(first))
        unpack_some(tiles, some, group, gates_and_ups, downs)
        self._ring.release()
        self._coming.popleft()
        self._sent -= 1
        self._send()

    def room_for_downs(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a group's downs; it serves one group after another."""
        if (found := self._rooms.get((shape, dtype))) is not None:
            return found
        room = self.downs.view(dtype)[: prod(shape)]
        if len(room) < prod(shape):  # more than planned: the scratch says so
            return scratch.take(Buffer(shape, scratch.name_of(dtype)), room.device)
        self._rooms[shape, dtype] = room.view(shape)
        return self._rooms[shape, dtype]

    def _send(self) -> None:
        while self._ring.has_room and self._sent < len(self._coming):
            piece = self._coming[self._sent]
            self._ring.send(piece.sources)
            self._sent += 1
            self.counts.streamed_bytes += sum(source.numel() for source in piece.sources)


class StreamedLayer:
    """One layer's experts, some or all of them cold, for steps of many rows."""

    def __init__(
        self,
        stream: ColdStream,
        tiles: ExpertTiles,
        store: ColdExperts,
        activation: str,
        cold_picks: float,  # that are expected of a row
    ) -> None:
        self.following: StreamedLayer | None = None  # that comes next in a step
        self._size = ExpertSize(store.expert_bytes, expert_flops(tiles.width, tiles.hidden))
        self._stream, self._activation = stream, activation
        self._tiles, self._store = tiles, store
        self._pieces = ColdPieces(tiles, store, stream.buffer_bytes // store.expert_bytes)
        cold = ColdLayer(
            size=self._size,
            experts=len(self._pieces.rows()),
            picks=cold_picks,
            ahead_bytes=BUFFERS * stream.buffer_bytes,
        )
        # The most of a step that waits to hear which experts were chosen. Found once: swaps leave
        # as many experts cold, and fewer picks.
        self.counted_rows = most_counted_rows(cold, stream.speeds)

    def many_rows(
        self,
        x: torch.Tensor | NarrowRows,  # [rows, hidden]
        picks: tuple[torch.Tensor, torch.Tensor],  # ids and weights [rows, used]
        others: Others = NO_OTHERS,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts and what else it gets."""
        rows = as_narrow(x)
        chosen = ChosenRows(rows.values, *picks, rows.powers)
        if len(picks[0]) <= self.counted_rows:
            return self._counted(chosen, others, out)
        return self._streamed(chosen, self._pieces.all_groups(), others, out)

    def _streamed(
        self,
        chosen: ChosenRows,
        groups: Sequence[GroupExperts],
        others: Others,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        stream, tiles = self._stream, self._tiles
        stream.begin(pieces_of(groups), self._ahead(len(chosen.ids)))
        arriving = _Arriving(stream, tiles, groups, chosen.x.dtype)
        return experts_prefill.sum_groups(chosen, tiles, self._activation, arriving, others, out)

    def _ahead(self, rows: int) -> list[Piece]:
        """The pieces of the next layer, unless it waits to hear which experts were chosen."""
        following = self.following
        if following is None or rows <= following.counted_rows:
            return []
        return pieces_of(following._pieces.all_groups())

    def _counted(
        self, chosen: ChosenRows, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Wait for the numbers of picks; stream what pays, and leave the rest to the CPU."""
        stream, tiles, cold = self._stream, self._tiles, self._pieces.rows()
        read = [chosen.ids]
        if stream.speeds.cpu_takes_prefill:
            read += [_floats(chosen), chosen.weights]
        ids, *rows = read_back(read, stream.read_room)
        by_expert = count_picks(ids, len(tiles.addresses))
        used = {expert: by_expert[expert] for expert in cold if by_expert[expert]}
        left = left_to_cpu(used, self._size, stream.speeds)
        streamed = {expert: cold[expert] for expert in used if expert not in left}
        if not left:
            return self._streamed(chosen, self._pieces.some_groups(streamed), others, out)
        theirs = torch.zeros(len(by_expert), dtype=torch.bool)
        theirs[list(left)] = True
        x, weights = rows
        asked = stream.cpu.ask(x, (_only(ids, theirs), weights), self._on_cpu())
        # The CPU is at it while the GPU's work is launched and runs.
        try:
            groups = self._pieces.some_groups(streamed)
            gpus = _without(chosen.ids, on_device(theirs, chosen.ids.device))
            kept = ChosenRows(chosen.x, gpus, chosen.weights, chosen.powers)
            out = self._streamed(kept, groups, others, out)
        finally:  # of a step that failed, too: what the CPU reads is what swaps and the next change
            wait([asked])
        answers, took_s = asked.result()
        stream.counts.cpu_bytes += len(left) * self._size.bytes
        stream.counts.cpu_s += took_s
        return out.add_(answers.to(out.device, non_blocking=True))

    def _on_cpu(self) -> CpuExperts:
        """The cold experts as the CPU's kernels find them."""
        tiles, store = self._tiles, self._store
        width, hidden = tiles.width, tiles.hidden
        shapes = [(width, hidden), (width, hidden), (hidden, width)]
        table = PanelTable(store.host_addresses, tiles.kinds, shapes, store.cold, tiles=True)
        return CpuExperts(table, self._activation)


class _Arriving:
    """Unpacks a group's hot experts from their slots and its cold ones as they come."""

    def __init__(
        self,
        stream: ColdStream,
        tiles: ExpertTiles,
        groups: Sequence[GroupExperts],
        dtype: torch.dtype,  # that they are unpacked to
    ) -> None:
        self._stream, self._tiles, self._dtype = stream, tiles, dtype
        self._left = deque(groups)
        self._downs: torch.Tensor | None = None

    def gates_and_ups(self, group: ExpertGroup) -> torch.Tensor:
        """Unpack all of a group's experts, and return gates and ups."""
        tiles, experts = self._tiles, self._left.popleft()
        plain = experts_prefill.empty_gates_and_ups(tiles, group, self._dtype)
        shape = group.size, tiles.hidden, tiles.width
        self._downs = downs = self._stream.room_for_downs(shape, self._dtype)
        if len(experts.hot):
            unpack_some(tiles, SomeExperts(experts.hot), group, plain, downs)
        for piece in experts.pieces:
            self._stream.unpack(piece, tiles, group, (plain, downs))
        return plain

    def downs(self, group: ExpertGroup) -> torch.Tensor:
        """Return downs, unpacked before."""
        assert self._downs is not None
        return self._downs


def open_stream(
    staging: torch.Tensor, most: tuple[int, int], pinned: bool, speeds: ColdSpeeds
) -> ColdStream:
    """Return the way of cold experts to the GPU that holds the buffers."""
    queue: CopyQueue = CudaCopies(staging.device)
    if not pinned:
        size = buffer_bytes(*most)
        buffers = [pinned_empty((size,), torch.uint8) for _ in range(BUFFERS)]
        queue = BouncedCopies(queue, buffers)
    return ColdStream(staging, most, queue, speeds)


def count_picks(ids: torch.Tensor, experts: int) -> list[int]:
    """Return how often each expert is picked by ids in host memory; ids that are none's count not.

    By numpy: to count on the GPU would take several launches, and torch's threads spin.
    """
    flat = ids.numpy().ravel()
    counts: list[int] = np.bincount(
        flat[(flat >= 0) & (flat < experts)], minlength=experts
    ).tolist()
    return counts


def _floats(chosen: ChosenRows) -> torch.Tensor:
    """Rows as a CPU reads them: in float32, times their powers where they have such."""
    x = chosen.x.float()
    return x if chosen.powers is None else x * chosen.powers[:, None]


def _without(ids: torch.Tensor, passed_over: torch.Tensor) -> torch.Tensor:
    """Return ids with -1 for picks of some experts; picks of nobody stay so."""
    return ids.masked_fill(passed_over[ids.long()], -1)


def _only(ids: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return ids in host memory with -1 for picks of all other experts.

    Not by torch: its threads spin after an operation, on the cores that experts need. With them
    512 rows took the CPU up to three times as long, on 16 cores, 2026-11-16.
    """
    found = ids.numpy()
    return torch.from_numpy(np.where(theirs.numpy()[found], found, -1))


def cut_pieces(rows: Sequence[int], most: int) -> list[list[int]]:
    """Cut rows of cold memory, in ascending order, into pieces of at most so many."""
    ordered = sorted(rows)
    return [ordered[first : first + most] for first in range(0, len(ordered), most)]
