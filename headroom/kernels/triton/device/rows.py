"""Operations on single rows: norms, rotary embedding, gated activation, top-k routing."""

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """Return `x * sigmoid(x)`."""
    return x / (1 + tl.exp(-x))


@triton.jit
def rms_norm(x, weight, gate, out, columns, eps, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row's norm, multiplied by the silu of a gate if GATED."""
    column = tl.arange(0, BLOCK)
    ok = column < columns
    place = tl.program_id(0).to(tl.int64) * columns + column
    value = tl.load(x + place, ok, other=0.0)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    normed *= tl.load(weight + column, ok, other=0.0)
    if GATED:
        normed *= silu(tl.load(gate + place, ok, other=0.0))
    tl.store(out + place, normed, ok)


@triton.jit
def rope(x, cos, sin, out, heads, dim, half, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row's heads with their first `2 * half` values rotated."""
    row = tl.program_id(1).to(tl.int64)
    head = (tl.program_id(0) * HEADS + tl.arange(0, HEADS))[:, None]
    value = tl.arange(0, BLOCK)[None, :]
    ok = (head < heads) & (value < dim)
    turned = value < 2 * half
    at = (row * heads + head) * dim
    own = tl.load(x + at + value, ok, other=0.0)
    partner = tl.where(value < half, value + half, value - half)
    other = tl.load(x + at + partner, ok & turned, other=0.0)
    angle = row * half + tl.where(value < half, value, value - half)
    c = tl.load(cos + angle, turned, other=1.0)
    s = tl.load(sin + angle, turned, other=0.0)
    tl.store(out + at + value, own * c + tl.where(value < half, -other, other) * s, ok)


@triton.jit(do_not_specialize=["count"])
def gated(gate, up, out, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Write `act(gate) * up`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + place, place < count, other=0.0)
    u = tl.load(up + place, place < count, other=0.0)
    if GELU:  # (1 + tanh(y)) / 2 is sigmoid(2 y)
        y = 1.5957691216057308 * (g + 0.044715 * g * g * g)
        act = g / (1 + tl.exp(-y))
    else:
        act = silu(g)
    tl.store(out + place, act * u, place < count)


@triton.jit
def route(
    logits, bias, counts, ids, weights, experts, scale, softcap,
    USED: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Write the ids and weights of a row's experts, the best first, and count the picks."""
    row = tl.program_id(0).to(tl.int64)
    expert, rank = tl.arange(0, BLOCK), tl.arange(0, RANKS)
    ok = expert < experts
    logit = tl.load(logits + row * experts + expert, ok, other=0.0)
    if softcap > 0:
        logit = softcap * (2 / (1 + tl.exp(-2 * logit / softcap)) - 1)
    if SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
    else:
        logit = tl.where(ok, logit, -float("inf"))
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, ok, other=0.0)
    choice = tl.where(ok, choice, -float("inf"))
    chosen = tl.zeros((RANKS,), tl.int32)
    weight = tl.zeros((RANKS,), tl.float32)
    for place in tl.static_range(USED):
        best = tl.argmax(choice, 0)  # the lower id on ties
        chosen = tl.where(rank == place, best, chosen)
        own = tl.sum(tl.where(expert == best, score, 0.0), 0)
        weight = tl.where(rank == place, own, weight)
        choice = tl.where(expert == best, -float("inf"), choice)
        tl.atomic_add(counts + best, 1)
    if NORMALISE:
        weight = weight / tl.sum(weight, 0)
    tl.store(ids + row * USED + rank, chosen, rank < USED)
    tl.store(weights + row * USED + rank, weight * scale, rank < USED)
