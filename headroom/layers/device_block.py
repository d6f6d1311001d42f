"""Layers on a GPU: attention, gated linear attention and feed-forward parts by fused kernels.

Each part reads the residual stream `[rows, hidden]` in float32 and adds its answer to it.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from headroom.families.config import AttentionConfig, DeltaNetConfig, FfnConfig
from headroom.kernels.cuda import attention, delta_net, prefill, scratch, small
from headroom.kernels.cuda.attention import DecodeShape, Gate, HeadNorms, Projected
from headroom.kernels.cuda.chunks import span_tables
from headroom.kernels.cuda.compile import refuses_device
from headroom.kernels.cuda.matmul import Gates, RowNorm, normed_head_rows
from headroom.kernels.cuda.narrow import narrow_type, refuses_type
from headroom.kernels.ops import RecurrentState, StepTables
from headroom.layers.attention import pair_rows, query_rows
from headroom.layers.batch import Batch
from headroom.layers.cache import KvPages
from headroom.layers.delta_net import small_weights
from headroom.layers.device_rows import (
    DeviceRows,
    add_answers,
    few_rows,
    gated_heads,
    gated_rows,
    normed_rows,
    plain_rows,
    stack,
)
from headroom.layers.parts import part_of_step
from headroom.layers.rope import rope_tables
from headroom.layers.side import SideInputs
from headroom.layers.weights import WeightSource

__all__ = [
    "DeviceAttention",
    "DeviceBatch",
    "DeviceBlock",
    "DeviceDelta",
    "DeviceMlp",
    "DeviceScale",
    "DeviceSide",
    "Part",
    "RowNorm",  # the kernels' own
    "StepTables",  # the kernels' own view of a batch
    "fits_device",
]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch(Batch):
    """A batch whose tensors are on the GPU, with the tables that kernels read."""

    tables: dict[int, StepTables] = field(kw_only=True)  # by the ring of a layer's pages; 0: lent
    span_rows: int = field(kw_only=True)  # most rows of one sequence
    context: int = field(kw_only=True)  # most tokens that any of its sequences may have


def fits_device(mixer: AttentionConfig | DeltaNetConfig, get: WeightSource) -> bool:
    """Tell whether a GPU's fused kernels run layers with this mixer."""
    case = get.case
    if refuses_device(case) or refuses_type(case.dtype):
        return False
    if isinstance(mixer, DeltaNetConfig):
        return mixer.head_dim == delta_net.DIM
    return mixer.head_dim % 16 == 0 and mixer.head_dim <= attention.MOST_DIM


class Part(Protocol):
    """A part of a layer on the GPU; it changes the residual stream in place."""

    def __call__(self, x: torch.Tensor, batch: DeviceBatch) -> None: ...


class DeviceBlock:
    """One layer: its parts one after another, each with the whole scratch to itself."""

    def __init__(self, *parts: Part) -> None:
        self._parts = parts

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the residual stream after this layer, in the memory of `x`."""
        assert isinstance(batch, DeviceBatch)
        for part in self._parts:
            with scratch.frame():
                part(x, batch)
        return x


class DeviceAttention:
    """Grouped attention over pages, with norms and gates of heads as a family has them."""

    def __init__(
        self,
        config: AttentionConfig,
        eps: float,
        get: WeightSource,
        pages: KvPages,
        after: RowNorm | None = None,  # of the part's answers
    ) -> None:
        self._config, self._pages, self._after = config, pages, after
        self._dtype, self._narrow = get.case.dtype, narrow_type(get.case.dtype)
        self._norm = RowNorm(get.norm("attn.norm"), eps)
        names, orders = ["attn.q"], [query_rows(config)]
        if config.shares is None:
            names.append("attn.k")
            orders.append(pair_rows(config, config.kv_heads))
            if not config.keys_are_values:
                names.append("attn.v")
                orders.append(None)
        if config.gate in ("head", "element"):
            names.append("attn.gate")
            orders.append(None)
        self._names = names
        self._in = stack(get, names, orders)
        self._out = stack(get, ["attn.out"])
        head_norms = config.head_norms
        self._head_norms = HeadNorms(
            q=get.norm("attn.q_norm") if head_norms else None,
            k=get.norm("attn.k_norm") if head_norms and config.shares is None else None,
            values=config.value_norm,
            eps=eps,
        )

    @part_of_step("attention")
    def __call__(self, x: torch.Tensor, batch: DeviceBatch) -> None:
        """Add the attention of each row to it."""
        config, rows = self._config, len(x)
        normed = normed_rows(x, self._norm, self._narrow)
        outs = dict(zip(self._names, self._in(normed), strict=True))
        keys = outs.get("attn.k")
        projected = Projected(
            outs["attn.q"], keys, outs.get("attn.v", keys), config.heads, config.head_dim
        )
        tables = batch.tables[self._pages.ring]
        queries = scratch.empty(rows, config.heads, config.head_dim, device=x.device)
        rope = rope_tables(config.rope, batch)
        attention.rope_write(
            projected, self._head_norms, rope, tables, self._pages.kv, queries, config.scale
        )
        gate = self._gate(outs)
        if few_rows(rows):
            mixed = self._decode(queries, batch, tables, gate)
        else:
            spans = self._pages.view(batch).spans
            mixed = prefill.prefill(queries, self._pages.kv, spans, config.window, self._dtype)
            if gate is not None:
                _apply(mixed, gate, config.heads)
        add_answers(x, self._out, plain_rows(mixed, self._narrow), self._after)

    def _gate(self, outs: dict[str, torch.Tensor]) -> Gate | None:
        config = self._config
        if config.gate == "query":
            return Gate(outs["attn.q"][:, config.heads * config.head_dim :], "sigmoid")
        return None if config.gate == "none" else Gate(outs["attn.gate"], "softplus")

    def _decode(
        self,
        queries: torch.Tensor,
        batch: DeviceBatch,
        tables: StepTables,
        gate: Gate | None,
    ) -> torch.Tensor:
        config = self._config
        shape = DecodeShape(
            rows=len(queries),
            sequences=len(tables.starts),
            span_rows=batch.span_rows,
            heads=config.heads,
            kv_heads=config.kv_heads,
            dim=config.head_dim,
            max_context=batch.context,
            window=config.window,
        )
        partial = scratch.empty(shape.scratch_floats, device=queries.device)
        return attention.decode(queries, self._pages.kv, tables, shape, partial, gate)


def _apply(mixed: torch.Tensor, gate: Gate, heads: int) -> None:
    """Multiply attention's output `[rows, heads * dim]` by its gates, both where they lie."""
    values = gate.values
    if gate.kind == "sigmoid":
        values.sigmoid_()
    else:
        torch.logaddexp(values, values.new_zeros(()), out=values)  # softplus
    if values.shape[1] == mixed.shape[1]:
        mixed.mul_(values)
    else:
        mixed.view(len(mixed), heads, -1).mul_(values[:, :, None])


