"""open_store(): memory for hot and cold experts as the plan says; fill_*(): experts into it."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from headroom.errors import DeviceError
from headroom.experts.copies import open_copies, pinned_empty
from headroom.experts.cost import Choice, ColdPath, choose, forced
from headroom.experts.placement import ExpertPlacement
from headroom.experts.residence import table_bytes
from headroom.experts.store import BlobLayout, ExpertStore, LayerStore, Spare
from headroom.experts.stream_rule import runs
from headroom.families.config import ExpertsConfig
from headroom.kernels.cuda.sizes import ALIGNMENT, tile_bytes
from headroom.layers.pieces import matrices_between
from headroom.layers.pinned import HostMemory, pin_limits
from headroom.layers.upload import SLOTS, TilesBack
from headroom.layers.weights import WeightSource
from headroom.plan.cold_speeds import ColdSpeeds
from headroom.plan.experts import aligned, holds_cold
from headroom.units import gib

log = logging.getLogger(__name__)


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
    parts = [part[0] for part in get.found_experts(config.experts)]
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
    choices = _choices(layouts, request, memory)
    slab = torch.empty(_needed(layouts, slots), dtype=torch.uint8, device=device)
    staging = torch.empty(request.staging_bytes, dtype=torch.uint8, device=device)
    on_host = memory.bytes[len(memory) - largest :]
    table = pinned_empty((max(table_bytes(x.experts) for x in layouts if x),), torch.uint8)
    copies = open_copies(torch.device(device))
    spare = Spare(staging[:largest], on_host, staging[aligned(largest) :], table, copies)
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


def _choices(
    layouts: Sequence[BlobLayout | None], request: StoreRequest, memory: HostMemory
) -> list[Choice | None]:
    """Return who computes the cold experts of each layer; None where it has no experts."""
    tiles = any(layout is not None and layout.tiles for layout in layouts)
    speeds = _check_paths(request, memory, tiles)
    choices: list[Choice | None] = []
    for index, layout in enumerate(layouts):
        if layout is None:
            choices.append(None)
        elif request.cold == "auto":
            hits = request.placement.hit_rate(index, layout.experts)
            choices.append(choose(speeds, layout.nbytes, layout.used, hits))
        else:
            path = cast(ColdPath, request.cold)
            choices.append(forced(path, layout.used))
    return choices


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
    """Say who computes cold experts, and in how many layers where they differ."""
    words = {"gpu": "read by the GPU", "cpu": "computed by the CPU", "drop": "left out"}
    found = Counter(
        f"{words[x.path]}{' and read by the GPU' if x.path == 'cpu' and any(x.choice.left) else ''}"
        for x in store.layers
        if x is not None
    )
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{what} in {count} layers" for what, count in found.items())


def _check_paths(request: StoreRequest, memory: HostMemory, tiles: bool) -> ColdSpeeds:
    """Refuse a way that this memory or machine has not; return the speeds of those it has.

    `tiles`, which the GPU's own kernels read, only the C++ kernels of a CPU read as well.
    """
    wanted, speeds = request.cold, request.speeds
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
    nobody = tiles and not memory.pinned and not speeds.cpu
    if nobody and wanted != "drop":
        raise DeviceError(
            f"{gib(len(memory))} of cold experts are not pinned, and only the CPU could compute "
            "them, and its C++ kernels were not built.",
            hint="Free host memory, or build the kernels; see headroom doctor.",
        )
    return speeds if memory.pinned else replace(speeds, link=0.0)


def fill_tiles(store: LayerStore, get: WeightSource, rooms: torch.Tensor) -> None:
    """Bring all experts of a layer to their places in tiles; `rooms` are the staging buffers.

    Of experts that have no place, nothing is read.
    """
    assert get.upload is not None
    only_hot = store.addresses * store.is_hot[:, None]
    each = len(rooms) // SLOTS // ALIGNMENT * ALIGNMENT
    quarters = rooms[: SLOTS * each].view(SLOTS, each)
    starts, sizes = store.blobs.starts, store.sizes
    blobs = [store.cold_of(expert) for expert in range(store.experts)]
    held = runs(range(store.experts) if len(store.cold) else store.hot)
    for number, part in enumerate(get.found_experts(store.experts)):
        begin, size = starts[number], sizes[number]
        places = [None if blob is None else blob[begin : begin + size] for blob in blobs]
        for first, end in held:
            back = TilesBack(quarters, places[first:end]) if len(store.cold) else None
            some = matrices_between(part, first, end)
            get.upload.tiles_at(some, only_hot[first:end, number], back)
    _count(store, get)


def fill_rows(store: LayerStore, get: WeightSource) -> None:
    """Copy experts of a layer to their places as the file has them; others are not read."""
    for expert, parts in enumerate(zip(*get.experts(store.experts).parts, strict=True)):
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
