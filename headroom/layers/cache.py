"""What one layer remembers of its sequences: pages of keys and values."""

import torch

from headroom.errors import KernelError
from headroom.formats.quants import BY_NAME, QuantType
from headroom.kernels.ops import PagedKv
from headroom.kernels.weight import PLAIN_TYPES
from headroom.layers.config import AttentionConfig


def allocate_kv(
    config: AttentionConfig, pages: int, page_size: int, k_type: str, v_type: str, device: str
) -> PagedKv:
    """Allocate one layer's pages; nothing in them is read before it is written."""
    slots = pages * page_size
    keys, values = BY_NAME[k_type], BY_NAME[v_type]
    return PagedKv(
        keys=_empty(slots, config.kv_heads, config.head_dim, keys, device),
        values=_empty(slots, config.kv_heads, config.head_dim, values, device),
        k_type=keys,
        v_type=values,
        page_size=page_size,
    )


def kv_bytes(cache: PagedKv) -> int:
    """Return the bytes that a layer's pages take."""
    return cache.keys.nbytes + cache.values.nbytes


def _empty(slots: int, heads: int, dim: int, quant: QuantType, device: str) -> torch.Tensor:
    if quant.name in PLAIN_TYPES:
        return torch.empty(slots, heads, dim, dtype=PLAIN_TYPES[quant.name], device=device)
    if dim % quant.block:
        raise KernelError(
            f"Heads of {dim} values are not whole {quant} blocks of {quant.block}.",
            hint="Choose f16, bf16 or f32 as --kv-type.",
        )
    return torch.empty(slots, heads, quant.bytes_for(dim), dtype=torch.uint8, device=device)
