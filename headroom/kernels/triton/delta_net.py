"""Gated DeltaNet (linear attention with a state) in Triton, row by row."""

import torch

from headroom.kernels.ops import DeltaNetWeights, RecurrentState, Span
from headroom.kernels.triton.launch import blocks, find_kernel, power_of_2

CHANNEL_BLOCK = 512  # channels that one program convolves
STATE_COLUMNS = 16  # columns of a head's state that one program holds


def delta_net(
    qkv: torch.Tensor,
    beta: torch.Tensor,
    alpha: torch.Tensor,
    weights: DeltaNetWeights,
    state: RecurrentState,
    spans: tuple[Span, ...],
) -> torch.Tensor:
    """Run every span's rows through its sequence's state, and update the state."""
    assert not any(span.guessed for span in spans), "steps of a GPU verify no guesses yet"
    _, heads, _, dim = state.memory.shape
    (rows, channels), taps, device = qkv.shape, weights.conv.shape[1], qkv.device
    qkv, beta, alpha = qkv.contiguous(), beta.contiguous(), alpha.contiguous()
    out, mixed = torch.empty(rows, heads, dim, device=device), torch.empty_like(qkv)
    if not rows:
        return out
    table = torch.tensor([(s.first_row, s.rows, s.start, s.state_slot) for s in spans]).to(device)
    sequence = torch.repeat_interleave(
        torch.arange(len(spans)), torch.tensor([span.rows for span in spans])
    ).to(device)
    steps = blocks(channels, CHANNEL_BLOCK)
    find_kernel("delta_net", "convolve")[steps, rows](
        *(qkv, state.inputs, weights.conv, sequence, table, mixed, channels, taps, CHANNEL_BLOCK)
    )
    if taps > 1:
        find_kernel("delta_net", "keep_inputs")[steps, len(spans)](
            qkv, state.inputs, table, channels, taps, CHANNEL_BLOCK
        )
    part = min(STATE_COLUMNS, power_of_2(dim))
    find_kernel("delta_net", "recur")[blocks(dim, part), heads, len(spans)](
        *(mixed, beta, alpha, weights.decay, weights.dt_bias, state.memory, table, out),
        *(heads, weights.key_heads, weights.tiled, dim, power_of_2(dim), part),
    )
    return out
