"""Repacking: codes and scales of quantised safetensors, rewritten as GGUF's blocks or as floats.

No function here changes a value: blocks hold the same codes and scales in another order, and
floats are the product of a code and its scale, in float32 (NVFP4: of a code and the product of its
two scales).
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from headroom.errors import FormatError
from headroom.formats.quants import (
    BF16,
    F8_E4M3,
    F16,
    F32,
    I8,
    I32,
    Q4_0,
    Q5_0,
    Q8_0,
    U8,
    QuantType,
)
from headroom.formats.tensor import TensorInfo

if TYPE_CHECKING:
    from headroom.formats.tensor import Bytes

    Array = np.ndarray[Any, np.dtype[Any]]

BLOCK = 32  # values of a block of Q4_0, Q5_0, Q8_0 and MXFP4
MXFP4_BYTES = 16  # of the codes of a block, without its scale
# The codes that blocks of each type hold, from the narrowest on.
CODES = {Q4_0: (-8, 7), Q5_0: (-16, 15), Q8_0: (-128, 127)}

_NUMPY_TYPES = {
    F32: "<f4", F16: "<f2", BF16: "<u2", I32: "<i4", I8: "i1", U8: "u1", F8_E4M3: "u1",
}  # fmt: skip
# The values of a float of 4 bits: a sign, two bits of exponent, one of mantissa.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES = np.concatenate((_E2M1, -_E2M1))


def _e4m3_values() -> "Array":
    """Return the values of all floats of 8 bits with four bits of exponent; 127 is no number."""
    byte = np.arange(128)
    exponent, mantissa = byte >> 3, (byte & 7).astype(np.float32) / 8
    normal = np.ldexp(1 + mantissa, exponent - 7)
    positive = np.where(exponent == 0, np.ldexp(mantissa, -6), normal).astype(np.float32)
    positive[127] = np.nan
    return np.concatenate((positive, -positive))


E4M3_VALUES = _e4m3_values()


def read_array(info: TensorInfo) -> "Array":
    """Return a tensor in its shape: floats as float32, 8-bit floats as bytes."""
    stored = info.data().view(_NUMPY_TYPES[info.quant]).reshape(info.shape)
    if info.quant == BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32) if info.quant == F16 else stored


def read_scales(info: TensorInfo) -> "Array":
    """Return scales in float32, also those that are floats of 8 bits."""
    found = read_array(info)
    return E4M3_VALUES[found] if info.quant == F8_E4M3 else found.astype(np.float32)


def unpack_fields(words: "Array", bits: int) -> "Array":
    """Return the unsigned fields of `bits` bits that rows of words hold, lowest bits first."""
    rows = np.ascontiguousarray(words).view(np.uint8)  # little-endian words
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        fields = rows[..., None] >> shifts & np.uint8((1 << bits) - 1)
        return fields.reshape(*rows.shape[:-1], -1)
    single = np.unpackbits(rows, axis=-1, bitorder="little")
    whole = single[..., : single.shape[-1] // bits * bits].reshape(*rows.shape[:-1], -1, bits)
    return np.packbits(whole, axis=-1, bitorder="little")[..., 0]


def spread_scales(scales: "Array", shape: tuple[int, int], block: tuple[int, int]) -> "Array":
    """Return one scale for each value of a matrix; a scale holds for `block` rows and columns."""
    rows = np.repeat(scales, block[0], axis=0)[: shape[0]]
    return np.repeat(rows, block[1], axis=1)[:, : shape[1]]


def pack_floats(values: "Array") -> "Bytes":
    """Return the bytes of float32 values."""
    return np.ascontiguousarray(values, dtype="<f4").reshape(-1).view(np.uint8)


def pack_blocks(codes: "Array", scales: "Array", quant: QuantType, name: str) -> "Bytes":
    """Return signed codes `[rows, columns]` as blocks of Q4_0, Q5_0 or Q8_0.

    `scales`, float32 `[rows, columns / 32]`, must be numbers that float16 holds.
    """
    low, high = CODES[quant]
    if codes.min() < low or codes.max() > high:
        raise FormatError(
            f"{name} has codes from {codes.min()} to {codes.max()}; its settings promise {low} to "
            f"{high}.",
            hint="quantization_config in config.json does not describe these weights.",
        )
    split = codes.astype(np.int16).reshape(*scales.shape, BLOCK)
    blocks = np.empty((*scales.shape, quant.block_bytes), np.uint8)
    blocks[..., :2] = _halves(scales, split, name)[..., None].view(np.uint8)
    unsigned = (split - low).astype(np.uint8)
    if quant == Q8_0:
        blocks[..., 2:] = split.astype(np.int8).view(np.uint8)
        return blocks.reshape(-1)
    nibbles = unsigned & 15
    blocks[..., -16:] = nibbles[..., :16] | nibbles[..., 16:] << 4
    if quant == Q5_0:
        blocks[..., 2:6] = np.packbits(unsigned >> 4, axis=-1, bitorder="little")
    return blocks.reshape(-1)


def _halves(scales: "Array", codes: "Array", name: str) -> "Array":
    """Return scales as float16; those of blocks whose codes are all 0 do not matter."""
    with np.errstate(over="ignore"):
        halves = np.where(codes.any(axis=-1), scales, 0).astype("<f2")
    wrong = (halves != scales) & codes.any(axis=-1)
    if wrong.any():
        raise FormatError(
            f"{name} has a scale of {scales[wrong][0]:g}, which float16 does not hold.",
            hint="Blocks of whole numbers have float16 scales here. Choose a GGUF file of the "
            "model, or another quantisation.",
        )
    return halves


def pack_mxfp4(codes: "Array", exponents: "Array") -> "Bytes":
    """Return MXFP4 blocks from codes `[..., blocks, 16]`, two in a byte, and `[..., blocks]`.

    Neighbours share a byte in safetensors; in GGUF, a value and the one 16 further on do.
    """
    blocks = np.empty((*exponents.shape, 1 + MXFP4_BYTES), np.uint8)
    blocks[..., 0] = exponents
    first, second = codes[..., :8], codes[..., 8:]
    blocks[..., 1::2] = first & 15 | second << 4
    blocks[..., 2::2] = first >> 4 | second & 0xF0
    return blocks.reshape(-1)
