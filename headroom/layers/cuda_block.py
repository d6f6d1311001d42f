"""CudaBlock: one layer on an NVIDIA GPU, in parts that run fused CUDA kernels.

Each part reads the residual stream, float32 `[rows, hidden]`, and adds its output to it in place.
A step of at most DECODE_ROWS rows takes the decode path (kernels that read packed weights in one
pass, and that a CUDA graph can capture). A step of more rows takes the prefill path.
"""

from typing import Protocol

import torch

from headroom.families.config import AttentionConfig, DeltaNetConfig, FfnConfig
from headroom.kernels.cuda import (
    attention,
    attention_scratch,
    delta_net,
    delta_net_scratch,
    norms,
    scratch,
)
from headroom.kernels.cuda.attention import DecodeShape, Gate, HeadNorms, Projected
from headroom.kernels.cuda.compile import refuses_device
from headroom.kernels.cuda.delta_net import DeltaNetRows, span_tables
from headroom.kernels.cuda.matmul import RowNorm, narrow_type, refuses_type
from headroom.kernels.cuda.sizes import is_decode
from headroom.kernels.ops import RecurrentState, StepTables
from headroom.layers.attention import pair_rows, query_rows, rope_tables
from headroom.layers.batch import Batch, GpuBatch
from headroom.layers.cache import KvPages
from headroom.layers.cuda_rows import (
    CudaRows,
    add_product,
    gated_head_rows,
    gated_rows,
    load_merged,
    normed_rows,
    plain_rows,
)
from headroom.layers.delta_net import small_weights
from headroom.layers.per_layer_inputs import LayerInputs
from headroom.layers.step_timing import part_of_step
from headroom.layers.weights import WeightSource


def fits_cuda(mixer: AttentionConfig | DeltaNetConfig, get: WeightSource) -> bool:
    """Return whether the fused CUDA kernels can run a layer with this mixer."""
    case = get.case
    if refuses_device(case) or refuses_type(case.dtype):
        return False
    if isinstance(mixer, DeltaNetConfig):
        return mixer.head_dim == delta_net_scratch.DIM
    if mixer.sinks or mixer.out_bias:
        return False
    return mixer.head_dim % 16 == 0 and mixer.head_dim <= attention.MOST_DIM


class CudaPart(Protocol):
    """A part of a layer; adds its output to the residual stream in place."""

    def __call__(self, x: torch.Tensor, batch: GpuBatch) -> None: ...


