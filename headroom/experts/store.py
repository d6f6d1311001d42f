"""ExpertStore: hot experts in slots of GPU memory, cold ones in host memory, found by address.

`open_store` allocates both memories as the plan says, and chooses who computes each layer's cold
experts. `fill_tiles` and `fill_rows` load the experts. From then on kernels find an expert by the
table of its layer (`LayerStore`), and exchanges move experts between the two memories.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from headroom.errors import DeviceError
from headroom.experts.cache import POLICIES, Policy, policies_for
from headroom.experts.copies import CopyQueue, Mark, on_device, open_copies, pinned_empty
from headroom.experts.placement import ExpertPlacement
from headroom.experts.telemetry import ColdCosts
from headroom.families.config import ExpertsConfig
from headroom.kernels.cuda import expert_cache
from headroom.kernels.cuda.buffers import ALIGNMENT, aligned
from headroom.kernels.cuda.expert_cache import Filling, LayerTable
from headroom.kernels.cuda.expert_rules import LEAST_TOKENS
from headroom.kernels.cuda.experts import EXPERT_MATRICES, Kinds
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.kernels.native.module import MISSING
from headroom.layers.host_memory import HostMemory, pin_limits
from headroom.layers.upload import UPLOAD_BUFFERS, HostTiles, matrices_between
from headroom.layers.weights import WeightSource
from headroom.plan.cost_model import (
    ColdPath,
    ColdSpeeds,
    DecodeChoice,
    choose_decode,
    decode_speeds,
)
from headroom.plan.settings import holds_cold
from headroom.units import counted, gib

log = logging.getLogger(__name__)

FIRST_POLICY: Policy = "counts"  # of a cache that chooses its policy by itself

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
        state = expert_cache.new_state(self.experts, POLICIES.index(cache.policy))
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
        """Let a cache forget which experts steps have used; its policy stays."""
        assert self.lookup.state is not None
        self.lookup.state[1:].zero_()

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


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStore:
    """The experts of all layers of a device on which some are cold."""

    layers: tuple[LayerStore | None, ...]  # by layer of the model; None: dense, or all hot
    placement: ExpertPlacement  # when it was loaded
    spare: SpareBuffers
    memory: HostMemory
    tables: torch.Tensor  # uint8 on the GPU: the tables of all layers, one after another
    cache_counts: torch.Tensor  # int64 [layers, expert_cache.COUNTERS] on the GPU
    seen: torch.Tensor  # int32 [layers, picks] on the GPU: a decode step's picks, with a cache
    first_policy: Policy  # of the caches at the start
    chooses_policy: bool  # whether shadows choose their policy from then on

    @property
    def pinned(self) -> bool:
        """Whether the GPU can read cold experts in place."""
        return self.memory.pinned

    @property
    def source(self) -> str:
        """Where the placement came from."""
        return self.placement.source

    @property
    def staging(self) -> torch.Tensor:
        """Memory of the device through which cold experts are copied."""
        return self.spare.staging

    @property
    def largest(self) -> int:
        """The bytes of the largest expert."""
        return max(layer.expert_bytes for layer in self.layers if layer is not None)

    @property
    def most_experts(self) -> int:
        """The most experts of a layer."""
        return max(layer.experts for layer in self.layers if layer is not None)

    @property
    def cold_bytes(self) -> int:
        """Bytes of all experts in host memory; 0: cold ones are dropped, and none can move."""
        return sum(layer.cold.nbytes for layer in self.layers if layer is not None)

    @property
    def is_cached(self) -> bool:
        """Whether steps of some layers change which experts are in slots."""
        return any(layer is not None and layer.is_cached for layer in self.layers)

    def take_places(self) -> None:
        """Learn from the GPU where the experts of layers with a cache are; waits for its steps."""
        if not self.is_cached:
            return
        tables, at = self.tables.cpu(), 0
        for layer in self.layers:
            if layer is None:
                continue
            size = table_bytes(layer.experts)
            if layer.is_cached:
                layer.take_places(tables[at : at + size])
            at += aligned(size)

    def repair(self) -> None:
        """Copy the experts in slots of layers with a cache again; waits for the GPU.

        A step that failed may have given a slot away before the new expert was copied into it. If
        a copy fails here, too, the table leads to host memory for the experts of that layer, and
        the next repair fills its slots.
        """
        self.take_places()
        for layer, placed in zip(self.layers, self.placement.hot, strict=True):
            if layer is not None and layer.is_cached:
                # A repair that failed has left free slots, which steps do not fill.
                hot = dict.fromkeys([*layer.hot, *placed])
                layer.hold([*hot][: len(layer.slots)], copy_all=True)

    def restore(self) -> None:
        """Let caches begin anew with the experts of the placement; waits for the GPU.

        Steps that only warm a GPU up pick experts that no text has asked for.
        """
        self.take_places()
        for layer, placed in zip(self.layers, self.placement.hot, strict=True):
            if layer is not None and layer.is_cached:
                layer.hold(placed)
                layer.forget_uses()
        self.cache_counts.zero_()

    def current_placement(self, *, ask: bool = True) -> ExpertPlacement:
        """Return which experts are hot now; waits for the GPU if slots change hands within steps.

        Without `ask`, the GPU is lost: return what it said last.
        """
        if ask:
            self.take_places()
        hot = tuple(
            loaded if layer is None else layer.hot
            for loaded, layer in zip(self.placement.hot, self.layers, strict=True)
        )
        return replace(self.placement, hot=hot)


def copy_bytes(to: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue a copy on the current stream; the host does not wait for it."""
    to.copy_(source, non_blocking=True)


