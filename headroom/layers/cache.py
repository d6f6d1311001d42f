"""The cache of one layer: pages of keys and values, or recurrent states."""

from dataclasses import dataclass, replace

import torch

from headroom.errors import KernelError
from headroom.families.config import AttentionConfig, DeltaNetConfig
from headroom.formats.quants import BY_NAME, QuantType
from headroom.kernels.ops import PagedKv, RecurrentState, Span
from headroom.kernels.weight import PLAIN_TYPES
from headroom.layers.batch import Batch
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

    def view(self, batch: Batch) -> KvView:
        """Return the spans and KV slots of a step in this layer's pages."""
        if not self.ring:
            return KvView(batch.spans, batch.kv_slots)
        key = ("ring", self.ring)
        return batch.shared(key, lambda: _ring_view(batch, self.ring, self.kv.page_size))

    @property
    def nbytes(self) -> int:
        """The bytes that the pages take."""
        return self.kv.keys.nbytes + self.kv.values.nbytes


def _ring_view(batch: Batch, ring: int, page_size: int) -> KvView:
    spans, kv_slots = [], []
    for span in batch.spans:
        # Computed on the device that reads them: a copy to a GPU would wait for its kernels.
        device, end = span.pages.device, span.start + span.rows
        rows = torch.arange(span.start, end, device=device)
        pages = torch.arange(-(-end // page_size), device=device) % ring + span.state_slot * ring
        kv_slots.append(pages[rows // page_size] * page_size + rows % page_size)
        spans.append(replace(span, pages=pages))
    return KvView(tuple(spans), torch.cat(kv_slots))


def allocate_kv(config: AttentionConfig, settings: PlanSettings, device: str) -> KvPages:
    """Allocate the pages of one layer, uninitialised: kernels write before they read."""
    pages = settings.window_pages(config.window) if config.window else settings.pages
    kv_slots = pages * settings.page_size
    keys, values = BY_NAME[settings.k_type], BY_NAME[settings.v_type]
    kv = PagedKv(
        keys=_empty(kv_slots, config.kv_heads, config.head_dim, keys, device),
        values=_empty(kv_slots, config.kv_heads, config.head_dim, values, device),
        k_type=keys,
        v_type=values,
        page_size=settings.page_size,
    )
    return KvPages(kv, ring=pages // settings.parallel if config.window else 0)


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
