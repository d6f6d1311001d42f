"""The caches of layers: pages of keys and values, recurrent states, and snapshots of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from headroom.errors import KernelError
from headroom.families.config import AttentionConfig, DeltaNetConfig
from headroom.formats.quants import BY_NAME, QuantType
from headroom.kernels.ops import PagedKv, RecurrentState, Span
from headroom.kernels.weight import PLAIN_TYPES
from headroom.layers.batch import Batch
from headroom.layers.guesses import Accepted
from headroom.layers.host_memory import HostMemory
from headroom.plan.settings import PlanSettings


@dataclass(frozen=True, slots=True, eq=False)
class KvView:
    """The spans and KV slots of a step, as layers with one kind of page table number them."""

    spans: tuple[Span, ...]
    kv_slots: torch.Tensor  # int64 [rows]


@dataclass(frozen=True, slots=True, eq=False)
class KvPages:
    """The KV pages of one layer, and which pages belong to which sequence.

    A layer without a window uses the pages that the engine lends to a sequence. A layer with a
    window has a ring of `ring` pages for each sequence that may run; tokens that have left the
    window are overwritten.
    """

    kv: PagedKv
    ring: int = 0  # pages of one sequence; 0: the engine lends pages
    window: int = 0  # tokens that a query sees; 0: all

    def view(self, batch: Batch) -> KvView:
        """Return the spans and KV slots of a step in this layer's pages."""
        if not self.ring:
            return KvView(batch.spans, batch.kv_slots)
        key = ("ring", self.ring)
        return batch.shared(key, lambda: _ring_view(batch, self.ring, self.kv.page_size))

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Move the keys and values of the accepted rows of trees to the places of their tokens.

        Those of a chain are there already.
        """
        for one in accepted:
            if one.span.tree is None:
                continue
            page_size, start, device = self.kv.page_size, one.span.start, self.kv.keys.device
            pages = _ring_pages(one.span, self.ring, page_size) if self.ring else one.span.pages
            rows = torch.tensor((one.rows, range(len(one.rows))), device=device) + start
            here, there = pages[rows // page_size] * page_size + rows % page_size
            for kv in (self.kv.keys, self.kv.values):
                kv[there] = kv[here]  # all rows are read before any is written

    @property
    def nbytes(self) -> int:
        """The bytes that the pages take."""
        return self.kv.keys.nbytes + self.kv.values.nbytes


def _ring_view(batch: Batch, ring: int, page_size: int) -> KvView:
    spans, kv_slots = [], []
    for span in batch.spans:
        # Computed on the device that reads them: a copy to a GPU would wait for its kernels.
        rows = torch.arange(span.start, span.start + span.rows, device=span.pages.device)
        pages = _ring_pages(span, ring, page_size)
        kv_slots.append(pages[rows // page_size] * page_size + rows % page_size)
        spans.append(replace(span, pages=pages))
    return KvView(tuple(spans), torch.cat(kv_slots))


def _ring_pages(span: Span, ring: int, page_size: int) -> torch.Tensor:
    """Return the pages of a sequence's tokens, up to the last row of a span, in its ring."""
    count = -(-(span.start + span.rows) // page_size)
    return torch.arange(count, device=span.pages.device) % ring + span.state_slot * ring


def allocate_kv(
    config: AttentionConfig, settings: PlanSettings, device: str, *, drafts: bool = False
) -> KvPages:
    """Allocate the pages of one layer, uninitialised: kernels write before they read.

    The layer of a draft network has one more for each state slot, after those that the engine
    lends.
    """
    pages = settings.draft_pages if drafts else settings.pages
    pages = settings.window_pages(config.window) if config.window else pages
    kv_slots = pages * settings.page_size
    keys, values = BY_NAME[settings.k_type], BY_NAME[settings.v_type]
    kv = PagedKv(
        keys=_empty(kv_slots, config.kv_heads, config.head_dim, keys, device),
        values=_empty(kv_slots, config.kv_heads, config.head_dim, values, device),
        k_type=keys,
        v_type=values,
        page_size=settings.page_size,
    )
    ring = pages // settings.parallel if config.window else 0
    return KvPages(kv, ring, config.window or 0)


def allocate_state(config: DeltaNetConfig, settings: PlanSettings, device: str) -> RecurrentState:
    """Allocate the states of one layer, uninitialised: no sequence's first row reads them."""
    sequences, dim = settings.parallel, config.head_dim
    return RecurrentState(
        memory=torch.empty(sequences, config.value_heads, dim, dim, device=device),
        inputs=torch.empty(sequences, config.conv - 1, config.channels, device=device),
    )


def _empty(kv_slots: int, heads: int, dim: int, quant: QuantType, device: str) -> torch.Tensor:
    if quant.name in PLAIN_TYPES:
        return torch.empty(kv_slots, heads, dim, dtype=PLAIN_TYPES[quant.name], device=device)
    if dim % quant.block:
        raise KernelError(
            f"Heads of {dim} values are not whole {quant} blocks of {quant.block}.",
            hint="Choose f16, bf16 or f32 as --kv-type.",
        )
    return torch.empty(kv_slots, heads, quant.bytes_for(dim), dtype=torch.uint8, device=device)


class CacheMover(Protocol):
    """Moves what caches hold of a sequence; of one stage, or of all."""

    @property
    def needs_snapshots(self) -> bool:
        """Whether some layers have recurrent states or windows, which no page holds."""

    def save_state(self, state_slot: int, snapshot: int, position: int) -> None:
        """Copy the state of a sequence that has `position` tokens to a snapshot's slot."""

    def load_state(self, snapshot: int, state_slot: int, position: int) -> None:
        """Copy a snapshot that was taken after `position` tokens to the state of a sequence."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of keys and values in all layers that the engine lends pages to."""

    def save_page(self, page: int, slot: int) -> None:
        """Copy a page of keys and values to a slot of host memory."""

    def load_page(self, slot: int, page: int) -> None:
        """Copy a slot of host memory to a page of keys and values."""

    def drop_host_pages(self) -> None:
        """Forget all pages in host memory, and give this back to the system until it is used."""

    def drop_snapshots(self) -> None:
        """Forget all snapshots, and give their memory back to the system until it is used."""


class CacheFiles(Protocol):
    """Tells what caches hold as bytes, for files."""

    @property
    def page_bytes(self) -> int:
        """The bytes of one page in all layers that the engine lends pages to."""

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of one snapshot."""

    def read_page(self, page: int) -> torch.Tensor:
        """Return a page as bytes in host memory."""

    def write_page(self, page: int, data: torch.Tensor) -> None:
        """Fill a page with what `read_page` has returned."""

    def read_snapshot(self, snapshot: int) -> torch.Tensor:
        """Return a snapshot as bytes in host memory."""

    def write_snapshot(self, snapshot: int, data: torch.Tensor) -> None:
        """Fill a snapshot with what `read_snapshot` has returned."""


class StageCaches:
    """The caches of a stage's layers, and host memory for snapshots of them and for pages.

    A snapshot has what recurrent layers and layers with a window hold of one sequence. Pages that
    the engine lends are not part of it: those that have to leave the device have slots of their own
    in host memory. Copies are queued behind the steps launched so far, and
    steps launched later see them.
    """

    def __init__(
        self,
        pages: Sequence[KvPages],
        states: Sequence[torch.Tensor],  # each [state slots, ...]
        snapshots: int,
        host_pages: int = 0,
        *,
        pin: bool,
    ) -> None:
        self._lent = [kv for own in pages if not own.ring for kv in (own.kv.keys, own.kv.values)]
        self._page_size = pages[0].kv.page_size if pages else 0
        self._states = list(states)
        self._rings = [_Ring(own) for own in pages if own.ring]
        one = [tensor[0] for tensor in self._states]
        one += [part for ring in self._rings for part in ring.covered]
        self._snapshot_bytes = sum(part.nbytes for part in one)
        self.nbytes = size = snapshots * self._snapshot_bytes
        self._memory = HostMemory(size, pin=pin) if size else None
        memory = torch.empty(0, dtype=torch.uint8) if self._memory is None else self._memory.bytes
        saved = _cut(memory, one, snapshots)
        self._saved = saved[: len(self._states)]
        for number, ring in enumerate(self._rings):
            at = len(self._states) + 2 * number
            ring.keys, ring.values = saved[at], saved[at + 1]
        self.host_nbytes = size = host_pages * self.page_bytes
        self._host_memory = HostMemory(size, pin=pin) if size else None
        if self._host_memory is not None:
            memory = self._host_memory.bytes
        one = [kv[: self._page_size] for kv in self._lent]
        self._hosted = _cut(memory, one, host_pages) if size else []

    @property
    def needs_snapshots(self) -> bool:
        """Whether some layers hold something that no page holds."""
        return bool(self._states or self._rings)

    @torch.inference_mode()
    def save_state(self, state_slot: int, snapshot: int, position: int) -> None:
        """Copy the state of a sequence that has `position` tokens to a snapshot."""
        for saved, state in zip(self._saved, self._states, strict=True):
            saved[snapshot].copy_(state[state_slot], non_blocking=True)
        for ring in self._rings:
            for there, here in ring.pieces(state_slot, snapshot, position):
                there.copy_(here, non_blocking=True)

    @torch.inference_mode()
    def load_state(self, snapshot: int, state_slot: int, position: int) -> None:
        """Copy a snapshot that was taken after `position` tokens to the state of a sequence."""
        for saved, state in zip(self._saved, self._states, strict=True):
            state[state_slot].copy_(saved[snapshot], non_blocking=True)
        for ring in self._rings:
            for there, here in ring.pieces(state_slot, snapshot, position):
                here.copy_(there, non_blocking=True)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of keys and values in all layers that the engine lends pages to."""
        size = self._page_size
        for kv in self._lent:
            kv[target * size : (target + 1) * size].copy_(kv[source * size : (source + 1) * size])

    @torch.inference_mode()
    def save_page(self, page: int, slot: int) -> None:
        """Copy a page of keys and values to a slot of host memory."""
        for hosted, kv in zip(self._hosted, self._page(page), strict=True):
            hosted[slot].copy_(kv, non_blocking=True)

    @torch.inference_mode()
    def load_page(self, slot: int, page: int) -> None:
        """Copy a slot of host memory to a page of keys and values."""
        for hosted, kv in zip(self._hosted, self._page(page), strict=True):
            kv.copy_(hosted[slot], non_blocking=True)

    def drop_host_pages(self) -> None:
        """Forget all pages in host memory, and give this back to the system until it is used."""
        self._drop(self._host_memory)

    def drop_snapshots(self) -> None:
        """Forget all snapshots, and give their memory back to the system until it is used."""
        self._drop(self._memory)

    def _drop(self, memory: HostMemory | None) -> None:
        for kv in (*self._lent, *self._states):
            if kv.device.type == "cuda":
                torch.cuda.synchronize(kv.device)
                break
        if memory is not None:
            memory.drop()

    @property
    def page_bytes(self) -> int:
        """The bytes of one page in all layers that the engine lends pages to."""
        return sum(kv[: self._page_size].nbytes for kv in self._lent)

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of one snapshot."""
        return self._snapshot_bytes

    @torch.inference_mode()
    def read_page(self, page: int) -> torch.Tensor:
        """Return a page as bytes in host memory; any thread may ask."""
        return _as_bytes(self._page(page))

    @torch.inference_mode()
    def write_page(self, page: int, data: torch.Tensor) -> None:
        """Fill a page with what `read_page` has returned."""
        _fill(self._page(page), data)

    @torch.inference_mode()
    def read_snapshot(self, snapshot: int) -> torch.Tensor:
        """Return a snapshot as bytes in host memory; any thread may ask."""
        for state in self._states + self._lent:
            if state.is_cuda:  # its copy to host memory may be under way
                torch.cuda.current_stream(state.device).synchronize()
                break
        return _as_bytes([saved[snapshot] for saved in self._all_saved])

    @torch.inference_mode()
    def write_snapshot(self, snapshot: int, data: torch.Tensor) -> None:
        """Fill a snapshot with what `read_snapshot` has returned."""
        _fill([saved[snapshot] for saved in self._all_saved], data)

    def _page(self, page: int) -> list[torch.Tensor]:
        size = self._page_size
        return [kv[page * size : (page + 1) * size] for kv in self._lent]

    @property
    def _all_saved(self) -> list[torch.Tensor]:
        return [*self._saved, *(x for ring in self._rings for x in (ring.keys, ring.values))]


class _Ring:
    """The pages of a layer with a window, and host memory for those that a window covers."""

    keys: torch.Tensor  # of all snapshots
    values: torch.Tensor

    def __init__(self, pages: KvPages) -> None:
        self._pages, self._size = pages, pages.kv.page_size
        self._covered = ring_snapshot_pages(pages.window, pages.ring, self._size)

    @property
    def covered(self) -> list[torch.Tensor]:
        """Keys and values of the shape that one snapshot has."""
        rows = self._covered * self._size
        return [self._pages.kv.keys[:rows], self._pages.kv.values[:rows]]

    def pieces(
        self, state_slot: int, snapshot: int, position: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parts of a snapshot, and where the sequence has them in its ring."""
        end = -(-position // self._size)
        first = max(0, end - self._covered)
        ring, size = self._pages.ring, self._size
        kinds = ((self.keys, self._pages.kv.keys), (self.values, self._pages.kv.values))
        for saved, kv in kinds:
            at = first
            while at < end:
                length = min(end - at, ring - at % ring)  # to the end of the ring
                there = (at - first) * size
                here = (state_slot * ring + at % ring) * size
                yield (
                    saved[snapshot, there : there + length * size],
                    kv[here : here + length * size],
                )
                at += length


def ring_snapshot_pages(window: int, ring: int, page_size: int) -> int:
    """Return the pages of a ring that a snapshot has: those that the last window touches."""
    return min(ring, -(-window // page_size) + 1)


def _as_bytes(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if not parts:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([part.contiguous().cpu().flatten().view(torch.uint8) for part in parts])


def _fill(parts: Sequence[torch.Tensor], data: torch.Tensor) -> None:
    pieces = torch.split(data, [part.nbytes for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        part.copy_(piece.clone().view(part.dtype).view(part.shape))


def _cut(memory: torch.Tensor, shapes: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Return memory as `count` tensors of each shape, one shape after the other."""
    sizes = [count * shape.nbytes for shape in shapes]
    return [
        part.view(shape.dtype).view(count, *shape.shape)
        for part, shape in zip(torch.split(memory, sizes), shapes, strict=True)
    ]
