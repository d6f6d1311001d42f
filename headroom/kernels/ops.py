"""The operations: a Protocol for each, the data that they share, and Kernel, an implementation.

A row is one token of a step. Operations take and return activations in float32; an implementation
may compute in other types inside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from headroom.formats.quants import F32, QuantType
from headroom.kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class Case:
    """What a kernel is asked to run: the kind of device and the types of its operands."""

    device: str = "cpu"  # kind of device: "cpu", "cuda" or "hip"
    quant: QuantType = F32  # type of the weight
    experts: tuple[QuantType, ...] = ()  # types of the experts' gate, up and down matrices
    dtype: str = "f32"  # type that products compute in; "int8" and "int24" round activations
    k_type: str = "f32"  # type of cached keys
    v_type: str = "f32"  # type of cached values
    layout: str = "rows"  # layout of an embedding table
    reference: bool = False  # use the reference kernels only
    triton: bool = False  # use Triton's kernels rather than CUDA's
    sinks: bool = False  # attention has a score for each head that has no key
    biases: bool = False  # the experts' matrices have biases

    def __str__(self) -> str:
        weights = "/".join(quant.name for quant in self.experts) or self.quant.name
        types = f"{weights} weights in {self.layout}, products in {self.dtype}"
        return f"{types}, {self.k_type}/{self.v_type} KV cache on {self.device}"

    @property
    def torch_device(self) -> str:
        """torch's name of the device: it calls AMD's GPUs "cuda", too."""
        return "cuda" if self.device == "hip" else self.device


def _unchanged(weight: Any) -> Any:
    return weight


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one operation."""

    op: str  # "matmul", "attention", ...
    backend: str  # "reference", "native-int24", "native", "triton", "cuda"
    run: Callable[..., Any]  # has the signature of the operation's Protocol
    refuses: Callable[[Case], str | None]  # why it cannot run a case; None if it can
    # Converts a Weight, or an ExpertTable of mapped Weights, to the layout that `run` reads.
    prepare: Callable[[Any], Any] = _unchanged

    def __str__(self) -> str:
        return f"{self.op}-{self.backend}"


@dataclass(frozen=True, slots=True, eq=False)
class PagedKv:
    """One layer's cached keys and values; a KV slot has those of one token, `kv_heads` heads.

    A page is `page_size` consecutive KV slots. Plain types hold floats `[KV slots, kv_heads, dim]`,
    packed types bytes `[KV slots, kv_heads, bytes per head]`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    k_type: QuantType
    v_type: QuantType
    page_size: int


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentState:
    """One recurrent layer's states in float32, one state slot per running sequence.

    A sequence at position 0 begins with zeros, whatever its state slot holds.
    """

    memory: torch.Tensor  # [state slots, value heads, key dim, value dim]
    inputs: torch.Tensor  # [state slots, convolution - 1, channels]: the last inputs, oldest first

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return self.memory.nbytes + self.inputs.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The rows of one sequence in a step.

    Row i is cached as token start + i. Without a tree this is also its position. In a draft tree
    a row's position is start + its depth, and it sees only its ancestors and itself among the rows
    of the span. For attention on CPUs, all rows may see all rows: then each is as deep as the last.
    """

    first_row: int  # the span's first row in the step
    rows: int
    start: int  # tokens of the sequence that were cached before the step
    pages: torch.Tensor  # int64 page numbers in token order, enough for start + rows tokens
    state_slot: int = 0  # where the sequence's recurrent states are
    tree: torch.Tensor | None = None  # bool [rows, rows]: row i sees row j; parents come first
    # Only some of the rows may stay, and the engine says later which. Recurrent layers leave the
    # sequence's state as it was, since a state does not forget a row.
    guessed: bool = False

    def parents(self) -> list[int]:
        """Return the row of the span that each row follows; -1: it follows the cached tokens."""
        if self.tree is None:
            return list(range(-1, self.rows - 1))
        seen = self.tree.tolist()
        return [max((j for j in range(i) if seen[i][j]), default=-1) for i in range(self.rows)]


@dataclass(frozen=True, slots=True, eq=False)
class StepTables:
    """The tables of a step that GPU kernels read: tensors of fixed shapes, filled before each step.

    The rows of a sequence are adjacent. Padding rows have sequence -1; nothing is cached for them.
    A layer that numbers its pages differently has its own `pages` and `kv_slots`.
    """

    rows: int
    positions: torch.Tensor  # int32 [rows]: position for the rotary embedding
    sequence: torch.Tensor  # int32 [rows]: which sequence of the step a row belongs to
    index: torch.Tensor  # int32 [rows]: number of the row among its sequence's cached tokens
    starts: torch.Tensor  # int32 [sequences]: tokens cached before the step
    pages: torch.Tensor  # int32 [sequences, most pages]: page numbers in token order
    kv_slots: torch.Tensor  # int64 [rows]: the KV slot that caches a row's key and value
    state_slots: torch.Tensor  # int32 [sequences]: where a sequence's recurrent states are
    # int64 [rows]: bit j is set if the row sees row j of its sequence in this step; its own bit
    # is set. None: every row sees all rows before it and itself.
    trees: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetWeights:
    """The small weights of a recurrent layer, in float32."""

    conv: torch.Tensor  # [channels, taps], the last tap for the current token
    decay: torch.Tensor  # [value heads], negative
    dt_bias: torch.Tensor  # [value heads]
    key_heads: int
    tiled: bool  # value head h reads key head h % key_heads, else h // (value heads / key_heads)


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How a router's logits become the picked experts and their weights."""

    used: int  # k of the top-k: experts per row
    scores: str  # "softmax" or "sigmoid" of the logits
    normalise: bool  # the weights of the picked experts are divided by their sum
    scale: float  # factor of the weights, applied last
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap) first; 0: no cap