class DeviceDelta:
    """Gated linear attention."""

    def __init__(
        self, config: DeltaNetConfig, eps: float, get: WeightSource, state: RecurrentState
    ) -> None:
        self._state, self._eps, self._narrow = state, eps, narrow_type(get.case.dtype)
        self._norm = RowNorm(get.norm("attn.norm"), eps)
        self._in = stack(get, ["delta.qkv", "delta.z", "delta.beta", "delta.alpha"])
        self._out = stack(get, ["delta.out"])
        self._head_norm = get.vector("delta.norm").flatten()
        self._weights = small_weights(config, get)

    @part_of_step("recurrent")
    def __call__(self, x: torch.Tensor, batch: DeviceBatch) -> None:
        """Add the answers of the rows' states to them."""
        qkv, z, beta, alpha = self._in(normed_rows(x, self._norm, self._narrow))
        heads = len(self._weights.decay)
        gate = (z.view(len(x), heads, -1), self._head_norm, self._eps)
        rows = (qkv, beta, alpha)
        if few_rows(len(x)):
            tables = batch.tables[0]
            assert tables.trees is None, "models with such layers refuse trees"
            mixed = delta_net.step(rows, self._weights, self._state, tables)
            answers = DeviceRows(
                len(x),
                few=normed_head_rows(mixed, *gate),
                floats=lambda: delta_net.gated_norm(mixed, *gate).flatten(1),
            )
        else:
            spans = batch.shared("span tables", lambda: span_tables(batch.spans, len(x), x.device))
            mixed = delta_net.prefill(rows, self._weights, self._state, spans)
            answers = gated_heads(mixed, gate, self._narrow)
        self._out(answers, add=x)


class DeviceMlp:
    """The gated feed-forward network."""

    def __init__(
        self, config: FfnConfig, eps: float, get: WeightSource, after: RowNorm | None = None
    ) -> None:
        self._norm = RowNorm(get.norm("ffn.norm"), eps)
        self._in = stack(get, ["ffn.gate", "ffn.up"])
        self._down = stack(get, ["ffn.down"])
        self._activation, self._after = config.activation, after
        get.foreseen.add(Gates(config.activation))
        self._narrow = narrow_type(get.case.dtype)

    @part_of_step("dense")
    def __call__(self, x: torch.Tensor, batch: DeviceBatch) -> None:
        """Add the network's answers."""
        add_answers(x, self._down, self._inner(x), self._after)

    def answers(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's answers, normed after it where it has a norm there."""
        found = self._down(self._inner(x))[0]
        if self._after is None:
            return found
        return small.rms_norm(found, self._after.weight, self._after.eps)

    def _inner(self, x: torch.Tensor) -> DeviceRows:
        gate, up = self._in(normed_rows(x, self._norm, self._narrow))
        return gated_rows(gate, up, self._activation, self._narrow)


class DeviceSide:
    """The part of a layer that reads its side inputs, gated by the residual stream."""

    def __init__(self, inputs: SideInputs, layer: int, get: WeightSource, eps: float) -> None:
        self._inputs, self._layer, self._narrow = inputs, layer, narrow_type(get.case.dtype)
        self._gate = stack(get, ["side.gate"])
        self._proj = stack(get, ["side.proj"])
        self._after = RowNorm(get.norm("side.norm"), eps)
        get.foreseen.add(Gates("gelu"))

    def __call__(self, x: torch.Tensor, batch: DeviceBatch) -> None:
        """Add the part's answers."""
        inputs = self._inputs.of(self._layer, len(x)).contiguous()
        gate = self._gate(plain_rows(x, self._narrow))[0]
        inner = gated_rows(gate, inputs, "gelu", self._narrow)
        add_answers(x, self._proj, inner, self._after)


class DeviceScale:
    """Multiplies the residual stream at the end of a layer."""

    def __init__(self, scale: torch.Tensor) -> None:
        self._scale = scale

    def __call__(self, x: torch.Tensor, batch: DeviceBatch) -> None:
        """Scale the rows."""
        x.mul_(self._scale)
