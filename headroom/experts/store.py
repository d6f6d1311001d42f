"""ExpertStore: the experts of all layers of a GPU on which some are cold.

`open_store` allocates slots of GPU memory and rows of host memory as the plan says, and chooses who
computes each layer's cold experts. `fill_tiles` and `fill_rows` load the experts. From then on each
layer knows where its experts are (`layer_store.py`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from headroom.errors import DeviceError
from headroom.experts.cache import POLICIES, Policy, policies_for
from headroom.experts.copies import open_copies, pinned_empty
from headroom.experts.layer_store import (
    BlobLayout,
    LayerCache,
    LayerStore,
    SpareBuffers,
    table_bytes,
)
from headroom.experts.placement import ExpertPlacement
from headroom.families.config import ExpertsConfig
from headroom.kernels.cuda import expert_cache
from headroom.kernels.cuda.buffers import ALIGNMENT, aligned
from headroom.kernels.cuda.expert_rules import LEAST_TOKENS
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.kernels.native.module import MISSING
from headroom.layers.host_memory import HostMemory, pin_limits
from headroom.layers.upload import UPLOAD_BUFFERS, HostTiles, matrices_between
from headroom.layers.weights import WeightSource
from headroom.plan.cost_model import ColdSpeeds, DecodeChoice, choose_decode, decode_speeds
from headroom.plan.settings import holds_cold
from headroom.units import counted, gib

log = logging.getLogger(__name__)

FIRST_POLICY: Policy = "counts"  # of a cache that chooses its policy by itself


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
                hot = dict.fromkeys([*layer.pinned, *layer.hot, *placed])
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
            pinned = request.placement.pinned_of(index)
            cache = LayerCache(policy, pinned, words, counts[index], seen[index])
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
    own = [ids for x, ids in zip(layouts, store.placement.hot, strict=True) if x is not None]
    hot, total = sum(map(len, own)), sum(x.experts for x in layouts if x is not None)
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
