"""Attention: grouped-query attention over paged keys and values."""

from dataclasses import replace

import torch

from headroom.kernels.ops import Attention as AttentionOp
from headroom.kernels.ops import KvWrite, PagedKv
from headroom.kernels.ops import Rope as RopeOp
from headroom.kernels.registry import pick
from headroom.layers.batch import Batch
from headroom.layers.config import AttentionConfig
from headroom.layers.linear import Linear
from headroom.layers.rope import rope_tables
from headroom.layers.weights import WeightSource


class Attention:
    """Projects rows to queries, keys and values, caches the latter two, and attends."""

    def __init__(self, config: AttentionConfig, get: WeightSource, cache: PagedKv) -> None:
        self._config = config
        self._cache = cache
        self._q = Linear(get("attn.q", pair_rows(config, config.heads)), get.case)
        self._k = Linear(get("attn.k", pair_rows(config, config.kv_heads)), get.case)
        self._v = Linear(get("attn.v"), get.case)
        self._out = Linear(get("attn.out"), get.case)
        case = replace(get.case, k_type=cache.k_type.name, v_type=cache.v_type.name)
        self._rope: RopeOp = pick("rope", case).run
        self._write: KvWrite = pick("kv_write", case).run
        self._attend: AttentionOp = pick("attention", case).run

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the block's output for normed rows; their keys and values are cached."""
        config = self._config
        rows = x.shape[0]
        cos, sin = rope_tables(config.rope, batch)
        queries = self._q(x).view(rows, config.heads, config.head_dim)
        keys = self._k(x).view(rows, config.kv_heads, config.head_dim)
        values = self._v(x).view(rows, config.kv_heads, config.head_dim)
        self._write(self._cache, batch.slots, self._rope(keys, cos, sin), values)
        queries = self._rope(queries, cos, sin)
        mixed = self._attend(queries, self._cache, batch.spans, config.scale, config.window)
        return self._out(mixed.flatten(1))


def pair_rows(config: AttentionConfig, heads: int) -> torch.Tensor | None:
    """Return the row order that turns interleaved rotary pairs into halves, where they are."""
    if not config.interleaved:
        return None
    rows = torch.arange(heads * config.head_dim)
    return rows.view(heads, config.head_dim // 2, 2).transpose(1, 2).flatten()
