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

    device: str = "cpu"  # the device's kind: "cpu", "cuda", "hip"
    quant: QuantType = F32  # of the weight
    experts: tuple[QuantType, ...] = ()  # of experts' gate, up and down matrices
    dtype: str = "f32"  # that products compute in; "int8" rounds their activations to 8 bits
    k_type: str = "f32"  # of cached keys
    v_type: str = "f32"  # of cached values
    layout: str = "rows"  # of a table that rows are taken from
    reference: bool = False  # only the plain kernels will do
    triton: bool = False  # Triton's kernels rather than CUDA's

    @property
    def torch_device(self) -> str:
        """The device as torch names it: AMD's GPUs are cuda there, too."""
        return "cuda" if self.device == "hip" else self.device


def _as_it_is(weight: Any) -> Any:
    return weight


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one operation."""

    op: str  # "matmul", "attention", ...
    backend: str  # "reference", "native-int8", "native", "triton", "cuda"
    run: Callable[..., Any]  # has the signature of the operation's Protocol
    refuses: Callable[[Case], str | None]  # why it cannot run a case; None if it can
    # Brings a Weight, or an ExpertTable of mapped ones, into the layout that it reads.
    prepare: Callable[[Any], Any] = _as_it_is

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
class RecurrentState:
    """What one recurrent layer remembers of each sequence that may run, in float32.

    A sequence at position 0 begins from zeros, whatever its slot holds.
    """

    memory: torch.Tensor  # [slots, value heads, key dim, value dim]
    inputs: torch.Tensor  # [slots, convolution - 1, channels]: the last inputs, oldest first

    @property
    def nbytes(self) -> int:
        """The bytes that the states take."""
        return self.memory.nbytes + self.inputs.nbytes


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
    slot: int = 0  # the sequence's place among those that run together
    tree: torch.Tensor | None = None  # bool [rows, rows]: row i sees row j; parents come first


@dataclass(frozen=True, slots=True, eq=False)
class StepTables:
    """What kernels on a device read of a step: tensors of fixed shapes, filled before each step.

    Rows of one sequence lie together. A row that only pads the step has sequence -1: nothing is
    cached for it. A layer whose pages are numbered otherwise has tables with its own `pages` and
    `slots`.
    """

    rows: int
    positions: torch.Tensor  # int32 [rows]: of the rotation
    sequence: torch.Tensor  # int32 [rows]: which sequence of the step a row belongs to
    index: torch.Tensor  # int32 [rows]: its place among its sequence's cached tokens
    starts: torch.Tensor  # int32 [sequences]: tokens cached before the step
    pages: torch.Tensor  # int32 [sequences, most pages]: page numbers, position order
    slots: torch.Tensor  # int64 [rows]: where a row's key and value are cached
    state_slots: torch.Tensor  # int32 [sequences]: where their recurrent states are
    # int64 [rows]: bit j set: the row sees row j of its sequence in this step, itself included;
    # None: every row sees all that is before it.
    trees: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetWeights:
    """The small weights of a recurrent layer, in float32."""

    conv: torch.Tensor  # [channels, taps], the last tap for the current token
    decay: torch.Tensor  # [value heads], negative
    dt_bias: torch.Tensor  # [value heads]
    key_heads: int
    tiled: bool  # value head h reads key head h % key_heads, not h // (value heads / key_heads)


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How scores become a choice and weights."""

    used: int
    scores: str  # "softmax" or "sigmoid" of the logits
    normalise: bool  # weights of the chosen ones are divided by their sum
    scale: float  # of the weights, after that
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap) first; 0: they stay


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTable:
    """One layer's routed experts: three matrices each, all experts alike in types and sizes.

    A backend's own table, with addresses say, comes from its kernel's `prepare`; it says its
    `nbytes` too.
    """

    gate: tuple[Weight, ...]
    up: tuple[Weight, ...]
    down: tuple[Weight, ...]

    @property
    def parts(self) -> tuple[tuple[Weight, ...], ...]:
        """The matrices of all experts: gates, ups, downs."""
        return self.gate, self.up, self.down

    @property
    def kinds(self) -> tuple[QuantType, ...]:
        """The types of an expert's gate, up and down matrices."""
        return tuple(part[0].quant for part in self.parts)

    @property
    def nbytes(self) -> int:
        """The bytes of all experts."""
        return sum(weight.nbytes for part in self.parts for weight in part)


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
    """`act(gate) * up`, element by element; `activation` is silu, or gelu in its tanh form."""

    def __call__(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor: ...


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


class DeltaNet(Protocol):
    """Gated linear attention of every span's rows, in order, from its sequence's state on.

    `qkv [rows, channels]` before the convolution, `beta` and `alpha` `[rows, value heads]` before
    their activations. Returns `[rows, value heads, dim]`, not yet normed, and leaves the states
    as they are after the last row. The same rows give the same bits however steps divide them.
    """

    def __call__(
        self,
        qkv: torch.Tensor,
        beta: torch.Tensor,
        alpha: torch.Tensor,
        weights: DeltaNetWeights,
        state: RecurrentState,
        spans: tuple[Span, ...],
    ) -> torch.Tensor: ...


class GatedNorm(Protocol):
    """`weight * x / sqrt(mean(x^2) + eps) * silu(gate)` over the last axis."""

    def __call__(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...


class Route(Protocol):
    """Choose experts: router logits `[rows, experts]` to ids (int32) and weights `[rows, used]`.

    The best come first, the lower id on ties; `bias [experts]` is added to scores for the choice
    alone. Every choice is counted in `counts [experts]` (int64).
    """

    def __call__(
        self,
        logits: torch.Tensor,
        rule: RouterRule,
        bias: torch.Tensor | None,
        counts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Experts(Protocol):
    """The weighted sum of each row's experts: `down(act(gate x) * up x)`.

    `x [rows, hidden]`, `ids` int32 and `weights` `[rows, used]`. A row's sum runs in an order of
    its own choice alone, so that it does not depend on other rows. `scratch` is memory lent for
    the call; without any a kernel takes its own.
    """

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        table: Any,
        activation: str,
        dtype: str,
        scratch: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
