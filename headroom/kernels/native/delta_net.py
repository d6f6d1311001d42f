"""Gated DeltaNet (linear attention with a state) and its norm on the CPU."""

import torch

from headroom.kernels.native.module import POOL
from headroom.kernels.ops import DeltaNetWeights, RecurrentState, Span


def delta_net(
    qkv: torch.Tensor,
    beta: torch.Tensor,
    alpha: torch.Tensor,
    weights: DeltaNetWeights,
    state: RecurrentState,
    spans: tuple[Span, ...],
) -> torch.Tensor:
    """Run every span's rows through its sequence's state, and update it but for guesses."""
    _, heads, _, dim = state.memory.shape
    qkv, beta, alpha = qkv.contiguous(), beta.contiguous(), alpha.contiguous()
    rows, channels = qkv.shape
    mixed, gates = torch.empty(rows, channels), torch.empty(2, rows, heads)
    out = torch.empty(rows, heads, dim)
    table, parents = _span_table(spans)
    POOL.ops.delta_net(
        (weights.key_heads, heads, dim, weights.conv.shape[1]), weights.tiled,
        [t.data_ptr() for t in (weights.conv, weights.decay, weights.dt_bias)],
        [state.memory.data_ptr(), state.inputs.data_ptr()], table.data_ptr(), len(spans),
        parents.data_ptr(),
        [t.data_ptr() for t in (qkv, beta, alpha, mixed, gates, out)],
    )  # fmt: skip
    return out


def _span_table(spans: tuple[Span, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [spans, 5], the last the place of a guessed span's parents (-1: none); those."""
    table: list[tuple[int, ...]] = []
    parents: list[int] = []
    for span in spans:
        place = len(parents) if span.guessed else -1
        table.append((span.first_row, span.rows, span.start, span.state_slot, place))
        parents += span.parents() if span.guessed else ()
    return torch.tensor(table), torch.tensor(parents, dtype=torch.int64)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps) * silu(gate)` over the last axis."""
    x, gate, weight = x.contiguous(), gate.contiguous(), weight.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // max(columns, 1)
    POOL.ops.gated_norm(
        x.data_ptr(), gate.data_ptr(), weight.data_ptr(), (rows, columns), eps, out.data_ptr()
    )
    return out
