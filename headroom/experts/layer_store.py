"""LayerStore: hot experts of a layer in slots of GPU memory, cold ones in rows of host memory.

Kernels find an expert by the table of its layer. Exchanges, and the host where slots change hands
within steps, move experts between the two memories and change the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from headroom.experts.cache import POLICIES, Policy
from headroom.experts.copies import CopyQueue, Mark, on_device
from headroom.experts.telemetry import ColdCosts
from headroom.kernels.cuda import expert_cache
from headroom.kernels.cuda.expert_cache import Filling, LayerTable
from headroom.kernels.cuda.experts import EXPERT_MATRICES, Kinds
from headroom.layers.host_memory import HostMemory
from headroom.plan.cost_model import ColdPath, DecodeChoice

# Instead of a slot or row: the expert is not in this memory; it is in this memory's spare buffer.
NOWHERE, SPARE = -1, -2


@dataclass(frozen=True, slots=True, eq=False)
class Residency:
    """Where each expert of a layer is: its slot on the GPU, its row of cold memory.

    A hot expert may have a row as well, as a copy. A cold one that is dropped has neither.
    """

    slot: torch.Tensor  # int64 [experts]; or NOWHERE, SPARE
    row: torch.Tensor  # int64 [experts]; or NOWHERE, SPARE

    @property
    def is_hot(self) -> torch.Tensor:
        """Whether each expert is hot, `[experts]`."""
        return self.slot != NOWHERE

    def with_moved(self, slots: dict[int, int], rows: dict[int, int]) -> "Residency":
        """Return the residency after some experts were given other slots and rows."""
        slot, row = self.slot.clone(), self.row.clone()
        for expert, number in slots.items():
            slot[expert] = number
        for expert, number in rows.items():
            row[expert] = number
        return Residency(slot, row)


def initial_residency(experts: int, hot: Sequence[int], rows: int) -> Residency:
    """Return where experts are loaded to, with so many rows of cold memory.

    With a row for each expert, hot ones have a copy there. Without rows, cold experts are nowhere.
    """
    slot = torch.full((experts,), NOWHERE)
    slot[list(hot)] = torch.arange(len(hot))
    if rows == experts:
        return Residency(slot, torch.arange(experts))
    if not rows:
        return Residency(slot, torch.full((experts,), NOWHERE))
    is_cold = slot == NOWHERE
    return Residency(slot, torch.where(is_cold, is_cold.cumsum(0) - 1, NOWHERE))


def addresses_of(rows: torch.Tensor, side: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Return the addresses of slots or rows of a memory, or of its spare buffer."""
    stride = side.shape[1]
    return torch.where(rows == SPARE, spare.data_ptr(), side.data_ptr() + rows * stride)


def table_bytes(experts: int) -> int:
    """Return the bytes of a layer's table: addresses of all experts, and flags of hot ones."""
    return experts * (8 * EXPERT_MATRICES + 4)


