"""Products with packed weights, which are unpacked in registers."""

import triton
import triton.language as tl

from headroom.kernels.triton.device.unpack import LANES, unpack


@triton.jit
def _weights(data, row, rows, stride, first, columns, KIND: tl.constexpr, BK: tl.constexpr):
    """Unpack columns first .. first + BK of a weight's rows `row [n]`: [n, groups, LANES]."""
    column = (first + tl.arange(0, BK // LANES) * LANES)[None, :, None]
    offset = (row.to(tl.int64) * stride)[:, None, None]
    return unpack(data, offset, column, columns, (row < rows)[:, None, None], KIND)


@triton.jit
def _tile(
    x, x_row, x_ok, data, row, rows, stride, columns,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return products [BN, BM] of BN weight rows with BM rows of `x`, summed in a fixed order."""
    sums = tl.zeros((BN, BM), tl.float32)
    for first in range(0, columns, BK):
        value = _weights(data, row, rows, stride, first, columns, KIND, BK)
        column = first + tl.arange(0, BK)
        place = x_row.to(tl.int64)[:, None] * columns + column[None, :]
        own = tl.load(x + place, x_ok[:, None] & (column < columns)[None, :], other=0.0)
        sums = tl.dot(
            tl.reshape(value, (BN, BK)).to(DTYPE), tl.trans(own.to(DTYPE)), sums,
            input_precision="ieee",
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["tokens"])
def product(
    x, data, out, tokens, rows, stride, columns, out_stride,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write `x [tokens, columns]` times a weight's transpose to `out [tokens, rows]`."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    token = tl.program_id(1) * BM + tl.arange(0, BM)
    sums = _tile(
        x, token, token < tokens, data, row, rows, stride, columns, KIND, DTYPE, BN, BM, BK
    )
    place = token.to(tl.int64)[None, :] * out_stride + row[:, None]
    tl.store(out + place, sums, (token < tokens)[None, :] & (row < rows)[:, None])


@triton.jit
def single(
    x, data, out, rows, stride, columns,
    KIND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write one row `x [columns]` times a weight's transpose to `out [rows]`, in float32."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    sums = tl.zeros((BN, BK // LANES, LANES), tl.float32)
    place = tl.arange(0, BK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for first in range(0, columns, BK):
        own = tl.load(x + first + place, first + place < columns, other=0.0)[None, :, :]
        sums += _weights(data, row, rows, stride, first, columns, KIND, BK) * own
    tl.store(out + row, tl.sum(tl.sum(sums, 2), 1), row < rows)


@triton.jit
def single_words(
    x, data, out, rows, stride, columns,
    KIND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Like `single`, for Q4_K and Q5_K: eight 32-bit words hold 64 columns."""
    row = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None, None]
    pair = tl.arange(0, BK // 64)[None, :, None]  # pair of groups: in low and in high nibbles
    word = tl.arange(0, 8)[None, None, :]
    sums = tl.zeros((BN, BK // 64, 8), tl.float32)
    size: tl.constexpr = 144 if KIND == 12 else 176
    for first in range(0, columns, BK):
        column = first + pair * 64
        ok = (row < rows) & (column < columns)
        at = data + row.to(tl.int64) * stride + column // 256 * size
        words = (at + (size - 128) + column % 256 // 2).to(tl.pointer_type(tl.int32))
        quants = tl.load(words + word, ok, other=0)
        fifths = quants
        if KIND == 13:
            fifths = tl.load((at + 16).to(tl.pointer_type(tl.int32)) + word, ok, other=0)
        scales = tl.load(at.to(tl.pointer_type(tl.float16)), ok, other=0.0).to(tl.float32)
        lows = tl.load((at + 2).to(tl.pointer_type(tl.float16)), ok, other=0.0).to(tl.float32)
        for part in tl.static_range(2):
            group = column % 256 // 32 + part
            low = tl.load(at + 4 + group % 4, ok, other=0).to(tl.int32)
            mid = tl.load(at + 8 + group % 4, ok, other=0).to(tl.int32)
            high = tl.load(at + 12 + group % 4, ok, other=0).to(tl.int32)
            scale = tl.where(group < 4, low & 63, (high & 15) | ((low >> 6) << 4))
            least = tl.where(group < 4, mid & 63, (high >> 4) | ((mid >> 6) << 4))
            dots = tl.zeros((BN, BK // 64, 8), tl.float32)
            total = tl.zeros((1, BK // 64, 8), tl.float32)
            for byte in tl.static_range(4):
                number = quants >> (8 * byte + 4 * part) & 15
                if KIND == 13:
                    number |= (fifths >> (8 * byte + group) & 1) << 4
                place = column + 32 * part + 4 * word + byte
                own = tl.load(x + place, place < columns, other=0.0)
                dots += number.to(tl.float32) * own
                total += own
            sums += scales * scale.to(tl.float32) * dots - lows * least.to(tl.float32) * total
    kept = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(out + kept, tl.sum(tl.sum(sums, 2), 1), kept < rows)


@triton.jit
def expert_product(
    x, data, out, tiles, sources, experts, rows, stride, columns,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the products of sorted picks with their experts' matrices to `out [picks, rows]`.

    `tiles [3, programs]`: each tile's expert, first pick, and one past its expert's last pick.
    `sources [picks]`: the row of `x` that a pick reads.
    """
    count = tl.num_programs(1)
    expert = tl.load(tiles + tl.program_id(1)).to(tl.int64)
    if expert < experts:
        pick = tl.load(tiles + count + tl.program_id(1)) + tl.arange(0, BM)
        ok = pick < tl.load(tiles + 2 * count + tl.program_id(1))
        source = tl.load(sources + pick, ok, other=0)
        row = tl.program_id(0) * BN + tl.arange(0, BN)
        own = data + expert * rows * stride
        sums = _tile(x, source, ok, own, row, rows, stride, columns, KIND, DTYPE, BN, BM, BK)
        place = pick.to(tl.int64)[None, :] * rows + row[:, None]
        tl.store(out + place, sums, ok[None, :] & (row < rows)[:, None])


@triton.jit
def combine(answers, places, weights, out, hidden, USED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the weighted sum of each row's experts, the best first."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(USED):
        place = tl.load(places + row * USED + rank)
        answer = tl.load(answers + place * hidden + column, column < hidden, other=0.0)
        sums += tl.load(weights + row * USED + rank) * answer
    tl.store(out + row * hidden + column, sums, column < hidden)


@triton.jit
def embed(data, ids, out, stride, columns, out_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Write rows of an embedding table as float32."""
    token = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK // LANES) * LANES
    offset = tl.zeros((1, 1, 1), tl.int64) + tl.load(ids + token).to(tl.int64) * stride
    every = tl.full((1, 1, 1), 1, tl.int1)
    value = unpack(data, offset, column[None, :, None], columns, every, KIND)
    place = column[None, :, None] + tl.arange(0, LANES)[None, None, :]
    tl.store(out + token.to(tl.int64) * out_stride + place, value, place < columns)