def drop_cold(ids: torch.Tensor, weights: torch.Tensor, is_hot: torch.Tensor) -> torch.Tensor:
    """Return weights `[rows, used]` with 0 for cold experts; those of a row's hot ones grow.

    The sum of a row's weights stays what it was. A row without hot experts gets zeros.
    """
    kept = weights * is_hot[ids]
    share = kept.sum(1, keepdim=True)
    grown = kept * (weights.sum(1, keepdim=True) / share)
    return torch.where(share == 0, kept, grown)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """What a store will hold, and how."""

    placement: ExpertPlacement
    cold: str  # the setting: "auto", or a ColdPath
    speeds: ColdSpeeds  # what "auto" decides by
    pin: bool
    keep_copy: bool  # of hot experts in host memory
    staging_bytes: int  # on the device: staging buffers and the spare buffer together
    policy: str = "static"  # by which slots change hands: "auto" or one of cache.POLICIES

    def cold_rows(self, layout: BlobLayout | None, hot: int) -> int:
        """Return the rows of cold memory for a layer of which so many experts are hot."""
        if layout is None or hot == layout.experts or not holds_cold(self.cold, self.keep_copy):
            return 0
        return layout.experts if self.keep_copy else layout.experts - hot

    @property
    def first_policy(self) -> Policy:
        """The policy of caches at the start."""
        return next((policy for policy in POLICIES if policy == self.policy), FIRST_POLICY)

    def cache_policy(
        self, layout: BlobLayout, slots: int, choice: DecodeChoice, *, pinned: bool
    ) -> Policy | None:
        """Return the policy of a layer's cache at the start; None if it has none.

        A cache needs every expert in host memory, where the GPU can read it, and enough slots.
        """
        if self.policy == "static" or not (self.keep_copy and pinned and layout.tiles):
            return None
        if choice.path == "drop" or not any(choice.in_place):
            return None
        return self.first_policy if self.first_policy in policies_for(slots, layout.used) else None


