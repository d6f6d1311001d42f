"""ExpertStore: hot experts in slots of GPU memory, cold ones in host memory, found by address."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from headroom.experts.copies import CopyQueue, Mark
from headroom.experts.cost import Choice, ColdPath
from headroom.experts.placement import ExpertPlacement
from headroom.experts.residence import (
    NOWHERE,
    SPARE,
    Residence,
    addresses_of,
    first_residence,
    table_bytes,
    table_views,
)
from headroom.experts.telemetry import ColdCosts
from headroom.kernels.cuda.expert_tiles import PARTS, Kinds
from headroom.layers.pinned import HostMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobLayout:
    """How each expert of a layer lies in memory: gate, up and down, one after another."""

    experts: int
    kinds: Kinds
    width: int
    hidden: int
    used: int  # of the experts, by each row
    sizes: tuple[int, ...]  # bytes of each matrix
    tiles: bool  # in tiles for the tensor cores, not as in the file

    @property
    def nbytes(self) -> int:
        """The bytes of an expert."""
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
class Spare:
    """Room for one expert on each side, shared by all layers of a device, and for more."""

    device: torch.Tensor  # uint8 [bytes]
    host: torch.Tensor
    staging: torch.Tensor  # uint8 on the device, for cold experts on their way
    table: torch.Tensor  # uint8 in host memory, pinned: the next that a layer gets
    copies: CopyQueue  # of exchanges, beside steps
    exchange: "Exchange | None" = None  # that uses it
    told: Mark | None = None  # when the table there has been read


@dataclass(slots=True, eq=False)
class Exchange:
    """Two experts of a layer that are changing places."""

    layer: "LayerStore"
    promoted: int
    demoted: int
    slot: int  # that the one comes to
    row: int  # that the other comes to
    copied: Mark  # when both are in the spare buffers
    in_table: bool = False  # the table finds both in the spare buffers by now
    tried: bool = False  # to bring them to their places
    moved: Mark | None = None  # when they are there; None: that was not asked for, or it failed


class LayerStore:
    """The experts of one layer; exchanges move them, and nothing else does.

    At any moment every expert that is held is found whole by the table: one is written to a place
    only while no address points there, and after the steps that were launched when one did.
    """

    def __init__(
        self,
        blobs: BlobLayout,
        hot: Sequence[int],
        slots: torch.Tensor,
        cold: torch.Tensor,
        spare: Spare,
        memory: HostMemory,
        choice: Choice,
    ) -> None:
        self.blobs = blobs
        self.choice = choice  # who computes the cold ones in steps of few rows
        self.slots = slots  # uint8 [hot, bytes] on the GPU
        # uint8 [cold, bytes] in host memory; [experts, bytes] where hot ones have a copy there, and
        # none where cold ones are left out.
        self.cold = cold
        self.keeps_copy = bool(len(slots)) and len(cold) == blobs.experts
        self.counts = ColdCosts()  # of a layer without fused kernels
        self._spare, self._memory = spare, memory
        self._residence = first_residence(blobs.experts, sorted(hot), len(cold))
        # One piece, so that one copy changes all of it.
        size = table_bytes(blobs.experts)
        self._device_table = torch.empty(size, dtype=torch.uint8, device=slots.device)
        self.addresses, self.is_hot = table_views(self._device_table)
        self.host_addresses = torch.zeros(blobs.experts, PARTS, dtype=torch.int64)
        self._publish(self._residence)

    @property
    def experts(self) -> int:
        """Experts of the layer."""
        return self.blobs.experts

    @property
    def kinds(self) -> Kinds:
        """The types of an expert's gate, up and down."""
        return self.blobs.kinds

    @property
    def width(self) -> int:
        """Values between an expert's up and down."""
        return self.blobs.width

    @property
    def hidden(self) -> int:
        """Values of a row of the residual stream."""
        return self.blobs.hidden

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of an expert's gate, up and down."""
        return self.blobs.sizes

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert."""
        return self.blobs.nbytes

    @property
    def link_copies(self) -> int:
        """Copies of an expert that an exchange sends over the link.

        One comes, one goes to the spare buffer and one to its place in host memory; where hot
        ones have a copy there, none goes.
        """
        return 1 if self.keeps_copy else 3

    @property
    def path(self) -> ColdPath:
        """Who computes the cold ones, where there is one answer."""
        return self.choice.path

    @property
    def readable(self) -> bool:
        """Whether the GPU reads cold experts where they lie."""
        return self._memory.pinned

    @property
    def hot(self) -> tuple[int, ...]:
        """The hot experts, ascending."""
        return tuple(self._residence.is_hot.nonzero().flatten().tolist())

    def slot_of(self, expert: int) -> torch.Tensor | None:
        """Return a hot expert's bytes on the GPU; None of a cold one."""
        return self._bytes(self.slots, self._spare.device, int(self._residence.slot[expert]))

    def cold_of(self, expert: int) -> torch.Tensor | None:
        """Return an expert's bytes in host memory; None where it has none."""
        return self._bytes(self.cold, self._spare.host, int(self._residence.row[expert]))

    def parts(self, blobs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gates, ups and downs `[..., bytes]` of experts `[..., bytes]`."""
        return torch.split(blobs, list(self.sizes), dim=-1)

    def bring(self, blob: torch.Tensor) -> torch.Tensor:
        """Return a cold expert's bytes in GPU memory, until the next call."""
        room = self._spare.staging[: self.expert_bytes]
        copy_bytes(room, blob)
        self.counts.streamed_bytes += self.expert_bytes
        return room

    def begin_exchange(self, promoted: int, demoted: int) -> None:
        """Ask for copies of both in the spare buffers; steps run meanwhile and see nothing of it.

        One exchange of a device at a time: an earlier one that was only begun is forgotten. Where
        a copy fails, the error goes to the caller and every expert is still found.
        """
        hot = self._residence.is_hot
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
        copied = self._copy_beside(spare.device[: self.expert_bytes], coming)
        if not self.keeps_copy:
            copied = self._copy_beside(spare.host[: self.expert_bytes], going)
        slot, row = int(self._residence.slot[demoted]), int(self._residence.row[promoted])
        spare.exchange = Exchange(self, promoted, demoted, slot, row, copied)

    @property
    def exchange_mark(self) -> Mark:
        """When the copies are there that the exchange asked for last."""
        exchange = self._under_way()
        return exchange.copied if exchange.moved is None else exchange.moved

    def turn_exchange(self) -> None:
        """Let the table find both in the spare buffers; ask for copies to their places.

        Steps that run are waited for: one would find the two on other sides than it began with,
        and a CPU that computes cold experts would look for one that is hot by now.
        """
        exchange = self._under_way()
        self._spare.copies.mark().synchronize()
        exchange.copied.synchronize()
        promoted, demoted = exchange.promoted, exchange.demoted
        rows = {} if self.keeps_copy else {promoted: NOWHERE, demoted: SPARE}
        self._publish(self._residence.with_moved({promoted: SPARE, demoted: NOWHERE}, rows))
        exchange.in_table = True
        self._move(exchange)

    def end_exchange(self) -> None:
        """Let the table find both at their places.

        Steps may run. Nobody changes sides, and a spare buffer and the place hold the same: a step
        finds an expert whole in either. The next exchange writes to the buffers after those steps.
        """
        exchange = self._under_way()
        moved, exchange.moved = exchange.moved, None
        assert moved is not None
        moved.synchronize()
        rows = {} if self.keeps_copy else {exchange.demoted: exchange.row}
        self._publish(self._residence.with_moved({exchange.promoted: exchange.slot}, rows))
        self._spare.exchange = None

    def finish_exchange(self) -> None:
        """Do all that is left of an exchange, what failed included.

        No step may run, unless the two have changed sides already.
        """
        exchange = self._under_way()
        if not exchange.in_table:
            self.turn_exchange()
        elif exchange.moved is None:
            self._move(exchange)
        self.end_exchange()

    def _under_way(self) -> Exchange:
        exchange = self._spare.exchange
        if exchange is None or exchange.layer is not self:
            raise ValueError("no exchange of this layer was begun")
        return exchange

    def _move(self, exchange: Exchange) -> None:
        """Ask for copies of both to their places, where no table finds anything now."""
        spare, slot = self._spare, self.slots[exchange.slot]
        if not self.keeps_copy:
            # From its old slot, since a copy within host memory would hold up this thread. A copy
            # that failed may have left the slot to the other one.
            going = spare.host[: self.expert_bytes] if exchange.tried else slot
            exchange.tried = True
            self._copy_beside(self.cold[exchange.row], going)
        exchange.moved = self._copy_beside(slot, spare.device[: self.expert_bytes])

    def _copy_beside(self, to: torch.Tensor, source: torch.Tensor) -> Mark:
        """Ask for a copy beside the steps to come, after those that were launched."""
        copies = self._spare.copies
        return copies.copy(to, [source], copies.mark())

    def _publish(self, residence: Residence) -> None:
        """Let the tables tell where experts are: the GPU's to all steps launched from now on.

        The host's changes at once, while steps may run. The CPU that computes for them reads it,
        and finds what it needs if no expert changes sides and old places still hold theirs. Those
        who copy cold experts for long steps read it when they launch them.
        """
        slot = addresses_of(residence.slot, self.slots, self._spare.device)
        row = addresses_of(residence.row, self.cold, self._spare.host)
        starts, is_hot = torch.tensor(self.blobs.starts), residence.is_hot
        away = is_hot | (residence.row == NOWHERE)
        cold = torch.where(away[:, None], 0, row[:, None] + starts)
        readable = cold if self.readable else torch.zeros_like(cold)
        spare = self._spare
        if spare.told is not None:
            spare.told.synchronize()  # not reached yet only while layers are being loaded
        table = spare.table[: len(self._device_table)]
        addresses, flags = table_views(table)
        addresses.copy_(torch.where(is_hot[:, None], slot[:, None] + starts, readable))
        flags.copy_(is_hot)
        copy_bytes(self._device_table, table)
        spare.told = spare.copies.mark()
        self.host_addresses.copy_(cold)
        self._residence = residence

    def _bytes(self, side: torch.Tensor, spare: torch.Tensor, row: int) -> torch.Tensor | None:
        if row == NOWHERE:
            return None
        return spare[: self.expert_bytes] if row == SPARE else side[row]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStore:
    """The experts of all layers of a device, some of which are cold."""

    layers: tuple[LayerStore | None, ...]  # by layer of the model; None: dense, or all hot
    placement: ExpertPlacement  # as it was loaded
    spare: Spare
    memory: HostMemory

    @property
    def pinned(self) -> bool:
        """Whether the GPU reads cold experts where they lie."""
        return self.memory.pinned

    @property
    def source(self) -> str:
        """Where the placement came from."""
        return self.placement.source

    @property
    def staging(self) -> torch.Tensor:
        """Memory of the device for cold experts on their way."""
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
        """Bytes of all experts in host memory; 0: cold ones are left out, and none can move."""
        return sum(layer.cold.nbytes for layer in self.layers if layer is not None)

    def residence(self) -> ExpertPlacement:
        """Return which experts are hot now."""
        hot = tuple(
            loaded if layer is None else layer.hot
            for loaded, layer in zip(self.placement.hot, self.layers, strict=True)
        )
        return replace(self.placement, hot=hot)


def copy_bytes(to: torch.Tensor, source: torch.Tensor) -> None:
    """Begin to copy; the current stream waits for it, the host does not."""
    to.copy_(source, non_blocking=True)


def drop_cold(ids: torch.Tensor, weights: torch.Tensor, is_hot: torch.Tensor) -> torch.Tensor:
    """Return weights `[rows, used]` without those of cold experts; a row's sum stays the same.

    A row all of whose experts are cold gets nothing from them.
    """
    kept = weights * is_hot[ids]
    share = kept.sum(1, keepdim=True)
    grown = kept * (weights.sum(1, keepdim=True) / share)
    return torch.where(share == 0, kept, grown)
