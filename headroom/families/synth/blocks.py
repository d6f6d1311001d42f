"""Random blocks of every weight type: random bits, with scales that give the wanted spread.

The spread of values is their standard deviation.
"""

from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from headroom.formats.quants import (
    BF16,
    F16,
    F32,
    IQ4_NL,
    MXFP4,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    QuantType,
)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

HEADS = 4096  # sets of scales from which each block of a tensor takes one at random
PLAIN_LEVELS = 65536  # different values of a plain tensor: one for each 16 random bits

# Spread of the values of a block of random bits whose scales are 1.
SPREAD = {
    Q4_0: 4.637, Q4_1: 4.610, Q5_0: 9.247, Q5_1: 9.233, Q8_0: 73.90,
    Q4_K: 4.610, Q5_K: 9.233, Q6_K: 18.48, IQ4_NL: 67.65, MXFP4: 2.926,
}  # fmt: skip
_MIDDLE = {Q4_1: 7.5, Q5_1: 15.5, Q4_K: 7.5, Q5_K: 15.5}  # of types without negative numbers


def random_source(*key: int) -> np.random.Generator:
    """Return a fast generator of random bits, determined by all numbers of `key`."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))


def random_bytes(quant: QuantType, values: int, std: float, source: np.random.Generator) -> Bytes:
    """Return whole blocks whose values have mean 0 and about the spread `std`."""
    if quant.block == 1:
        picks = _bits(source, 2 * values).view(np.uint16)[:values]
        return _levels(quant, std)[picks].view(np.uint8)
    count = values // quant.block
    blocks = _bits(source, count * quant.block_bytes)[: count * quant.block_bytes]
    blocks = blocks.reshape(count, quant.block_bytes)
    if quant is Q8_0:  # no quantiser makes -128, and kernels may rely on that
        numbers = blocks[:, 2:].view(np.int8)
        np.maximum(numbers, -127, out=numbers)
    start, heads = _heads(quant, std)
    picks = _bits(source, 2 * count).view(np.uint16)[:count] % HEADS
    blocks[:, start : start + heads.shape[1]] = heads[picks]
    return blocks.reshape(-1)


def constant_bytes(quant: QuantType, value: float) -> Bytes:
    """Return one block (of a plain type: one value) whose values are all `value`, which is > 0."""
    if quant.block == 1:
        return as_plain(np.full(1, value, np.float32), quant)
    block = np.full(quant.block_bytes, 0xFF, np.uint8)  # every number is the largest one
    zero = _half([0.0])
    if quant in (Q4_K, Q5_K):
        largest = 63 * (15 if quant is Q4_K else 31)
        block[:16] = np.concatenate([_half([value / largest]), zero, _pack_scales(_sixes())], 1)[0]
    elif quant is Q6_K:
        block[192:208], block[208:] = 127, _half([value / (31 * 127)])[0]
    elif quant in (Q4_1, Q5_1):
        block[:4] = np.concatenate([zero, _half([value])], 1)[0]
    else:
        largest = {Q4_0: 7, Q5_0: 15, Q8_0: 127, IQ4_NL: 113}[quant]
        if quant is Q8_0:
            block[2:] = 127
        block[:2] = _half([value / largest])[0]
    return block


def as_plain(values: Floats, quant: QuantType) -> Bytes:
    """Return numbers as the bytes of f32, f16 or bf16."""
    if quant is F32:
        return np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
    if quant is F16:
        return values.astype(np.float16).view(np.uint8).reshape(-1)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
    return rounded.astype(np.uint16).view(np.uint8).reshape(-1)


def normal_values(count: int, source: np.random.Generator) -> Floats:
    """Return normal numbers of spread 1."""
    return source.standard_normal(count, np.float32)


def _bits(source: np.random.Generator, size: int) -> Bytes:
    return source.integers(0, 1 << 64, -(-size // 8), np.uint64).view(np.uint8)


@cache
def _quantiles() -> Floats:
    normal = NormalDist()
    return np.array(
        [normal.inv_cdf((i + 0.5) / PLAIN_LEVELS) for i in range(PLAIN_LEVELS)], np.float32
    )


@cache
def _levels(quant: QuantType, std: float) -> np.ndarray[Any, Any]:
    """Return the values that 16 random bits index, as bits of a plain type."""
    wide = np.uint32 if quant is F32 else np.uint16
    assert quant in (F32, F16, BF16)
    return as_plain(_quantiles() * np.float32(std), quant).view(wide)


@cache
def _heads(quant: QuantType, std: float) -> tuple[int, Bytes]:
    """Return the offset of a block's scales in bytes, and the sets of scales to take from."""
    return _HEAD_MAKERS[quant](quant, std / SPREAD[quant], random_source(quant.ggml_id))