def blob_layout(config: ExpertsConfig, get: WeightSource, *, tiles: bool) -> BlobLayout:
    """Return how the experts of a layer lie in memory: in tiles, or as in the file."""
    parts = [part[0] for part in get.locate_experts(config.experts)]
    gate = parts[0]
    return BlobLayout(
        experts=config.experts,
        kinds=tuple(part.quant for part in parts),
        width=gate.rows,
        hidden=gate.columns,
        used=config.used,
        sizes=tuple(
            tile_bytes(x.quant, x.rows, x.columns) if tiles else x.matrix_bytes for x in parts
        ),
        tiles=tiles,
    )


def open_store(
    layouts: Sequence[BlobLayout | None],  # by layer; None where it has no experts
    request: StoreRequest,
    device: str,
    count: Callable[[str, int], None],
) -> ExpertStore:
    """Allocate the slots, the cold experts' memory and the buffers between them."""
    hot_ids = request.placement.hot
    hot = [len(ids) for ids in hot_ids]
    # Layers without cold experts are not in the store.
    mixed = [x is not None and n < x.experts for x, n in zip(layouts, hot, strict=True)]
    slots = [n if some else 0 for n, some in zip(hot, mixed, strict=True)]
    cold = [request.cold_rows(x, n) for x, n in zip(layouts, hot, strict=True)]
    sizes = (x.nbytes for x, n in zip(layouts, cold, strict=True) if x is not None and n)
    largest = max(sizes, default=0)
    memory = HostMemory(_needed(layouts, cold) + largest, pin=request.pin)
    _check_memory(layouts, request, memory)
    choices = decode_choices(layouts, request, pinned=memory.pinned)
    stored = [x if some else None for x, some in zip(layouts, mixed, strict=True)]
    policies = [
        None
        if layout is None or choice is None
        else request.cache_policy(layout, count, choice, pinned=memory.pinned)
        for layout, count, choice in zip(stored, slots, choices, strict=True)
    ]
    _check_policies(stored, policies, request, memory)
    slab = torch.empty(_needed(layouts, slots), dtype=torch.uint8, device=device)
    staging = torch.empty(request.staging_bytes, dtype=torch.uint8, device=device)
    on_host = memory.bytes[len(memory) - largest :]
    table = pinned_empty((max(table_bytes(x.experts) for x in layouts if x),), torch.uint8)
    copies = open_copies(torch.device(device))
    spare = SpareBuffers(staging[:largest], on_host, staging[aligned(largest) :], table, copies)
    slot_rows, cold_rows = _cut(slab, layouts, slots), _cut(memory.bytes, layouts, cold)
    rooms = [0 if x is None else aligned(table_bytes(x.experts)) for x in stored]
    tables = torch.empty(sum(rooms), dtype=torch.uint8, device=device)
    words = torch.zeros(expert_cache.FILL_WORDS, dtype=torch.int32, device=device)
    counts = torch.zeros(len(layouts), len(expert_cache.COUNTERS), dtype=torch.int64, device=device)
    seen = torch.full((len(layouts), expert_cache.MOST_FILLS), -1, dtype=torch.int32, device=device)
    layers: list[LayerStore | None] = []
    for index, (layout, choice) in enumerate(zip(stored, choices, strict=True)):
        if layout is None or choice is None:
            layers.append(None)
            continue
        cache = None
        if (policy := policies[index]) is not None:
            cache = LayerCache(policy, words, counts[index], seen[index])
        at = sum(rooms[:index])
        layers.append(
            LayerStore(
                *(layout, hot_ids[index], slot_rows[index], cold_rows[index], spare, memory),
                *(choice, tables[at : at + table_bytes(layout.experts)], cache),
            )
        )
    store = ExpertStore(
        *(tuple(layers), request.placement, spare, memory, tables, counts, seen),
        first_policy=request.first_policy,
        chooses_policy=request.policy == "auto",
    )
    count("expert_staging", staging.nbytes)
    count("expert_spare", largest)
    _log(store, layouts, device)
    if request.cold == "auto" and not request.speeds.measured:
        log.info(
            "experts: who computes cold ones is chosen by listed speeds; headroom calibrate "
            "measures those of this machine"
        )
    return store


