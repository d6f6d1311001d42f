"""Quantisation of floats to the types of the KV cache.

Blocks have the bits that GGUF's reference quantisers write, except in two cases in which those
give infinities: a scale beyond f16 is stored as the largest f16, and a step whose inverse overflows
counts as zero.
"""

import torch

from headroom.errors import KernelError
from headroom.formats.quants import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, QuantType
from headroom.kernels.ops import Case
from headroom.kernels.weight import PLAIN_TYPES

BLOCK_VALUES = 32
CACHE_TYPES = (*PLAIN_TYPES, *(quant.name for quant in (Q8_0, Q5_1, Q5_0, Q4_1, Q4_0)))


def refuses_cache(case: Case) -> str | None:
    """Return why the KV cache cannot have the types of a case; None if it can."""
    for kind in (case.k_type, case.v_type):
        if kind not in CACHE_TYPES:
            return f"{kind} is not a cache type ({', '.join(CACHE_TYPES)})"
    return None


def quantise(x: torch.Tensor, quant: QuantType) -> torch.Tensor:
    """Return `x` in a cache type: floats for plain types, else bytes along the last axis."""
    if quant.name in PLAIN_TYPES:
        return x.to(PLAIN_TYPES[quant.name])
    if quant.name not in CACHE_TYPES:
        raise KernelError(
            f"{quant} is not a cache type.", hint=f"Choose from {', '.join(CACHE_TYPES)}."
        )
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK_VALUES, BLOCK_VALUES)
    if quant is Q8_0:
        parts = _eight_bits(blocks)
    elif quant in (Q4_0, Q5_0):
        parts = _signed(blocks, 16 if quant is Q5_0 else 8)
    else:
        parts = _ranged(blocks, 31 if quant is Q5_1 else 15)
    return torch.cat(parts, dim=-1).flatten(-2)


def _eight_bits(blocks: torch.Tensor) -> list[torch.Tensor]:
    step = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * _inverse(step)
    whole = scaled.trunc()
    rounded = whole + (2 * (scaled - whole)).trunc()  # halves are rounded away from zero
    return [_half(step), rounded.clamp(-127, 127).to(torch.int8).view(torch.uint8)]


def _signed(blocks: torch.Tensor, zero_point: int) -> list[torch.Tensor]:
    """Q4_0, Q5_0: the value of largest magnitude becomes the lowest code, -8 or -16."""
    peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    step = peak / -zero_point
    # Computed in float64 and rounded once, like an fma.
    raised = (blocks.double() * _inverse(step).double() + (zero_point + 0.5)).float()
    quants = raised.trunc().clamp(0, 2 * zero_point - 1)
    return [_half(step), *_pack(quants.to(torch.int64), five=zero_point == 16)]


def _ranged(blocks: torch.Tensor, top: int) -> list[torch.Tensor]:
    """Q4_1, Q5_1: equal steps from the lowest value to the highest."""
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    step = (high - low) / top
    quants = ((blocks - low) * _inverse(step) + 0.5).trunc().clamp(0, top)
    return [_half(step), _half(low), *_pack(quants.to(torch.int64), five=top == 31)]


def _inverse(step: torch.Tensor) -> torch.Tensor:
    inverse = 1 / step
    return torch.where(inverse.isinf(), 0, inverse)


def _half(scale: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.float16).max
    return scale.clamp(-largest, largest).half().view(torch.uint8)


def _pack(quants: torch.Tensor, five: bool) -> list[torch.Tensor]:
    """Return 32 fifth bits as four bytes if `five`, then 16 bytes: low nibbles, then high ones."""
    low, high = quants.chunk(2, dim=-1)
    nibbles = ((low & 15) | (high & 15) << 4).to(torch.uint8)
    if not five:
        return [nibbles]
    places = torch.arange(8, device=quants.device)
    bits = (quants >> 4).reshape(*quants.shape[:-1], 4, 8) << places
    return [bits.sum(-1).to(torch.uint8), nibbles]