def _signed_head(quant: QuantType, scale: float, source: np.random.Generator) -> tuple[int, Bytes]:
    # The integers of these types reach one further below 0; scales of both signs balance that.
    scales = _jitter(source) * scale
    scales[::2] *= -1
    return 0, _half(scales)


def _offset_head(quant: QuantType, scale: float, source: np.random.Generator) -> tuple[int, Bytes]:
    scales = _jitter(source) * scale
    return 0, np.concatenate([_half(scales), _half(-_MIDDLE[quant] * scales)], 1)


def _k_head(quant: QuantType, scale: float, source: np.random.Generator) -> tuple[int, Bytes]:
    """Return scales for each group, and minima that shift the mean of each group to 0."""
    sixes = source.integers(32, 64, (HEADS, 8)).astype(np.uint8)
    scales = _jitter(source) * (scale / _rms(sixes))
    halves = _half(scales).view(np.float16).astype(np.float32).reshape(-1)
    return 0, np.concatenate(
        [_half(scales), _half(halves * _MIDDLE[quant]), _pack_scales(sixes)], 1
    )


def _q6_head(quant: QuantType, scale: float, source: np.random.Generator) -> tuple[int, Bytes]:
    groups = source.integers(64, 128, (HEADS, 16)).astype(np.int8)
    groups[:, ::2] *= -1
    scales = _jitter(source) * (scale / _rms(groups))
    return 192, np.concatenate([groups.view(np.uint8), _half(scales)], 1)


def _power_head(quant: QuantType, scale: float, source: np.random.Generator) -> tuple[int, Bytes]:
    """Return powers of two below and above the scale, mixed so that the spread is right."""
    low = int(np.floor(np.log2(scale)))
    share = (scale**2 / 4.0**low - 1) / 3  # of blocks with twice the low power
    powers = low + 127 + (np.arange(HEADS) < share * HEADS)
    return 0, powers.astype(np.uint8)[:, None]


_HEAD_MAKERS: dict[
    QuantType, Callable[[QuantType, float, np.random.Generator], tuple[int, Bytes]]
] = {
    Q4_0: _signed_head, Q5_0: _signed_head, Q8_0: _signed_head, IQ4_NL: _signed_head,
    Q4_1: _offset_head, Q5_1: _offset_head, Q4_K: _k_head, Q5_K: _k_head, Q6_K: _q6_head,
    MXFP4: _power_head,
}  # fmt: skip


def _jitter(source: np.random.Generator) -> Floats:
    """Return factors near 1 whose squares have mean 1: blocks differ, their spread does not."""
    factors = source.uniform(0.7, 1.3, HEADS)
    return (factors / _rms(factors)).astype(np.float32)


def _rms(values: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values.astype(np.float64)))))


def _half(values: Any) -> Bytes:
    return np.asarray(values).astype(np.float16).view(np.uint8).reshape(-1, 2)


def _sixes() -> Bytes:
    return np.full((1, 8), 63, np.uint8)


def _pack_scales(sixes: Bytes) -> Bytes:
    """Return eight scales of six bits each, and minima equal to them, in twelve bytes."""
    low, high = sixes[:, :4], sixes[:, 4:]
    tops = low | (high >> 4 << 6)  # the two upper bits of the last four lie above the first four
    return np.concatenate([tops, tops, (high & 15) | (high & 15) << 4], 1)
