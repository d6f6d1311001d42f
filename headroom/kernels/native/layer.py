"""A whole decoder layer with full attention and a gated MLP, in one call of the C++ module."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.native import attention, matmul
from headroom.kernels.native.module import MODULE, POOL, PRODUCTS
from headroom.kernels.ops import Case, PagedKv, Span
from headroom.kernels.weight import Weight

# Limits of the C++ attention (attention.cpp); a test compares them.
MAX_GROUP, MAX_DIM = 32, 512  # query heads per KV head, values of a head


class Step:
    """The spans and KV slots of a step, as the C++ module reads them; all layers share one."""

    def __init__(self, spans: tuple[Span, ...], kv_slots: torch.Tensor) -> None:
        self.spans = attention.SpanTable.of(spans)
        self.count = len(spans)
        self.kv_slots = kv_slots.contiguous()


class LayerMatrices(NamedTuple):
    """The matrices of a layer in panels, in the order in which the C++ module takes them."""

    q: Weight
    k: Weight
    v: Weight
    out: Weight
    gate: Weight
    up: Weight
    down: Weight


class HeadSizes(NamedTuple):
    """The sizes of a layer's attention, in the order in which the C++ module takes them."""

    heads: int  # query heads
    kv_heads: int
    dim: int  # values of a head
    window: int  # a row sees at most so many last keys; 0: all


class NativeLayer:
    """A layer's weights, and the C++ object that points into them."""

    def __init__(
        self,
        matrices: LayerMatrices,
        attention_norm: torch.Tensor,  # [hidden]
        ffn_norm: torch.Tensor,  # [hidden]
        eps: float,
        sizes: HeadSizes,
        scale: float,
        cache: PagedKv,
        dtype: str,  # of the products, as in Case
    ) -> None:
        # The C++ object holds addresses only.
        self._kept = (matrices, attention_norm, ffn_norm, cache)
        self._layer = MODULE.Layer(
            [matmul.panels_of(weight) for weight in matrices],
            attention_norm.data_ptr(),
            ffn_norm.data_ptr(),
            eps,
            sizes,
            scale,
            attention.cache_view(cache),
            PRODUCTS[dtype],
        )

    def run(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: Step,
        scratch: torch.Tensor,  # uint8, of `scratch.layer_scratch` bytes at least
    ) -> None:
        """Run the layer on the residual stream `x [rows, hidden]`, in place."""
        self._layer.run(
            POOL.ops, (x.shape[0], cos.shape[1]), x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            step.kv_slots.data_ptr(), step.spans.rows.data_ptr(), step.count,
            step.spans.pages.data_ptr(), step.spans.trees.data_ptr(), scratch.data_ptr(),
            scratch.numel(),
        )  # fmt: skip


def refuses(case: Case, quants: Sequence[QuantType], sizes: HeadSizes) -> str | None:
    """Return why a layer with these weight types and head sizes cannot run here; None if it can."""
    group = sizes.heads // sizes.kv_heads
    if case.dtype not in PRODUCTS:
        return f"computes in {', '.join(PRODUCTS)}, not {case.dtype}"
    if group > MAX_GROUP or sizes.dim > MAX_DIM:
        return f"{group} query heads per KV head of {sizes.dim} values are too many"
    reasons = [matmul.refuses(replace(case, quant=quant)) for quant in quants]
    return next((reason for reason in (*reasons, attention.refuses(case)) if reason), None)
