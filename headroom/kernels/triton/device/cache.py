"""Quantisation of keys and values to the cache types, with the bits of `reference/quantise.py`."""

import triton
import triton.language as tl


@triton.jit
def write(
    x, slots, stored, values, row_size,
    KIND: tl.constexpr, BLOCKS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Store one row's `values`, all heads one after another, at its slot.

    KIND is the type's number in GGUF; `row_size` is a slot's size in bytes, or in values if plain.
    """
    row = tl.program_id(0).to(tl.int64)
    at = stored + tl.load(slots + row).to(tl.int64) * row_size
    x += row * values
    if KIND == 0 or KIND == 1 or KIND == 30:
        place = tl.arange(0, VALUES)
        value = tl.load(x + place, place < values, other=0.0)
        if KIND == 30:
            value = _rounded_to_bf16(value)
        tl.store(at + place, value.to(stored.dtype.element_ty), place < values)
    else:
        block = tl.arange(0, BLOCKS)[:, None]
        ok = block * 32 < values
        value = tl.load(x + block * 32 + tl.arange(0, 32)[None, :], ok, other=0.0)
        if KIND == 8:
            _eight_bits(value, at + block * 34, ok)
        elif KIND == 2:
            _signed(value, at + block * 18, ok, 8)
        elif KIND == 6:
            _signed(value, at + block * 22, ok, 16)
        elif KIND == 3:
            _ranged(value, at + block * 20, ok, 15)
        else:
            tl.static_assert(KIND == 7, "not a cache type")
            _ranged(value, at + block * 24, ok, 31)


@triton.jit
def _rounded_to_bf16(x):
    """Round to bf16, half to even; a cast would truncate in Triton's interpreter."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _eight_bits(value, at, ok):
    step = tl.div_rn(tl.max(tl.abs(value), 1, keep_dims=True), tl.full(ok.shape, 127.0, tl.float32))
    scaled = value * _inverse(step)
    whole = _truncated(scaled)
    rounded = whole + _truncated(2 * (scaled - whole))  # halves go away from zero
    rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
    _store_half(at, step, ok)
    tl.store(at + 2 + tl.arange(0, 32)[None, :], rounded.to(tl.int8).to(tl.uint8, bitcast=True), ok)


@triton.jit
def _signed(value, at, ok, ZERO: tl.constexpr):
    """Q4_0, Q5_0: the value of largest magnitude becomes the lowest code, -8 or -16."""
    place = tl.argmax(tl.abs(value), 1, keep_dims=True)
    peak = tl.sum(tl.where(tl.arange(0, 32)[None, :] == place, value, 0.0), 1, keep_dims=True)
    step = tl.div_rn(peak, tl.full(ok.shape, -ZERO, tl.float32))
    # Computed in float64 and rounded once, like an fma.
    raised = value.to(tl.float64) * _inverse(step).to(tl.float64) + (ZERO + 0.5)
    number = _truncated(raised.to(tl.float32))
    number = tl.minimum(tl.maximum(number, 0.0), 2.0 * ZERO - 1)
    _store_half(at, step, ok)
    _store_numbers(at + 2, number.to(tl.int32), ok, ZERO == 16)


@triton.jit
def _ranged(value, at, ok, TOP: tl.constexpr):
    """Q4_1, Q5_1: equal steps from the lowest value to the highest."""
    low, high = tl.min(value, 1, keep_dims=True), tl.max(value, 1, keep_dims=True)
    step = tl.div_rn(high - low, tl.full(ok.shape, TOP, tl.float32))
    number = _truncated((value - low) * _inverse(step) + 0.5)
    number = tl.minimum(tl.maximum(number, 0.0), 1.0 * TOP)
    _store_half(at, step, ok)
    _store_half(at + 2, low, ok)
    _store_numbers(at + 4, number.to(tl.int32), ok, TOP == 31)


@triton.jit
def _truncated(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def _inverse(step):
    inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    return tl.where(tl.abs(inverse) == float("inf"), 0.0, inverse)


@triton.jit
def _store_half(at, scale, ok):
    clamped = tl.minimum(tl.maximum(scale, -65504.0), 65504.0)
    tl.store(at.to(tl.pointer_type(tl.float16)), clamped.to(tl.float16), ok)


@triton.jit
def _store_numbers(at, number, ok, FIVE: tl.constexpr):
    """Store 32 fifth bits as a word if FIVE, then 16 bytes: low nibbles first, then high ones."""
    blocks: tl.constexpr = number.shape[0]
    if FIVE:
        bit = tl.reshape(number >> 4, (blocks, 4, 8)) << tl.arange(0, 8)[None, None, :]
        tl.store(at + tl.arange(0, 4)[None, :], tl.sum(bit, 2).to(tl.uint8), ok)
        at += 4
    halves = tl.reshape(number & 15, (blocks, 2, 16)) << (tl.arange(0, 2) * 4)[None, :, None]
    tl.store(at + tl.arange(0, 16)[None, :], tl.sum(halves, 1).to(tl.uint8), ok)
