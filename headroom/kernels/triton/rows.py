"""Norms, rotary embedding, gated activation and top-k routing in Triton."""

import torch

from headroom.kernels.ops import Picks, RouterRule
from headroom.kernels.triton.launch import blocks, find_kernel, power_of_2

GATED_BLOCK = 1024  # values that one program of gated_activation computes
ROPE_VALUES = 2048  # values that one program rotates
EIGHT_WARP_COLUMNS = 4096  # rows with at least so many columns take eight warps, not four


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last axis."""
    return _norm(x, None, weight, eps)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps) * silu(gate)` over the last axis."""
    return _norm(x, gate.contiguous(), weight, eps)


def _norm(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    if x.numel():
        find_kernel("rows", "rms_norm")[(x.numel() // columns,)](
            *(x, weight, x if gate is None else gate, out, columns, eps),
            *(gate is not None, power_of_2(columns)),
            num_warps=8 if columns >= EIGHT_WARP_COLUMNS else 4,
        )
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first dimensions of each head; dimensions beyond the tables stay unchanged."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    rows, heads, dim = x.shape
    out, width = torch.empty_like(x), power_of_2(dim)
    together = min(power_of_2(heads), max(1, ROPE_VALUES // width))
    if x.numel():
        find_kernel("rows", "rope")[blocks(heads, together), rows](
            x, cos, sin, out, heads, dim, cos.shape[-1], together, width
        )
    return out


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return `act(gate) * up`."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if count := gate.numel():
        find_kernel("rows", "gated")[(blocks(count, GATED_BLOCK),)](
            gate, up, out, count, activation == "gelu", GATED_BLOCK
        )
    return out


def route(
    logits: torch.Tensor, rule: RouterRule, bias: torch.Tensor | None, counts: torch.Tensor
) -> Picks:
    """Return the ids and weights of each row's experts, the best first, and count the picks."""
    logits = logits.contiguous()
    rows, experts = logits.shape
    ids = torch.empty(rows, rule.used, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, rule.used, device=logits.device)
    assert counts.shape == (experts,)
    assert counts.is_contiguous()
    if rows:
        find_kernel("rows", "route")[(rows,)](
            *(logits, logits if bias is None else bias.contiguous(), counts, ids, weights),
            *(experts, rule.scale, rule.softcap, rule.used, rule.scores == "sigmoid"),
            *(rule.normalise, bias is not None, power_of_2(experts), power_of_2(rule.used)),
        )
    return Picks(ids, weights)
