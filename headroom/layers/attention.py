"""Attention: grouped-query attention over paged keys and values, with rotary positions."""

from dataclasses import replace
from functools import cache

import torch

from headroom.families.config import AttentionConfig, RopeConfig
from headroom.kernels.ops import AttentionOp, KvWriteOp, RopeOp
from headroom.kernels.reference.elementwise import sigmoid, softplus
from headroom.kernels.registry import pick
from headroom.layers.batch import Batch
from headroom.layers.cache import KvPages
from headroom.layers.modules import Linear, RmsNorm
from headroom.layers.step_timing import part_of_step
from headroom.layers.weights import WeightSource


class Attention:
    """Projects rows to queries, keys and values, caches keys and values, and attends."""

    def __init__(
        self, config: AttentionConfig, eps: float, get: WeightSource, pages: KvPages
    ) -> None:
        self._config = config
        self._pages = pages
        assert not (config.biases and (config.interleaved or config.gate == "query"))
        self._q = _linear(get, "attn.q", query_rows(config), bias=config.biases)
        self._out = _linear(get, "attn.out", bias=config.out_bias)
        self._sinks = get.vector("attn.sinks") if config.sinks else None
        self._keys = None if config.shares is not None else _Keys(config, eps, get, pages)
        self._q_norm = _head_norm(get, "attn.q_norm", eps) if config.head_norms else None
        self._gate = (
            Linear(get("attn.gate"), get.case) if config.gate in ("head", "element") else None
        )
        case = replace(
            get.case,
            k_type=pages.kv.k_type.name,
            v_type=pages.kv.v_type.name,
            sinks=config.sinks,
        )
        self._rope: RopeOp = pick("rope", case).run
        self._attend: AttentionOp = pick("attention", case).run

    @part_of_step("attention")
    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return attention's output for normed rows, and cache their keys and values."""
        config = self._config
        cos, sin = rope_tables(config.rope, batch)
        if self._keys is not None:
            self._keys.write(x, batch, cos, sin)
        projected = self._q(x)
        width = config.heads * config.head_dim
        queries = projected[:, :width].reshape(len(x), config.heads, config.head_dim)
        if self._q_norm is not None:
            queries = self._q_norm(queries)
        queries = self._rope(queries, cos, sin)
        spans = self._pages.view(batch).spans
        shape = (config.scale, config.window)
        if self._sinks is None:
            mixed = self._attend(queries, self._pages.kv, spans, *shape)
        else:
            mixed = self._attend(queries, self._pages.kv, spans, *shape, self._sinks)
        if config.gate == "query":
            mixed = mixed.flatten(1) * sigmoid(projected[:, width:])
        elif self._gate is not None:
            gates = softplus(self._gate(x)).view(len(x), config.heads, -1)
            mixed = mixed * gates
        return self._out(mixed.flatten(1))

    def remember(self, x: torch.Tensor, batch: Batch) -> None:
        """Cache the keys and values of normed rows whose output nobody reads."""
        assert self._keys is not None
        self._keys.write(x, batch, *rope_tables(self._config.rope, batch))


class _Keys:
    """Projects and caches keys and values; a layer that shares a cache has no such part."""

    def __init__(
        self, config: AttentionConfig, eps: float, get: WeightSource, pages: KvPages
    ) -> None:
        self._config = config
        self._pages = pages
        self._k = _linear(get, "attn.k", pair_rows(config, config.kv_heads), bias=config.biases)
        self._v = None if config.keys_are_values else _linear(get, "attn.v", bias=config.biases)
        self._k_norm = _head_norm(get, "attn.k_norm", eps) if config.head_norms else None
        self._v_norm = None
        if config.value_norm:
            ones = torch.ones(config.head_dim, device=get.case.torch_device)
            self._v_norm = RmsNorm(ones, eps, get.case)
        case = replace(get.case, k_type=pages.kv.k_type.name, v_type=pages.kv.v_type.name)
        self._rope: RopeOp = pick("rope", case).run
        self._write: KvWriteOp = pick("kv_write", case).run

    def write(self, x: torch.Tensor, batch: Batch, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Cache the keys and values of normed rows."""
        heads = (len(x), self._config.kv_heads, self._config.head_dim)
        keys = self._k(x).view(heads)
        values = keys if self._v is None else self._v(x).view(heads)
        if self._k_norm is not None:
            keys = self._k_norm(keys)
        if self._v_norm is not None:
            values = self._v_norm(values)
        kv_slots = self._pages.view(batch).kv_slots
        self._write(self._pages.kv, kv_slots, self._rope(keys, cos, sin), values)


def _linear(
    get: WeightSource, name: str, order: torch.Tensor | None = None, *, bias: bool
) -> Linear:
    return Linear(get(name, order), get.case, get.vector(f"{name}_bias") if bias else None)


def _head_norm(get: WeightSource, name: str, eps: float) -> RmsNorm:
    return RmsNorm(get.norm(name), eps, get.case)


def query_rows(config: AttentionConfig) -> torch.Tensor | None:
    """Return the row order of the query matrix that kernels expect; None: the file's own order.

    With gates, all queries come before all gates. Rotary pairs become halves, see `pair_rows`.
    """
    if config.gate != "query":
        return pair_rows(config, config.heads)
    rows = torch.arange(2 * config.heads * config.head_dim)
    return rows.view(config.heads, 2, config.head_dim).transpose(0, 1).flatten()


def pair_rows(config: AttentionConfig, heads: int) -> torch.Tensor | None:
    """Return the row order that makes interleaved rotary pairs halves; None: they are halves."""
    if not config.interleaved:
        return None
    rows = torch.arange(heads * config.head_dim)
    return rows.view(heads, config.head_dim // 2, 2).transpose(1, 2).flatten()


def rope_tables(config: RopeConfig, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin `[rows, dims / 2]`; layers with the same rotation share the tables."""
    return batch.shared(config, lambda: _make_tables(config, batch.positions))


def _make_tables(config: RopeConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None].float() * _frequencies(config, positions.device)
    return angles.cos() * config.scale, angles.sin() * config.scale


@cache
def _frequencies(config: RopeConfig, device: torch.device) -> torch.Tensor:
    exponent = torch.arange(0, config.dims, 2, dtype=torch.float32) / config.dims
    frequency = 1.0 / config.theta**exponent
    if config.divisors:
        frequency = frequency / torch.tensor(config.divisors)
    return frequency.to(device)
