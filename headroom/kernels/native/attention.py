"""Attention over paged keys and values on the CPU."""

from dataclasses import dataclass

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.native import module
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.ops import Case, PagedKv, Span
from headroom.kernels.reference.quantise import refuses_cache
from headroom.kernels.weight import PLAIN_TYPES


def refuses(case: Case) -> str | None:
    """Return why a case cannot run here; None if it can."""
    return module.refuses(case) or refuses_cache(case)


def write_kv(
    cache: PagedKv, kv_slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Cache keys and values at their KV slots, in the types of the cache."""
    rows, heads, dim = keys.shape
    keys, values, kv_slots = keys.contiguous(), values.contiguous(), kv_slots.contiguous()
    POOL.ops.write_kv(
        cache_view(cache), heads, dim, kv_slots.data_ptr(), keys.data_ptr(), values.data_ptr(), rows
    )


def attention(
    queries: torch.Tensor, cache: PagedKv, spans: tuple[Span, ...], scale: float, window: int
) -> torch.Tensor:
    """Return the attention of every span's rows over their sequence's cached tokens."""
    queries = queries.contiguous()
    rows, heads, dim = queries.shape
    table = SpanTable.of(spans)
    out = torch.empty(rows, heads, dim)
    POOL.ops.attention(
        cache_view(cache), (heads, cache.keys.shape[1], dim, window), scale, queries.data_ptr(),
        table.rows.data_ptr(), len(spans), table.pages.data_ptr(), table.trees.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """The spans of a step as the C++ module reads them."""

    # int64 [spans, 5]: first row, rows, start, offsets of its pages and of its tree (-1: no tree)
    rows: torch.Tensor
    pages: torch.Tensor  # int64: the pages of all spans, one after another
    trees: torch.Tensor  # uint8: the trees of all spans, one after another

    @classmethod
    def of(cls, spans: tuple[Span, ...]) -> "SpanTable":
        """Return the table of some spans."""
        rows, trees, page, byte = [], [], 0, 0
        for span in spans:
            rows.append(
                (span.first_row, span.rows, span.start, page, -1 if span.tree is None else byte)
            )
            page += len(span.pages)
            if span.tree is not None:
                trees.append(span.tree.flatten().view(torch.uint8))
                byte += span.tree.numel()
        return cls(
            torch.tensor(rows, dtype=torch.int64),
            torch.cat([span.pages for span in spans]),
            torch.cat(trees) if trees else torch.empty(0, dtype=torch.uint8),
        )


def cache_view(cache: PagedKv) -> object:
    """Return the C++ view of a layer's cache."""
    _, heads, _ = cache.keys.shape
    view: object = MODULE.KvCache(
        cache.keys.data_ptr(), cache.k_type.ggml_id, _head_bytes(cache.keys, cache.k_type),
        cache.values.data_ptr(), cache.v_type.ggml_id, _head_bytes(cache.values, cache.v_type),
        heads, cache.page_size,
    )  # fmt: skip
    return view


def _head_bytes(stored: torch.Tensor, quant: QuantType) -> int:
    return stored.shape[-1] * (stored.element_size() if quant.name in PLAIN_TYPES else 1)