class Picks(NamedTuple):
    """The experts that a router picked for each row; a negative id is no pick."""

    ids: torch.Tensor  # int32 [rows, used], the best first
    weights: torch.Tensor  # [rows, used]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTable:
    """One layer's routed experts: three matrices each, with the same types and sizes for all.

    A kernel's `prepare` turns this into the backend's own table, which has `nbytes`, too.
    """

    gate: tuple[Weight, ...]
    up: tuple[Weight, ...]
    down: tuple[Weight, ...]
    biases: "ExpertBiases | None" = None  # None: the matrices have none

    @property
    def parts(self) -> tuple[tuple[Weight, ...], ...]:
        """The matrices of all experts: (gates, ups, downs)."""
        return self.gate, self.up, self.down

    @property
    def kinds(self) -> tuple[QuantType, ...]:
        """The types of an expert's gate, up and down matrices."""
        return tuple(part[0].quant for part in self.parts)

    @property
    def nbytes(self) -> int:
        """The bytes of all experts."""
        return sum(weight.nbytes for part in self.parts for weight in part)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBiases:
    """What is added to the products of each expert's matrices, in float32."""

    gate: torch.Tensor  # [experts, width]
    up: torch.Tensor  # [experts, width]
    down: torch.Tensor  # [experts, hidden]

    @property
    def nbytes(self) -> int:
        """The bytes of all biases."""
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes


class EmbedOp(Protocol):
    """Write the rows `ids [rows]` of an embedding table to `out [rows, columns]`."""

    def __call__(self, ids: torch.Tensor, table: Weight, out: torch.Tensor) -> torch.Tensor: ...


class MatmulOp(Protocol):
    """Return `x [rows, columns]` times the weight's transpose `[rows, weight.rows]`.

    The result is written to `out` if given.
    """

    def __call__(
        self, x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class RmsNormOp(Protocol):
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last axis."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class RopeOp(Protocol):
    """Rotate the first `2 * half` values of each head, in pairs `(i, i + half)`.

    `x [rows, heads, dim]`, `cos` and `sin` `[rows, half]`.
    """

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...


class GatedActivationOp(Protocol):
    """Return `act(gate) * up`; `activation` is "silu", or "gelu" in its tanh form.

    With "clamped" it is `gate * sigmoid(1.702 gate) * (up + 1)`, gates at most 7 and ups -7 to 7.
    """

    def __call__(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor: ...


class KvWriteOp(Protocol):
    """Cache keys and values `[rows, kv_heads, dim]` at the KV slots `[rows]`."""

    def __call__(
        self, cache: PagedKv, kv_slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None: ...


class AttentionOp(Protocol):
    """Return causal attention of `queries [rows, heads, dim]` over their sequences' cached tokens.

    A row at position p sees keys at positions 0..p, only the last `window` of them if window > 0,
    and among the rows of a draft tree only its ancestors. Pages in which no row sees any key are
    never read. With `sinks [heads]`, softmax has one score more, which has no value.
    """

    def __call__(
        self,
        queries: torch.Tensor,
        cache: PagedKv,
        spans: tuple[Span, ...],
        scale: float,
        window: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class DeltaNetOp(Protocol):
    """Run gated DeltaNet (linear attention with a recurrent state) over every span's rows in order.

    `qkv [rows, channels]` is the input of the convolution, `beta` and `alpha` `[rows, value heads]`
    come before their activations. Returns `[rows, value heads, dim]`, not yet normed, and updates
    the states, but not those of guessed spans. A sequence's rows give the same bits however they
    are divided into steps, and guessed or not: a guessed row goes on from its parent's state.
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


class GatedNormOp(Protocol):
    """Return `weight * x / sqrt(mean(x^2) + eps) * silu(gate)` over the last axis."""

    def __call__(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...


class RouteOp(Protocol):
    """Return the picked experts of rows with logits `[rows, experts]`.

    The best expert comes first, and the lower id first on ties. `bias [experts]` is added to the
    scores for the choice, but not to the weights. Picks are counted in `counts [experts]` (int64).
    """

    def __call__(
        self,
        logits: torch.Tensor,
        rule: RouterRule,
        bias: torch.Tensor | None,
        counts: torch.Tensor,
    ) -> Picks: ...


class ExpertsOp(Protocol):
    """Return the weighted sum of each row's experts, `down(act(gate x) * up x)`.

    `x [rows, hidden]`, `ids` int32 and `weights` `[rows, used]`. The order of a row's sum depends
    on that row's experts only, so that its bits do not depend on other rows. A kernel uses
    `scratch` if given, else it allocates its own.
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
