"""Cold experts in steps of many rows: streamed through buffers on the GPU while it computes.

Experts are summed in the same groups, whatever is cold: streamed ones give the same bits as hot
ones. Those that are left to the CPU are rounded as its kernels round.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait
from math import prod

import numpy as np
import torch

from headroom.experts.copies import (
    BouncedCopies,
    CopyQueue,
    CudaCopies,
    KeptHost,
    StagingRing,
    on_device,
    pinned_empty,
    read_back,
)
from headroom.experts.stream_cpu import CpuExperts, CpuSide
from headroom.experts.stream_pieces import ColdExperts, ColdPieces, GroupExperts, Piece, pieces_of
from headroom.experts.stream_rule import (
    ColdLayer,
    ColdRates,
    ExpertSize,
    expert_flops,
    left_to_cpu,
    most_counted_rows,
)
from headroom.experts.telemetry import ColdCosts
from headroom.experts.wait_clock import WaitClock
from headroom.kernels.cuda import experts as cuda_experts
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.expert_tiles import NO_OTHERS, ExpertTiles, Others
from headroom.kernels.cuda.experts import ChosenRows, SomeExperts, unpack_some
from headroom.kernels.cuda.narrow import NarrowRows, as_narrow
from headroom.kernels.cuda.picks import ExpertGroup
from headroom.kernels.cuda.sizes import ALIGNMENT
from headroom.kernels.native.experts import PanelTable
from headroom.kernels.native.module import MODULE
from headroom.plan.staging import BUFFERS, buffer_bytes


class ColdStream:
    """The way of a GPU's cold experts to it; its layers use it one after another."""

    def __init__(
        self,
        staging: torch.Tensor,  # uint8 on the GPU
        most: tuple[int, int],  # bytes of an expert, and experts, of any layer
        queue: CopyQueue,
        rates: ColdRates,
    ) -> None:
        size = min(buffer_bytes(*most), len(staging) // BUFFERS // ALIGNMENT * ALIGNMENT)
        assert size >= most[0]
        self.buffer_bytes = size
        self.downs = staging[BUFFERS * size :]
        self.rates = rates if MODULE is not None else rates.without_cpu
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
            return scratch.empty(*shape, dtype=dtype, device=room.device)
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
        self.counted_rows = most_counted_rows(cold, stream.rates)

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
        return cuda_experts.sum_groups(chosen, tiles, self._activation, arriving, others, out)

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
        if stream.rates.asks_cpu:
            read += [_floats(chosen), chosen.weights]
        ids, *rows = read_back(read, stream.read_room)
        by_expert = count_picks(ids, len(tiles.addresses))
        used = {expert: by_expert[expert] for expert in cold if by_expert[expert]}
        left = left_to_cpu(used, self._size, stream.rates)
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
        plain = cuda_experts.empty_gates_and_ups(tiles, group, self._dtype)
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
    staging: torch.Tensor, most: tuple[int, int], pinned: bool, rates: ColdRates
) -> ColdStream:
    """Return the way of cold experts to the GPU that holds the buffers."""
    queue: CopyQueue = CudaCopies(staging.device)
    if not pinned:
        size = buffer_bytes(*most)
        buffers = [pinned_empty((size,), torch.uint8) for _ in range(BUFFERS)]
        queue = BouncedCopies(queue, buffers)
    return ColdStream(staging, most, queue, rates)


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