def decode_choices(
    layouts: Sequence[BlobLayout | None], request: StoreRequest, *, pinned: bool
) -> list[DecodeChoice | None]:
    """Return who computes each layer's cold experts in decode steps; None for a dense layer."""
    speeds = decode_speeds(request.speeds, request.cold, pinned)
    return [
        None
        if layout is None
        else choose_decode(
            speeds,
            layout.nbytes,
            layout.used,
            request.placement.hit_rate(index, layout.experts),
            request.cold,
            even_rate=len(request.placement.hot[index]) / layout.experts,
        )
        for index, layout in enumerate(layouts)
    ]


def _log(store: ExpertStore, layouts: Sequence[BlobLayout | None], device: str) -> None:
    hot = store.placement.total
    total = sum(x.experts for x in layouts if x is not None)
    hot_bytes = sum(
        x.nbytes * len(ids)
        for x, ids in zip(layouts, store.placement.hot, strict=True)
        if x is not None
    )
    pinned = "pinned" if store.pinned else "not pinned"
    where = f"{gib(store.cold_bytes)} of host memory, {pinned}" if store.cold_bytes else "not held"
    log.info(
        "experts: %d hot (%s on %s), %d cold (%s), placement: %s, cold: %s",
        hot,
        gib(hot_bytes),
        device,
        total - hot,
        where,
        store.source,
        _described(store),
    )


def _described(store: ExpertStore) -> str:
    """Return who computes cold experts, with the number of layers where they differ."""
    found = Counter(_path_words(x) for x in store.layers if x is not None)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{words} in {counted(count, 'layer')}" for words, count in found.items())


def _path_words(layer: LayerStore) -> str:
    choice = layer.choice
    words = {"gpu": "read by the GPU", "cpu": "computed by the CPU", "drop": "left out"}
    shared = choice.path == "cpu" and any(choice.in_place)
    told = words[choice.path] + (" and read by the GPU" if shared else "")
    return told + (", which may fill slots" if layer.is_cached else "")


def _check_memory(
    layouts: Sequence[BlobLayout | None], request: StoreRequest, memory: HostMemory
) -> None:
    """Refuse a setting that this machine or its host memory does not allow; warn of slower paths.

    Experts in tiles are read by the GPU's own kernels and by the C++ kernels of the CPU alone.
    """
    wanted, has_cpu = request.cold, request.speeds.cpu > 0
    tiles = any(layout is not None and layout.tiles for layout in layouts)
    if memory.refused and wanted == "gpu":
        raise DeviceError(
            f"The GPU's driver does not pin {gib(len(memory))} of host memory for cold experts: "
            f"{memory.refused}{pin_limits()}.",
            hint="Free host memory, raise the limit of the control group, keep more "
            "experts on the GPU, or let the CPU compute cold ones with --cold cpu.",
        )
    if memory.refused:
        log.warning(
            "experts: %s of cold experts are not pinned (%s%s): %s",
            gib(len(memory)),
            memory.refused,
            pin_limits(),
            "they are left out, and exchanges come only between requests"
            if wanted == "drop"
            else "the CPU computes them, and long prompts copy them twice",
        )
    if wanted != "drop" and tiles and not memory.pinned and not has_cpu:
        raise DeviceError(
            f"{gib(len(memory))} of cold experts are not pinned, so that only the CPU could "
            "compute them, and its C++ kernels were not built.",
            hint="Free host memory, or build the kernels; see headroom doctor.",
        )
    if wanted == "auto" and tiles and not has_cpu:
        log.warning(
            "experts: the CPU takes no part in computing cold experts, because the C++ module is "
            "%s. The GPU reads all of them over its link, which is slower. Install a C++ compiler "
            "and run pip install again for headroom; --cold gpu turns this warning off",
            MISSING or "not in use",
        )


