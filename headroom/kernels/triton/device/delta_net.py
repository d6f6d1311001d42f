"""Gated DeltaNet row by row; a program keeps some columns of a head's state in registers."""

import triton
import triton.language as tl

from headroom.kernels.triton.device.rows import silu

SPAN_FIELDS = tl.constexpr(4)  # numbers of a span: first row, rows, start, slot


@triton.jit
def convolve(
    qkv, inputs, conv, sequence, spans, out, channels, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the silu of each channel's sum over the last TAPS rows of its sequence."""
    row = tl.program_id(1).to(tl.int64)
    spans += tl.load(sequence + row) * SPAN_FIELDS
    first, start, slot = tl.load(spans), tl.load(spans + 2), tl.load(spans + 3)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = channel < channels
    sums = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        before = row - (TAPS - 1 - tap)
        here = channel < tl.where(before >= first, channels, 0)
        value = tl.load(qkv + before * channels + channel, here, other=0.0)
        if TAPS > 1:
            kept = slot * (TAPS - 1) + before - first + TAPS - 1
            earlier = channel < tl.where((before < first) & (start > 0), channels, 0)
            value += tl.load(inputs + kept * channels + channel, earlier, other=0.0)
        sums += value * tl.load(conv + channel * TAPS + tap, ok, other=0.0)
    tl.store(out + row * channels + channel, silu(sums), ok)


@triton.jit
def keep_inputs(qkv, inputs, spans, channels, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """Store each sequence's last TAPS - 1 inputs, oldest first, for its next step."""
    spans += tl.program_id(1) * SPAN_FIELDS
    first, rows = tl.load(spans), tl.load(spans + 1)
    start, slot = tl.load(spans + 2), tl.load(spans + 3)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = channel < channels
    inputs += slot * (TAPS - 1) * channels
    # In this order no input is overwritten before it is read: inputs only move to older places.
    for place in tl.static_range(TAPS - 1):
        source = place + rows - (TAPS - 1)
        here = channel < tl.where(source >= 0, channels, 0)
        new = tl.load(qkv + (first + source) * channels + channel, here, other=0.0)
        earlier = channel < tl.where((source < 0) & (start > 0), channels, 0)
        new += tl.load(inputs + (place + rows) * channels + channel, earlier, other=0.0)
        tl.store(inputs + place * channels + channel, new, ok)


@triton.jit
def recur(
    mixed, beta, alpha, decay, dt_bias, memory, spans, out, heads, key_heads,
    TILED: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Run a span's rows through BV columns of one head's state."""
    spans += tl.program_id(2) * SPAN_FIELDS
    first, rows = tl.load(spans), tl.load(spans + 1)
    start, slot = tl.load(spans + 2), tl.load(spans + 3)
    head = tl.program_id(1)
    key_head = head % key_heads if TILED else head // (heads // key_heads)
    place = tl.arange(0, DP)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    k_ok, v_ok = place < DIM, column < DIM
    ok = k_ok[:, None] & v_ok[None, :]
    at = memory + (slot * heads + head) * DIM * DIM + place[:, None] * DIM + column[None, :]
    state = tl.where(start > 0, tl.load(at, ok, other=0.0), 0.0)
    rate, bias = tl.load(decay + head), tl.load(dt_bias + head)
    channels = (2 * key_heads + heads) * DIM
    for row in range(first, first + rows):
        own = mixed + row * channels
        q = tl.load(own + key_head * DIM + place, k_ok, other=0.0)
        k = tl.load(own + (key_heads + key_head) * DIM + place, k_ok, other=0.0)
        v = tl.load(own + (2 * key_heads + head) * DIM + column, v_ok, other=0.0)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * DIM**-0.5
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        raised = tl.load(alpha + row * heads + head) + bias
        # softplus without overflow: above 20 it equals x
        time = tl.where(raised > 20, raised, tl.log(1 + tl.exp(tl.minimum(raised, 20.0))))
        state *= tl.exp(rate * time)
        known = tl.sum(state * k[:, None], 0)
        share = 1 / (1 + tl.exp(-tl.load(beta + row * heads + head)))
        state += k[:, None] * (share * (v - known))[None, :]
        tl.store(out + (row * heads + head) * DIM + column, tl.sum(state * q[:, None], 0), v_ok)
    tl.store(at, state, ok)
