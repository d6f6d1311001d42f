"""Unpacking of GGUF blocks to float32, in registers.

Values come in groups of LANES columns, which share a scale and a shift in every type. Formulas and
byte offsets are those of `reference/dequant.py`.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(16)  # the most columns that share a scale and a shift in every type
# Four of IQ4_NL's sixteen values in each word, the lowest byte first.
_IQ4_A = tl.constexpr(-1079142271)  # -127, -104, -83, -65
_IQ4_B = tl.constexpr(-152379953)  # -49, -35, -22, -10
_IQ4_C = tl.constexpr(639175937)  # 1, 13, 25, 38
_IQ4_D = tl.constexpr(1901675829)  # 53, 69, 89, 113


@triton.jit
def unpack(data, offset, column, columns, rows_ok, KIND: tl.constexpr):
    """Return values [rows, groups, LANES]; 0 beyond the last column and for rows that are not ok.

    `offset [rows, 1, 1]` is where a row begins, in bytes or in values of a plain type; `column
    [1, groups, 1]` the first column of each group; KIND the type's number in a GGUF file.
    """
    lane = tl.arange(0, LANES)[None, None, :]
    ok = rows_ok & (column < columns)
    if KIND == 0 or KIND == 1 or KIND == 30:  # f32, f16, bf16
        # A plain row may end inside a group.
        value = tl.load(data + offset + column + lane, ok & (column + lane < columns), other=0.0)
        value = value.to(tl.float32)
    elif KIND == 12 or KIND == 13:
        value = _k_groups(data, offset, column, ok, KIND)
    elif KIND == 14:
        value = _q6_k(data, offset, column, ok)
    elif KIND == 8:
        at = data + offset + column // 32 * 34
        value = _signed(_bytes(at + 2 + column % 32 + lane, ok)).to(tl.float32) * _half(at, ok)
    elif KIND == 2 or KIND == 20:  # q4_0, iq4_nl
        at = data + offset + column // 32 * 18
        nibble = _nibbles(at + 2 + lane, column, ok)
        if KIND == 2:
            value = _half(at, ok) * (nibble - 8).to(tl.float32)
        else:
            value = _half(at, ok) * _iq4_nl(nibble).to(tl.float32)
    elif KIND == 3:
        at = data + offset + column // 32 * 20
        nibble = _nibbles(at + 4 + lane, column, ok)
        value = _half(at, ok) * nibble.to(tl.float32) + _half(at + 2, ok)
    elif KIND == 6:
        at = data + offset + column // 32 * 22
        number = _nibbles(at + 6 + lane, column, ok) | _fifth_bits(at + 2, column, ok)
        value = _half(at, ok) * (number - 16).to(tl.float32)
    elif KIND == 7:
        at = data + offset + column // 32 * 24
        number = _nibbles(at + 8 + lane, column, ok) | _fifth_bits(at + 4, column, ok)
        value = _half(at, ok) * number.to(tl.float32) + _half(at + 2, ok)
    else:
        tl.static_assert(KIND == 39, "no such type")
        at = data + offset + column // 32 * 17
        value = _exponents(at, ok) * _mxfp4(_nibbles(at + 1 + lane, column, ok)).to(tl.float32)
    return value


@triton.jit
def _bytes(at, ok):
    return tl.load(at, ok, other=0).to(tl.int32)


@triton.jit
def _signed(byte):
    return (byte ^ 128) - 128


@triton.jit
def _half(at, ok):
    """Read an f16 scale; scales are at even addresses in every type that has them."""
    return tl.load(at.to(tl.pointer_type(tl.float16)), ok, other=0.0).to(tl.float32)


@triton.jit
def _nibbles(at, column, ok):
    """Read nibbles of a block of 32: values 0..15 are low nibbles, 16..31 high ones."""
    return (_bytes(at, ok) >> (column % 32 // 16 * 4)) & 15


@triton.jit
def _fifth_bits(at, column, ok):
    """Read bit 4 of a group's values from a word that has one bit per value."""
    lane = tl.arange(0, LANES)[None, None, :]
    word = tl.load((at + column % 32 // 8).to(tl.pointer_type(tl.uint16)), ok, other=0)
    return ((word.to(tl.int32) >> lane) & 1) << 4


@triton.jit
def _k_groups(data, offset, column, ok, KIND: tl.constexpr):
    """Q4_K and Q5_K: a scale and a minimum of six bits for each 32 values."""
    lane = tl.arange(0, LANES)[None, None, :]
    at = data + offset + column // 256 * (144 if KIND == 12 else 176)
    group, run = column % 256 // 32, column % 32
    low = _bytes(at + 4 + group % 4, ok)
    mid = _bytes(at + 8 + group % 4, ok)
    high = _bytes(at + 12 + group % 4, ok)
    scale = tl.where(group < 4, low & 63, (high & 15) | ((low >> 6) << 4)).to(tl.float32)
    least = tl.where(group < 4, mid & 63, (high >> 4) | ((mid >> 6) << 4)).to(tl.float32)
    quants = at + (16 if KIND == 12 else 48)
    number = _bytes(quants + group // 2 * 32 + run + lane, ok) >> (group % 2 * 4) & 15
    if KIND == 13:
        number |= (_bytes(at + 16 + run + lane, ok) >> group & 1) << 4
    return _half(at, ok) * scale * number.to(tl.float32) - _half(at + 2, ok) * least


@triton.jit
def _q6_k(data, offset, column, ok):
    """Q6_K: two halves of 128 values, each low nibbles of 64 values, then high nibbles."""
    lane = tl.arange(0, LANES)[None, None, :]
    at = data + offset + column // 256 * 210
    half, quarter, run = column % 256 // 128, column % 128 // 32, column % 32
    low = _bytes(at + half * 64 + quarter % 2 * 32 + run + lane, ok) >> (quarter // 2 * 4) & 15
    high = _bytes(at + 128 + half * 32 + run + lane, ok) >> (quarter * 2) & 3
    scale = _half(at + 208, ok) * _signed(_bytes(at + 192 + column % 256 // 16, ok)).to(tl.float32)
    return scale * ((low | high << 4) - 32).to(tl.float32)


@triton.jit
def _iq4_nl(nibble):
    words = tl.where(
        nibble < 8, tl.where(nibble < 4, _IQ4_A, _IQ4_B), tl.where(nibble < 12, _IQ4_C, _IQ4_D)
    )
    return _signed(words >> (nibble % 4 * 8) & 255)


@triton.jit
def _mxfp4(nibble):
    """Return twice the value of a code: 0, 1, 2, 3, 4, 6, 8, 12, and their negatives."""
    size = nibble & 7
    size = tl.where(size < 4, size, (2 + size % 2) << (size // 2) >> 1)
    return tl.where(nibble < 8, size, -size)


@triton.jit
def _exponents(at, ok):
    """Return 2^(exponent - 127) / 2 for doubled values; the two smallest are subnormal."""
    exponent = _bytes(at, ok)
    bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)
