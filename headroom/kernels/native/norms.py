"""Norms, rotary embedding and gated activation on the CPU."""

import torch

from headroom.kernels.native.module import POOL


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last axis."""
    x, weight = x.contiguous(), weight.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // max(columns, 1)
    POOL.ops.rms_norm(x.data_ptr(), weight.data_ptr(), rows, columns, eps, out.data_ptr())
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first dimensions of each head; dimensions beyond the tables stay unchanged."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    sizes = (*x.shape, cos.shape[-1])
    POOL.ops.rope(x.data_ptr(), sizes, cos.data_ptr(), sin.data_ptr(), out.data_ptr())
    return out


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return `act(gate) * up`."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    gelu = activation == "gelu"
    POOL.ops.gated(gelu, gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr())
    return out
