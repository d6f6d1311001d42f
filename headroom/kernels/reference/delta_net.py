"""Gated DeltaNet (linear attention with a recurrent state) in plain torch, row by row.

Every row goes through the same operations on tensors of the same shapes, so that its bits do not
depend on how a sequence is divided into steps.
"""

from collections.abc import Callable

import torch

from headroom.kernels.ops import DeltaNetWeights, RecurrentState, Span
from headroom.kernels.reference.elementwise import sigmoid, silu, softplus

L2_EPS = 1e-6  # inside the root, so that a vector of zeros stays zeros


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
    out = torch.empty(len(qkv), heads, dim, device=qkv.device)

    def advance(row: int, memory: torch.Tensor, inputs: torch.Tensor) -> None:
        window = torch.cat((inputs, qkv[row : row + 1]))
        inputs.copy_(window[1:])
        queries, keys, values = _convolved(window, weights, heads, dim)
        time = softplus(alpha[row] + weights.dt_bias)
        memory *= (weights.decay * time).exp()[:, None, None]
        known = (memory * keys[:, :, None]).sum(1)  # [heads, dim]
        change = sigmoid(beta[row])[:, None] * (values - known)
        memory += keys[:, :, None] * change[:, None, :]
        out[row] = (memory * queries[:, :, None]).sum(1)

    for span in spans:
        memory, inputs = state.memory[span.state_slot], state.inputs[span.state_slot]
        if span.guessed:
            _advance_guesses(span, memory, inputs, advance)
            continue
        if span.start == 0:
            memory.zero_()
            inputs.zero_()
        for row in range(span.first_row, span.first_row + span.rows):
            advance(row, memory, inputs)
    return out


def _advance_guesses(
    span: Span,
    memory: torch.Tensor,
    inputs: torch.Tensor,
    advance: Callable[[int, torch.Tensor, torch.Tensor], None],
) -> None:
    """Run guessed rows, each on a copy of the state after the row that it follows.

    A state is held only until the last row that follows its own: a chain holds one at a time.
    """
    parents = span.parents()
    states = {
        -1: (memory, inputs)
        if span.start
        else (memory.new_zeros(memory.shape), inputs.new_zeros(inputs.shape))
    }
    for row, parent in enumerate(parents):
        own = tuple(part.clone() for part in states[parent])
        advance(span.first_row + row, *own)
        states[row] = own[0], own[1]
        for done in [at for at in states if at not in parents[row + 1 :]]:
            del states[done]


def _convolved(
    window: torch.Tensor, weights: DeltaNetWeights, heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the last row's queries, keys and values, one of each per value head."""
    mixed = silu((window * weights.conv.T).sum(0)).view(-1, dim)
    count = weights.key_heads
    queries, keys, values = mixed[:count], mixed[count : 2 * count], mixed[2 * count :]
    head = torch.arange(heads, device=window.device)
    source = head % count if weights.tiled else head // (heads // count)
    return _unit(queries)[source] * dim**-0.5, _unit(keys)[source], values


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps) * silu(gate)` over the last axis."""
    normed = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    return normed * silu(gate)
