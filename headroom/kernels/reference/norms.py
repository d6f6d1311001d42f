"""Norms, rotary embedding and gated activation in plain torch."""

import torch

from headroom.kernels.reference.elementwise import gelu, sigmoid, silu

CLAMP, STEEPNESS = 7.0, 1.702  # of the "clamped" activation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last axis."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first dimensions of each head; dimensions beyond the tables stay unchanged."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]  # one angle for all heads of a row
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(turned, dim=-1)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return `act(gate) * up`."""
    if activation == "clamped":
        gate = gate.clamp(max=CLAMP)
        return gate * sigmoid(STEEPNESS * gate) * (up.clamp(-CLAMP, CLAMP) + 1)
    return (gelu(gate) if activation == "gelu" else silu(gate)) * up
