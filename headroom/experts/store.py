"""Residency: where each expert of a layer is, and the table that tells a GPU's kernels."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from headroom.errors import DeviceError
from headroom.experts.copies import CopyQueue, Mark, open_copies, pinned_empty
from headroom.experts.placement import ExpertPlacement
from headroom.experts.telemetry import ColdCosts
from headroom.families.config import ExpertsConfig
from headroom.kernels.cuda.buffers import ALIGNMENT, aligned
from headroom.kernels.cuda.experts import PARTS, Kinds
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.kernels.native.module import MISSING
from headroom.layers.host_memory import HostMemory, pin_limits
from headroom.layers.upload import BUFFERS, HostTiles, matrices_between
from headroom.layers.weights import WeightSource
from headroom.plan.cost_model import (
    ColdPath,
    ColdSpeeds,
    DecodeChoice,
    choose_decode,
    decode_speeds,
)
from headroom.plan.settings import holds_cold
from headroom.units import gib

log = logging.getLogger(__name__)

NOWHERE, SPARE = -1, -2  # instead of a row: not on this side; in this side's spare buffer


@dataclass(frozen=True, slots=True, eq=False)
class Residency:
    """Which row of either side each expert is in; hot ones may have one of both.

    Cold ones that are left out may have none.
    """

    slot: torch.Tensor  # int64 [experts]
    row: torch.Tensor  # int64 [experts]

    @property
    def is_hot(self) -> torch.Tensor:
        """Which experts are hot."""
        return self.slot != NOWHERE

    def with_moved(self, slots: dict[int, int], rows: dict[int, int]) -> "Residency":
        """Return where all are when these experts have other slots and rows."""
        slot, row = self.slot.clone(), self.row.clone()
        for expert, place in slots.items():
            slot[expert] = place
        for expert, place in rows.items():
            row[expert] = place
        return Residency(slot, row)


def initial_residency(experts: int, hot: Sequence[int], rows: int) -> Residency:
    """Return where experts are loaded to: with a row for each, hot ones have one as well.

    Without rows, cold experts are nowhere.
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
    """Return the addresses of rows of a side, or of its spare buffer."""
    apart = side.shape[1]
    return torch.where(rows == SPARE, spare.data_ptr(), side.data_ptr() + rows * apart)


def table_bytes(experts: int) -> int:
    """Return the bytes of a layer's table: addresses, and flags of hot experts."""
    return experts * (8 * PARTS + 4)


