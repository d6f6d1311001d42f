"""The contract of every operation, and what a kernel says of itself.

Shapes use the same words everywhere: rows are the tokens of a step, one row each.
Activations come and go as float32; what happens inside is the kernel's business.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headroom.formats.quants import F32, QuantType
from headroom.kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class Case:
    """What a kernel must know to say whether it can run: a device and the types in play."""

    device: str = "cpu"  # the device's kind: "cpu", "cuda"
    quant: QuantType = F32  # of the weight
    dtype: str = "f32"  # that products compute in; "int8" rounds their activations to 8 bits
    k_type: str = "f32"  # of cached keys
    v_type: str = "f32"  # of cached values
    layout: str = "rows"  # of a table that rows are taken from
    reference: bool = False  # only the plain kernels will do


def _as_it_is(weight: Weight) -> Weight:
    return weight


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one operation."""

    op: str  # "matmul", "attention", ...
    backend: str  # "reference", "native-int8", "native", "triton", "cuda"
    run: Callable[..., Any]  # has the signature of the operation's Protocol
    refuses: Callable[[Case], str | None]  # why it cannot run a case; None if it can
    prepare: Callable[[Weight], Weight] = _as_it_is  # brings a weight into the layout that it reads

    def __str__(self) -> str:
        return f"{self.op}-{self.backend}"


@dataclass(frozen=True, slots=True, eq=False)
class PagedKv:
    """One layer's cached keys and values: `slots` rows of `kv_heads` heads each.

    A page is `page_size` consecutive slots. Plain types hold floats `[slots, kv_heads, dim]`,
    packed types bytes `[slots, kv_heads, bytes per head]`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    k_type: QuantType
    v_type: QuantType
    page_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The rows of one sequence in a step: `rows` tokens, the first at position `start`.

    Row i is cached as token start + i. Without a tree it is also at that position; in a tree it
    is at start + its depth, and of the span's rows it sees its ancestors and itself alone.
    """

    first_row: int
    rows: int
    start: int
    pages: torch.Tensor  # int64 page numbers, token order, enough for start + rows tokens
    tree: torch.Tensor | None = None  # bool [rows, rows]: row i sees row j; parents come first


class Embed(Protocol):
    """Rows of an embedding table: `[rows]` ids to `out [rows, columns]`."""

    def __call__(self, ids: torch.Tensor, table: Weight, out: torch.Tensor) -> torch.Tensor: ...


class Matmul(Protocol):
    """`x [rows, columns]` times a weight's transpose: `[rows, weight.rows]`, to `out` if given."""

    def __call__(
        self, x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class RmsNorm(Protocol):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class Rope(Protocol):
    """Rotate the first `2 * half` values of each head, in pairs `(i, i + half)`.

    `x [rows, heads, dim]`, `cos` and `sin` `[rows, half]`.
    """

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...


class GatedActivation(Protocol):
    """`silu(gate) * up`, element by element."""

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...


class KvWrite(Protocol):
    """Store keys and values `[rows, kv_heads, dim]` at the slots `[rows]`."""

    def __call__(
        self, cache: PagedKv, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None: ...


class Attention(Protocol):
    """Causal attention of `queries [rows, heads, dim]` over each sequence's cached tokens.

    A row at position p sees keys at positions 0..p, the last `window` of them if window > 0; of
    the other rows of a tree only its ancestors. Pages that no row sees any of are never read.
    """

    def __call__(
        self,
        queries: torch.Tensor,
        cache: PagedKv,
        spans: tuple[Span, ...],
        scale: float,
        window: int,
    ) -> torch.Tensor: ...