class CudaBlock:
    """One layer: its parts run one after another, and each may use the whole scratch memory."""

    def __init__(self, *parts: CudaPart) -> None:
        self._parts = parts

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the residual stream after this layer, in the memory of `x`."""
        assert isinstance(batch, GpuBatch)
        for part in self._parts:
            with scratch.frame():
                part(x, batch)
        return x


class CudaAttention:
    """Grouped-query attention over KV pages, with the head norms and gates that a family has."""

    def __init__(
        self,
        config: AttentionConfig,
        eps: float,
        get: WeightSource,
        pages: KvPages,
        post_norm: RowNorm | None = None,  # of the output, before it is added to the stream
    ) -> None:
        self._config, self._pages, self._post_norm = config, pages, post_norm
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
        self._in = load_merged(get, names, orders)
        biased = names if config.biases else []
        self._biases = {name: get.vector(f"{name}_bias") for name in biased}
        self._out = load_merged(get, ["attn.out"])
        head_norms = config.head_norms
        self._head_norms = HeadNorms(
            q=get.norm("attn.q_norm") if head_norms else None,
            k=get.norm("attn.k_norm") if head_norms and config.shares is None else None,
            values=config.value_norm,
            eps=eps,
        )

    @part_of_step("attention")
    def __call__(self, x: torch.Tensor, batch: GpuBatch) -> None:
        """Add each row's attention output to the row, and cache its key and value."""
        config, rows = self._config, len(x)
        normed = normed_rows(x, self._norm, self._narrow)
        outs = dict(zip(self._names, self._in(normed), strict=True))
        for name, bias in self._biases.items():
            outs[name].add_(bias)
        keys = outs.get("attn.k")
        projected = Projected(
            outs["attn.q"], keys, outs.get("attn.v", keys), config.heads, config.head_dim
        )
        tables = batch.tables[self._pages.ring]
        declared = attention_scratch.queries(rows, config.heads, config.head_dim)
        queries = scratch.take(declared, x.device)
        rope = rope_tables(config.rope, batch)
        attention.rope_write(
            projected, self._head_norms, rope, tables, self._pages.kv, queries, config.scale
        )
        gate = self._gate(outs)
        if is_decode(rows):
            mixed = self._decode(queries, batch, tables, gate)
        else:
            spans = self._pages.view(batch).spans
            mixed = attention.prefill(queries, self._pages.kv, spans, config.window, self._dtype)
            if gate is not None:
                _apply_gate(mixed, gate, config.heads)
        add_product(x, self._out, plain_rows(mixed, self._narrow), self._post_norm)

    def _gate(self, outs: dict[str, torch.Tensor]) -> Gate | None:
        config = self._config
        if config.gate == "query":
            return Gate(outs["attn.q"][:, config.heads * config.head_dim :], "sigmoid")
        return None if config.gate == "none" else Gate(outs["attn.gate"], "softplus")

    def _decode(
        self,
        queries: torch.Tensor,
        batch: GpuBatch,
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
        partial = scratch.take(shape.partial, queries.device)
        return attention.decode(queries, self._pages.kv, tables, shape, partial, gate)


def _apply_gate(mixed: torch.Tensor, gate: Gate, heads: int) -> None:
    """Multiply attention's output `[rows, heads * dim]` by its gates; overwrites both tensors."""
    values = gate.values
    if gate.kind == "sigmoid":
        values.sigmoid_()
    else:
        torch.logaddexp(values, values.new_zeros(()), out=values)  # softplus
    if values.shape[1] == mixed.shape[1]:
        mixed.mul_(values)
    else:
        mixed.view(len(mixed), heads, -1).mul_(values[:, :, None])


class CudaDeltaNet:
    """Gated linear attention (gated delta net)."""

    def __init__(
        self, config: DeltaNetConfig, eps: float, get: WeightSource, state: RecurrentState
    ) -> None:
        self._state, self._narrow = state, narrow_type(get.case.dtype)
        self._norm = RowNorm(get.norm("attn.norm"), eps)
        self._in = load_merged(get, ["delta.qkv", "delta.z", "delta.beta", "delta.alpha"])
        self._out = load_merged(get, ["delta.out"])
        self._head_norm = RowNorm(get.vector("delta.norm").flatten(), eps)
        self._weights = small_weights(config, get)

    @part_of_step("recurrent")
    def __call__(self, x: torch.Tensor, batch: GpuBatch) -> None:
        """Add each row's output to the row, and advance its sequence's recurrent state."""
        qkv, z, beta, alpha = self._in(normed_rows(x, self._norm, self._narrow))
        heads = len(self._weights.decay)
        rows = DeltaNetRows(qkv, beta, alpha)
        assert not any(span.guessed for span in batch.spans), "a GPU verifies no guesses yet"
        if is_decode(len(x)):
            tables = batch.tables[0]
            assert tables.trees is None, "a model with recurrent layers refuses draft trees"
            mixed = delta_net.step(rows, self._weights, self._state, tables)
        else:
            spans = batch.shared("span tables", lambda: span_tables(batch.spans, len(x), x.device))
            mixed = delta_net.prefill(rows, self._weights, self._state, spans)
        gate = z.view(len(x), heads, -1)
        self._out(gated_head_rows(mixed, gate, self._head_norm, self._narrow), add=x)


class CudaMlp:
    """The gated feed-forward network."""

    def __init__(
        self, config: FfnConfig, eps: float, get: WeightSource, post_norm: RowNorm | None = None
    ) -> None:
        self._norm = RowNorm(get.norm("ffn.norm"), eps)
        self._in = load_merged(get, ["ffn.gate", "ffn.up"])
        self._down = load_merged(get, ["ffn.down"])
        self._activation, self._post_norm = config.activation, post_norm
        self._narrow = narrow_type(get.case.dtype)

    @part_of_step("dense")
    def __call__(self, x: torch.Tensor, batch: GpuBatch) -> None:
        """Add the network's output for each row to the row."""
        add_product(x, self._down, self._inner(x), self._post_norm)

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output for each row, after its post-norm if it has one."""
        found = self._down(self._inner(x))[0]
        if self._post_norm is None:
            return found
        return norms.rms_norm(found, self._post_norm.weight, self._post_norm.eps)

    def _inner(self, x: torch.Tensor) -> CudaRows:
        gate, up = self._in(normed_rows(x, self._norm, self._narrow))
        return gated_rows(gate, up, self._activation, self._narrow)


class CudaPerLayerPart:
    """The part of a layer that reads its per-layer inputs, gated by the residual stream."""

    def __init__(self, inputs: LayerInputs, layer: int, get: WeightSource, eps: float) -> None:
        self._inputs, self._layer, self._narrow = inputs, layer, narrow_type(get.case.dtype)
        self._gate = load_merged(get, ["per_layer.gate"])
        self._proj = load_merged(get, ["per_layer.proj"])
        self._post_norm = RowNorm(get.norm("per_layer.norm"), eps)

    def __call__(self, x: torch.Tensor, batch: GpuBatch) -> None:
        """Add the part's output for each row to the row."""
        inputs = self._inputs.of_layer(self._layer, len(x)).contiguous()
        gate = self._gate(plain_rows(x, self._narrow))[0]
        inner = gated_rows(gate, inputs, "gelu", self._narrow)
        add_product(x, self._proj, inner, self._post_norm)


class CudaScale:
    """Multiplies the residual stream by a learned scalar at the end of a layer."""

    def __init__(self, scale: torch.Tensor) -> None:
        self._scale = scale

    def __call__(self, x: torch.Tensor, batch: GpuBatch) -> None:
        """Scale the rows in place."""
        x.mul_(self._scale)