def table_views(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses int64 [experts, PARTS] and flags int32 [experts] in one piece of memory."""
    experts = len(table) // table_bytes(1)
    end = 8 * PARTS * experts
    addresses = table[:end].view(torch.int64).view(experts, PARTS)
    return addresses, table[end:].view(torch.int32)


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
class SpareBuffers:
    """Room for one expert on each side, shared by all layers of a device, and for more."""

    device: torch.Tensor  # uint8 [bytes]
    host: torch.Tensor
    staging: torch.Tensor  # uint8 on the device, for cold experts on their way
    table: torch.Tensor  # uint8 in host memory, pinned: the next that a layer gets
    copies: CopyQueue  # of exchanges, beside steps
    exchange: "OpenExchange | None" = None  # that uses it
    told: Mark | None = None  # when the table there has been read


@dataclass(slots=True, eq=False)
class OpenExchange:
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
        spare: SpareBuffers,
        memory: HostMemory,
        choice: DecodeChoice,
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
        self._residence = initial_residency(blobs.experts, sorted(hot), len(cold))
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
        spare.exchange = OpenExchange(self, promoted, demoted, slot, row, copied)

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

    def _under_way(self) -> OpenExchange:
        exchange = self._spare.exchange
        if exchange is None or exchange.layer is not self:
            raise ValueError("no exchange of this layer was begun")
        return exchange

    def _move(self, exchange: OpenExchange) -> None:
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

    def _publish(self, residence: Residency) -> None:
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
    spare: SpareBuffers
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

    def current_placement(self) -> ExpertPlacement:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """What a store is to hold, and how."""

    placement: ExpertPlacement
    cold: str  # "auto", or a ColdPath
    speeds: ColdSpeeds  # that "auto" goes by
    pin: bool
    keep_copy: bool  # of hot experts in host memory
    staging_bytes: int  # of the buffers for cold experts on their way, and of the spare one

    def cold_rows(self, layout: BlobLayout | None, hot: int) -> int:
        """Return how many experts of a layer with so many hot ones have a place in host memory."""
        if layout is None or hot == layout.experts or not holds_cold(self.cold, self.keep_copy):
            return 0
        return layout.experts if self.keep_copy else layout.experts - hot


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
    # Layers without cold experts are loaded apart.
    mixed = [x is not None and n < x.experts for x, n in zip(layouts, hot, strict=True)]
    slots = [n if some else 0 for n, some in zip(hot, mixed, strict=True)]
    cold = [request.cold_rows(x, n) for x, n in zip(layouts, hot, strict=True)]
    sizes = (x.nbytes for x, n in zip(layouts, cold, strict=True) if x is not None and n)
    largest = max(sizes, default=0)
    memory = HostMemory(_needed(layouts, cold) + largest, pin=request.pin)
    _check_memory(layouts, request, memory)
    choices = decode_choices(layouts, request, pinned=memory.pinned)
    slab = torch.empty(_needed(layouts, slots), dtype=torch.uint8, device=device)
    staging = torch.empty(request.staging_bytes, dtype=torch.uint8, device=device)
    on_host = memory.bytes[len(memory) - largest :]
    table = pinned_empty((max(table_bytes(x.experts) for x in layouts if x),), torch.uint8)
    copies = open_copies(torch.device(device))
    spare = SpareBuffers(staging[:largest], on_host, staging[aligned(largest) :], table, copies)
    slot_rows, cold_rows = _cut(slab, layouts, slots), _cut(memory.bytes, layouts, cold)
    layers = tuple(
        None
        if layout is None or choice is None or not mixed[index]
        else LayerStore(
            layout, hot_ids[index], slot_rows[index], cold_rows[index], spare, memory, choice
        )
        for index, (layout, choice) in enumerate(zip(layouts, choices, strict=True))
    )
    store = ExpertStore(layers, request.placement, spare, memory)
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
    found = Counter(_path_words(x.choice) for x in store.layers if x is not None)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{words} in {count} layers" for words, count in found.items())


def _path_words(choice: DecodeChoice) -> str:
    words = {"gpu": "read by the GPU", "cpu": "computed by the CPU", "drop": "left out"}
    shared = choice.path == "cpu" and any(choice.in_place)
    return words[choice.path] + (" and read by the GPU" if shared else "")


def _check_memory(
    layouts: Sequence[BlobLayout | None], request: StoreRequest, memory: HostMemory
) -> None:
    """Refuse a setting that this host memory or machine cannot serve; warn of slower ways.

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
            "they are left out, and swaps come only between requests"
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


def fill_tiles(store: LayerStore, get: WeightSource, rooms: torch.Tensor) -> None:
    """Bring all experts of a layer to their places in tiles; `rooms` are the staging buffers.

    Of experts that have no place, nothing is read.
    """
    assert get.upload is not None
    only_hot = store.addresses * store.is_hot[:, None]
    each = len(rooms) // BUFFERS // ALIGNMENT * ALIGNMENT
    quarters = rooms[: BUFFERS * each].view(BUFFERS, each)
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
    """Copy experts of a layer to their places as the file has them; others are not read."""
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
    """Return the bytes of so many experts of each layer, each layer's aligned."""
    return sum(
        aligned(x.nbytes * n) for x, n in zip(layouts, experts, strict=True) if x is not None
    )


def _cut(
    memory: torch.Tensor, layouts: Sequence[BlobLayout | None], experts: Sequence[int]
) -> list[torch.Tensor]:
    """Return each layer's experts `[experts, bytes]` in one piece of memory."""
    cut, at = [], 0
    for layout, number in zip(layouts, experts, strict=True):
        size = 0 if layout is None else layout.nbytes
        cut.append(memory[at : at + number * size].view(number, size))
        at += aligned(number * size)
    return cut


def runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and end of the neighbours among ascending rows: each is one copy."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return found