def _check_policies(
    stored: Sequence[BlobLayout | None],
    policies: Sequence[Policy | None],
    request: StoreRequest,
    memory: HostMemory,
) -> None:
    """Refuse a named policy that no layer can have; warn if only some layers have it.

    The plan has refused what it knows. The driver may refuse to pin, and layers differ.
    """
    if request.policy in ("auto", "static"):
        return
    layers = len(stored) - list(stored).count(None)
    without = layers - sum(policy is not None for policy in policies)
    if memory.refused:
        raise DeviceError(
            f"--expert-policy {request.policy} cannot be had: the GPU's driver does not pin "
            f"{gib(len(memory))} of host memory for experts: {memory.refused}{pin_limits()}.",
            hint="Free host memory, raise the limit of the control group, or choose "
            "--expert-policy auto, which takes what there is.",
        )
    if without == layers and layers:
        raise DeviceError(
            f"--expert-policy {request.policy} cannot be had: in all {layers} layers with cold "
            f"experts, the GPU reads none of them or has slots for fewer than {LEAST_TOKENS} "
            "tokens.",
            hint="Choose --expert-policy auto, which takes what there is, or --cold gpu.",
        )
    if without:
        log.warning(
            "experts: --expert-policy %s has no effect in %d of %d layers with cold experts, "
            "where the GPU reads none of them or has slots for fewer than %d tokens",
            request.policy,
            without,
            layers,
            LEAST_TOKENS,
        )


def fill_tiles(store: LayerStore, get: WeightSource, rooms: torch.Tensor) -> None:
    """Load all experts of a layer to their places, in tiles; `rooms` are the staging buffers.

    Nothing is read of dropped experts, which have no place.
    """
    assert get.upload is not None
    only_hot = store.addresses * (store.is_hot > 0)[:, None]
    each = len(rooms) // UPLOAD_BUFFERS // ALIGNMENT * ALIGNMENT
    quarters = rooms[: UPLOAD_BUFFERS * each].view(UPLOAD_BUFFERS, each)
    starts, sizes = store.blobs.starts, store.sizes
    blobs = [store.cold_of(expert) for expert in range(store.experts)]
    held = runs(range(store.experts) if len(store.cold) else store.hot)
    for number, part in enumerate(get.locate_experts(store.experts)):
        begin, size = starts[number], sizes[number]
        places = [None if blob is None else blob[begin : begin + size] for blob in blobs]
        for first, end in held:
            back = HostTiles(quarters, places[first:end]) if len(store.cold) else None
            some = matrices_between(part, first, end)
            get.upload.tiles_at(some, only_hot[first:end, number], back)
    _count(store, get)


def fill_rows(store: LayerStore, get: WeightSource) -> None:
    """Load all experts of a layer to their places, as in the file; dropped ones are not read."""
    for expert, parts in enumerate(zip(*get.experts_from_file(store.experts).parts, strict=True)):
        for blob in (store.slot_of(expert), store.cold_of(expert)):
            if blob is not None:
                for room, weight in zip(store.parts(blob), parts, strict=True):
                    room.copy_(weight.data.reshape(-1).view(torch.uint8))
    _count(store, get)


def _count(store: LayerStore, get: WeightSource) -> None:
    get.count("hot_experts", store.slots.nbytes)
    get.count("cold_experts", store.cold.nbytes)


def _needed(layouts: Sequence[BlobLayout | None], experts: Sequence[int]) -> int:
    """Return the bytes of so many experts of each layer, aligned by layer."""
    return sum(
        aligned(x.nbytes * n) for x, n in zip(layouts, experts, strict=True) if x is not None
    )


def _cut(
    memory: torch.Tensor, layouts: Sequence[BlobLayout | None], experts: Sequence[int]
) -> list[torch.Tensor]:
    """Return the parts of a memory that hold each layer's experts, `[experts, bytes]`."""
    cut, at = [], 0
    for layout, number in zip(layouts, experts, strict=True):
        size = 0 if layout is None else layout.nbytes
        cut.append(memory[at : at + number * size].view(number, size))
        at += aligned(number * size)
    return cut


def runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and end of each run of neighbours among ascending rows: one copy each."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return found
