"""Floats to the types that caches are stored in."""

import torch

from headroom.errors import KernelError
from headroom.formats.quants import Q8_0, QuantType
from headroom.kernels.weight import PLAIN_TYPES

CACHE_TYPES = (*PLAIN_TYPES, Q8_0.name)


def quantise(x: torch.Tensor, quant: QuantType) -> torch.Tensor:
    """Return `x` in a cache type: floats for plain types, else bytes along the last axis."""
    if quant.name in PLAIN_TYPES:
        return x.to(PLAIN_TYPES[quant.name])
    if quant is Q8_0:
        return _quantise_q8_0(x)
    raise KernelError(
        f"{quant} is not a cache type.", hint=f"Choose from {', '.join(CACHE_TYPES)}."
    )


def _quantise_q8_0(x: torch.Tensor) -> torch.Tensor:
    blocks = x.float().reshape(*x.shape[:-1], -1, Q8_0.block)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    # The scale is stored as f16; what overflows there would come back as infinity.
    stored = scale.clamp(max=torch.finfo(torch.float16).max).half()
    quants = (blocks * inverse).round().clamp(-127, 127).to(torch.int8)
    packed = torch.cat((stored.view(torch.uint8), quants.view(torch.uint8)), dim=-1)
    return packed.flatten(-2)