def table_views(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of one table's memory.

    They are the addresses int64 `[experts, EXPERT_MATRICES]` and the flags int32 `[experts]`.
    """
    experts = len(table) // table_bytes(1)
    end = 8 * EXPERT_MATRICES * experts
    addresses = table[:end].view(torch.int64).view(experts, EXPERT_MATRICES)
    return addresses, table[end:].view(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobLayout:
    """How the bytes of one expert of a layer lie: gate, up and down, one after another."""

    experts: int
    kinds: Kinds
    width: int
    hidden: int
    used: int  # experts that a row visits
    sizes: tuple[int, ...]  # bytes of each matrix
    tiles: bool  # in tiles for the tensor cores; False: as in the file

    @property
    def nbytes(self) -> int:
        """The bytes of one expert."""
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each matrix begins."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each matrix."""
        inner = (self.width, self.hidden)
        return inner, inner, (self.hidden, self.width)


@dataclass(slots=True, eq=False)
class SpareBuffers:
    """Buffers that all layers of a device share, for exchanges and for copies of cold experts."""

    device: torch.Tensor  # uint8 [bytes of the largest expert] on the GPU
    host: torch.Tensor  # uint8 [bytes of the largest expert] in host memory
    staging: torch.Tensor  # uint8 on the GPU, through which cold experts are copied
    table: torch.Tensor  # uint8, pinned host memory: the next table that a layer gets
    copies: CopyQueue  # copies of exchanges, which run during steps
    exchange: "OpenExchange | None" = None  # that uses `device` and `host`
    table_read: Mark | None = None  # when the GPU has read `table`


@dataclass(slots=True, eq=False)
class OpenExchange:
    """An exchange that was begun and has not ended."""

    layer: "LayerStore"
    promoted: int
    demoted: int
    slot: int  # new place of the promoted expert
    row: int  # new place of the demoted expert
    copied: Mark  # when both are in the spare buffers
    in_table: bool = False  # kernels find both in the spare buffers
    tried: bool = False  # copies to the new places were started before
    moved: Mark | None = None  # when both are at their new places; None: not started, or failed


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """What a layer needs whose slots change hands within steps; tensors are on the GPU."""

    policy: Policy  # at the start
    pinned: tuple[int, ...]  # experts that never give up their slots
    words: torch.Tensor  # int32: the fills of a step; all layers use it one after another
    counts: torch.Tensor  # int64 [expert_cache.COUNTERS]
    seen: torch.Tensor  # int32: the picks of a step


class LayerStore:
    """The experts of one layer, and the table by which kernels find them.

    The table finds every expert whole at any moment. In a layer with a cache, host memory holds
    every expert, and steps change which of them are in slots, too. In any other layer only
    exchanges move experts: a place is written only while no address in the table points there, and
    only after the steps have ended that were launched while one did.
    """

    def __init__(
        self,
        blobs: BlobLayout,
        hot: Sequence[int],
        slots: torch.Tensor,
        cold: torch.Tensor,
        spare: SpareBuffers,
        memory: HostMemory,
        choice: DecodeChoice,
        table: torch.Tensor | None = None,  # uint8 [table_bytes] on the GPU
        cache: LayerCache | None = None,
    ) -> None:
        self.blobs = blobs
        self.choice = choice  # who computes the cold ones in decode steps
        self.slots = slots  # uint8 [hot, bytes] on the GPU
        # uint8 [cold, bytes] in host memory; [experts, bytes] if hot ones have a copy there; no
        # rows if cold ones are dropped.
        self.cold = cold
        self.keeps_copy = bool(len(slots)) and len(cold) == blobs.experts
        self.counts = ColdCosts()  # of StoredExperts, in a layer without fused kernels
        self._spare, self._memory = spare, memory
        self._residency = initial_residency(blobs.experts, sorted(hot), len(cold))
        # Addresses and flags in one tensor, so that one copy changes both.
        if table is None:
            size = table_bytes(blobs.experts)
            table = torch.empty(size, dtype=torch.uint8, device=slots.device)
        self._device_table, self._cache = table, cache
        # In a layer with a cache, an expert in slot n has n + 1 in `is_hot`.
        self.addresses, self.is_hot = table_views(table)
        # Where the CPU finds experts: cold ones; in a layer with a cache, all.
        self.host_addresses = torch.zeros(blobs.experts, EXPERT_MATRICES, dtype=torch.int64)
        self.lookup = self._lookup()
        self._publish(self._residency)

    def _lookup(self) -> LayerTable:
        """Return what a decode step resolves its picks by."""
        cache, starts = self._cache, self.blobs.starts
        if cache is None:
            counts = torch.zeros(len(expert_cache.COUNTERS), dtype=torch.int64)
            return LayerTable(self.is_hot, self.addresses, counts.to(self.slots.device))
        state = expert_cache.new_state(self.experts, POLICIES.index(cache.policy), cache.pinned)
        return LayerTable(
            place=self.is_hot,
            addresses=self.addresses,
            counts=cache.counts,
            state=state.to(self.slots.device),
            filling=Filling(cache.words, self.cold, self.slots, starts[2]),
            starts=(starts[1], starts[2]),
            seen=cache.seen,
        )

    @property
    def is_cached(self) -> bool:
        """Whether steps change which experts are in slots."""
        return self._cache is not None

    @property
    def pinned(self) -> tuple[int, ...]:
        """The experts that never give up their slots within steps."""
        return () if self._cache is None else self._cache.pinned

    @property
    def residency(self) -> Residency:
        """Where experts are; another object after any of them has moved.

        In a layer with a cache: where they were when `take_places` was called last.
        """
        return self._residency

    def set_policy(self, policy: int) -> None:
        """Let another of cache.POLICIES decide in the steps that are launched from now on."""
        assert self.lookup.state is not None
        self.lookup.state[:1].fill_(policy)

    def forget_uses(self) -> None:
        """Let a cache forget which experts steps have used; its policy and its pins stay."""
        state = self.lookup.state
        assert state is not None
        fresh = expert_cache.new_state(self.experts, 0, self.pinned)
        state[1:].copy_(on_device(fresh[1:], state.device))

    def take_places(self, table: torch.Tensor) -> None:
        """Update the residency from a host copy of this layer's table."""
        _, place = table_views(table)
        slot = place.long() - 1
        slot[slot < 0] = NOWHERE
        if not torch.equal(slot, self._residency.slot):
            self._residency = Residency(slot, self._residency.row)

    def hold(self, hot: Sequence[int], *, copy_all: bool = False) -> int:
        """Make exactly `hot` resident in a layer with a cache; return the bytes copied.

        Experts without a slot are copied from host memory to free slots and to those of experts
        that are not in `hot`; with `copy_all`, all of `hot` are copied. No step may have changed
        places since `take_places`. The copies come after the steps launched so far and before later
        ones. While a slot is written, no address points there, so that after a copy that fails the
        table still finds every expert whole.
        """
        slot, wanted = self._residency.slot, set(hot)
        assert len(wanted) == len(hot) <= len(self.slots)
        staying = [expert for expert in hot if slot[expert] != NOWHERE]
        coming = [expert for expert in hot if slot[expert] == NOWHERE]
        leaving = [expert for expert in self.hot if expert not in wanted]
        taken = {int(slot[expert]) for expert in staying}
        free = (number for number in range(len(self.slots)) if number not in taken)
        places = {expert: int(slot[expert]) for expert in staying} | dict(
            zip(coming, free, strict=False)
        )
        copied = list(hot) if copy_all else coming
        if absent := leaving + (staying if copy_all else []):
            self._publish(self._residency.with_moved(dict.fromkeys(absent, NOWHERE), {}))
        for expert in copied:
            copy_bytes(self.slots[places[expert]], self.cold[expert])
        if copied:
            self._publish(self._residency.with_moved(places, {}))
        if moved := leaving + coming:
            assert self.lookup.state is not None
            which = on_device(torch.tensor(moved), self.slots.device)
            expert_cache.origins_of(self.lookup.state).index_fill_(0, which, 0)
        return len(copied) * self.expert_bytes

    @property
    def experts(self) -> int:
        """The number of experts of the layer."""
        return self.blobs.experts

    @property
    def kinds(self) -> Kinds:
        """The types of an expert's gate, up and down."""
        return self.blobs.kinds

    @property
    def width(self) -> int:
        """The width of an expert: values between its up and down products."""
        return self.blobs.width

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.blobs.hidden

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of an expert's gate, up and down."""
        return self.blobs.sizes

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert."""
        return self.blobs.nbytes

    @property
    def link_copies(self) -> int:
        """How many times an exchange sends the bytes of an expert over the link.

        The promoted expert comes once. The demoted one goes twice, to the spare buffer and to its
        row in host memory; or not at all, if hot experts have a copy there.
        """
        return 1 if self.keeps_copy else 3

    @property
    def path(self) -> ColdPath:
        """Who computes the cold experts in decode steps; "cpu" may share them with the GPU."""
        return self.choice.path

    @property
    def readable(self) -> bool:
        """Whether the GPU can read cold experts in place."""
        return self._memory.pinned

    @property
    def hot(self) -> tuple[int, ...]:
        """The ids of the hot experts, ascending."""
        return tuple(self._residency.is_hot.nonzero().flatten().tolist())

    def slot_of(self, expert: int) -> torch.Tensor | None:
        """Return a hot expert's bytes on the GPU; None for a cold one."""
        return self._bytes(self.slots, self._spare.device, int(self._residency.slot[expert]))

    def cold_of(self, expert: int) -> torch.Tensor | None:
        """Return an expert's bytes in host memory; None if it has none there."""
        return self._bytes(self.cold, self._spare.host, int(self._residency.row[expert]))

    def parts(self, blobs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gates, ups and downs `[..., bytes]` of experts `[..., bytes]`."""
        return torch.split(blobs, list(self.sizes), dim=-1)

    def bring(self, blob: torch.Tensor) -> torch.Tensor:
        """Copy a cold expert's bytes to GPU memory; they are valid until the next call."""
        room = self._spare.staging[: self.expert_bytes]
        copy_bytes(room, blob)
        self.counts.streamed_bytes += self.expert_bytes
        return room

    def begin_exchange(self, promoted: int, demoted: int) -> None:
        """Start copies of both experts to the spare buffers; steps may run and see no change.

        A device has one exchange at a time: an earlier one that was only begun is dropped. If a
        copy fails, the error goes to the caller, and every expert is still found.
        """
        hot = self._residency.is_hot
        if not 0 <= promoted < self.experts or not 0 <= demoted < self.experts:
            raise IndexError(f"experts {promoted} and {demoted} of {self.experts}")
        if hot[promoted] or not hot[demoted]:
            raise ValueError(f"expert {promoted} must be cold and {demoted} hot")
        spare = self._spare
        if spare.exchange is not None and spare.exchange.in_table:
            spare.exchange.layer.finish_exchange()
        spare.exchange = None
        coming, going = self.cold_of(promoted), self.slot_of(demoted)
        assert coming is not None
        assert going is not None
        copied = self._copy_async(spare.device[: self.expert_bytes], coming)
        if not self.keeps_copy:
            copied = self._copy_async(spare.host[: self.expert_bytes], going)
        slot, row = int(self._residency.slot[demoted]), int(self._residency.row[promoted])
        spare.exchange = OpenExchange(self, promoted, demoted, slot, row, copied)

    @property
    def exchange_mark(self) -> Mark:
        """When the copies that the exchange started last are done."""
        exchange = self._under_way()
        return exchange.copied if exchange.moved is None else exchange.moved

    def turn_exchange(self) -> None:
        """Let the table find both experts in the spare buffers; start copies to their new places.

        This waits for steps that run: during a step no expert may change sides, or the CPU that
        computes cold experts would look for one that is hot by now.
        """
        exchange = self._under_way()
        self._spare.copies.mark().synchronize()
        exchange.copied.synchronize()
        promoted, demoted = exchange.promoted, exchange.demoted
        rows = {} if self.keeps_copy else {promoted: NOWHERE, demoted: SPARE}
        self._publish(self._residency.with_moved({promoted: SPARE, demoted: NOWHERE}, rows))
        exchange.in_table = True
        self._move(exchange)

    def end_exchange(self) -> None:
        """Let the table find both experts at their new places.

        Steps may run: no expert changes sides, and a spare buffer and the new place hold the same
        bytes, so that a step may read either. The next exchange waits for these steps before it
        writes to the buffers.
        """
        exchange = self._under_way()
        moved, exchange.moved = exchange.moved, None
        assert moved is not None
        moved.synchronize()
        rows = {} if self.keeps_copy else {exchange.demoted: exchange.row}
        self._publish(self._residency.with_moved({exchange.promoted: exchange.slot}, rows))
        self._spare.exchange = None

    def finish_exchange(self) -> None:
        """Do all that is left of an exchange, and repeat what failed.

        No step may run, unless the two experts have changed sides already.
        """
        exchange = self._under_way()
        if not exchange.in_table:
            self.turn_exchange()
        elif exchange.moved is None:
            self._move(exchange)
        self.end_exchange()

    def _under_way(self) -> OpenExchange:
        exchange = self._spare.exchange
        if exchange is None or exchange.layer is not self:
            raise ValueError("no exchange of this layer was begun")
        return exchange

    def _move(self, exchange: OpenExchange) -> None:
        """Start copies of both experts to their new places, to which no address points now."""
        spare, slot = self._spare, self.slots[exchange.slot]
        if not self.keeps_copy:
            # From the old slot, because a copy within host memory would hold up this thread. After
            # a failed attempt the slot may hold the promoted expert already.
            going = spare.host[: self.expert_bytes] if exchange.tried else slot
            exchange.tried = True
            self._copy_async(self.cold[exchange.row], going)
        exchange.moved = self._copy_async(slot, spare.device[: self.expert_bytes])

    def _copy_async(self, to: torch.Tensor, source: torch.Tensor) -> Mark:
        """Start a copy that runs after the steps launched so far, concurrently with later ones."""
        copies = self._spare.copies
        return copies.copy(to, [source], copies.mark())

    def _publish(self, residency: Residency) -> None:
        """Write a residency to both tables.

        The GPU's table changes for all steps that are launched from now on. The host's table
        changes at once, while steps may run: the CPU that computes for a step reads it, which is
        safe if no expert changes sides and old places still hold their experts. Prefill steps read
        it when they are launched.
        """
        slot = addresses_of(residency.slot, self.slots, self._spare.device)
        row = addresses_of(residency.row, self.cold, self._spare.host)
        starts, is_hot = torch.tensor(self.blobs.starts), residency.is_hot
        if self.is_cached:
            not_cold = torch.zeros_like(is_hot)
        else:
            not_cold = is_hot | (residency.row == NOWHERE)
        cold = torch.where(not_cold[:, None], 0, row[:, None] + starts)
        readable = cold if self.readable else torch.zeros_like(cold)
        spare = self._spare
        if spare.table_read is not None:
            spare.table_read.synchronize()  # waits only while layers are being loaded
        table = spare.table[: len(self._device_table)]
        addresses, flags = table_views(table)
        addresses.copy_(torch.where(is_hot[:, None], slot[:, None] + starts, readable))
        flags.copy_(residency.slot + 1 if self.is_cached else is_hot)
        copy_bytes(self._device_table, table)
        spare.table_read = spare.copies.mark()
        self.host_addresses.copy_(cold)
        self._residency = residency

    def _bytes(self, side: torch.Tensor, spare: torch.Tensor, row: int) -> torch.Tensor | None:
        if row == NOWHERE:
            return None
        return spare[: self.expert_bytes] if row == SPARE else side[row]


def copy_bytes(to: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue a copy on the current stream; the host does not wait for it."""
    to.copy_(source, non_blocking=True)
