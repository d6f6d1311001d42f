"""What one layer remembers of its sequences: pages of keys and values, or a state."""

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
    """A step's spans and slots as one kind of layer numbers its pages."""

    spans: tuple[Span, ...]
    slots: torch.Tensor  # int64 [rows]


@dataclass(frozen=True, slots=True, eq=False)
class KvPages:
    """One layer's pages, and how sequences come by them.

    A layer that sees everything uses the pages that the engine lends. A layer with a window has
    `ring` pages for each sequence that may run, and uses them in turn: what left the window is
    written over.
    """

    kv: PagedKv
    ring: int = 0  # 0: pages are lent

    def view(self, batch: Batch) -> KvView:
        """Return where a step's rows lie in this layer's pages."""
        if not self.ring:
            return KvView(batch.spans, batch.slots)
        key = ("ring", self.ring)
        return batch.shared(key, lambda: _ring_view(batch, self.ring, self.kv.page_size))

    @property
    def nbytes(self) -> int:
        """The bytes that the pages take."""
        return self.kv.keys.nbytes + self.kv.values.nbytes


def _ring_view(batch: Batch, ring: int, page_size: int) -> KvView:
    spans, slots = [], []
    for span in batch.spans:
        # Made where they are read: a copy to a device would wait for all that runs there.
        device, end = span.pages.device, span.start + span.rows
        rows = torch.arange(span.start, end, device=device)
        pages = torch.arange(-(-end // page_size), device=device) % ring + span.slot * ring
        slots.append(pages[rows // page_size] * page_size + rows % page_size)
        spans.append(replace(span, pages=pages))
    return KvView(tuple(spans), torch.cat(slots))


def allocate_kv(config: AttentionConfig, settings: PlanSettings, device: str) -> KvPages:
    """Allocate one layer's pages; nothing in them is read before it is written."""
    pages = settings.window_pages(config.window) if config.window else settings.pages
    slots = pages * settings.page_size
    keys, values = BY_NAME[settings.k_type], BY_NAME[settings.v_type]
    kv = PagedKv(
        keys=_empty(slots, config.kv_heads, config.head_dim, keys, device),
        values=_empty(slots, config.kv_heads, config.head_dim, values, device),
        k_type=keys,
        v_type=values,
        page_size=settings.page_size,
    )
    return KvPages(kv, ring=pages // settings.parallel if config.window else 0)


def allocate_state(config: DeltaNetConfig, settings: PlanSettings, device: str) -> RecurrentState:
    """Allocate one layer's states; a sequence's first row does not read what is in them."""
    sequences, dim = settings.parallel, config.head_dim
    return RecurrentState(
        memory=torch.empty(sequences, config.value_heads, dim, dim, device=device),
        inputs=torch.empty(sequences, config.conv - 1, config.channels, device=device),
    )


def _empty(slots: int, heads: int, dim: int, quant: QuantType, device: str) -> torch.Tensor:
    if quant.name in PLAIN_TYPES:
        return torch.empty(slots, heads, dim, dtype=PLAIN_TYPES[quant.name], device=device)
    if dim % quant.block:
        raise KernelError(
            f"Heads of {dim} values are not whole {quant} blocks of {quant.block}.",
            hint="Choose f16, bf16 or f32 as --kv-type.",
        )
    return torch.empty(slots, heads, quant.bytes_for(dim), dtype=torch.uint8, device=device)
