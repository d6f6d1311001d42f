"""Dequantisation in plain torch: every block type to float32, with the bits of GGUF's own code."""

from collections.abc import Callable

import torch

from headroom.errors import FormatError
from headroom.formats import quants
from headroom.formats.quants import QuantType
from headroom.kernels.reference import dequant_codebooks as codebooks
from headroom.kernels.reference.dequant_codebooks import halves as _half
from headroom.kernels.reference.dequant_codebooks import view_as as _view

# The order of operations matters: another order rounds differently.

_IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of MXFP4, which makes them integers.
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantise(data: torch.Tensor, quant: QuantType, values: int) -> torch.Tensor:
    """Return the float32 values [..., values] of packed bytes [..., nbytes]."""
    if quant.name not in _DECODERS:
        raise FormatError(f"Values of type {quant} are not weights.", hint=quants.supported())
    if data.dtype != torch.uint8 or data.shape[-1] != quant.bytes_for(values):
        raise FormatError(
            f"{values} values of type {quant} take {quant.bytes_for(values)} bytes, "
            f"not {data.shape[-1]} of {data.dtype}."
        )
    blocks = data.reshape(*data.shape[:-1], values // quant.block, quant.block_bytes)
    decoded = _DECODERS[quant.name](blocks)  # [..., blocks, block]
    return decoded.reshape(*data.shape[:-1], values)


def _signed(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.int8).float()


def _split(data: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Split the last dimension into several."""
    return data.reshape(*data.shape[:-1], *sizes)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return low nibbles, then high nibbles, of each run of bytes in the last dimension."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _bits(data: torch.Tensor, shifts: int, step: int = 1) -> torch.Tensor:
    """Return [..., shifts, bytes]: the bytes shifted right by 0, step, 2 step, ... bits."""
    by = torch.arange(0, shifts * step, step, dtype=torch.uint8, device=data.device)
    return data.unsqueeze(-2) >> by[:, None]


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Return bit 4 of 32 values, from four bytes that hold one bit of each value in order."""
    by = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (((data.unsqueeze(-1) >> by) & 1) << 4).flatten(-2)


def _look_up(indices: torch.Tensor, table: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.float32, device=indices.device)[indices.long()]


def _f32(blocks: torch.Tensor) -> torch.Tensor:
    return _view(blocks, torch.float32)


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return _view(blocks, torch.bfloat16).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _signed(blocks[..., 2:]) * _half(blocks[..., :2])


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks[..., :2]) * (_nibbles(blocks[..., 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scaled = _half(blocks[..., :2]) * _nibbles(blocks[..., 4:]).float()
    return scaled + _half(blocks[..., 2:4])


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _half(blocks[..., :2]) * (values.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _half(blocks[..., :2]) * values.float() + _half(blocks[..., 2:4])


def _group_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minimums of a Q4_K or Q5_K block's groups, [..., blocks, 8, 1] each."""
    low, mid, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    # Six bits each: groups 0 to 3 in one byte, the others in a nibble and two spare bits.
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=-1)
    minimums = torch.cat((mid & 63, (high >> 4) | ((mid >> 6) << 4)), dim=-1)
    scaled = _half(blocks[..., :2]) * scales.float()
    lowered = _half(blocks[..., 2:4]) * minimums.float()
    return scaled.unsqueeze(-1), lowered.unsqueeze(-1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minimums = _group_scales(blocks)
    values = _split(_nibbles(_split(blocks[..., 16:], 4, 32)).flatten(-2), 8, 32)
    return (scales * values.float() - minimums).flatten(-2)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minimums = _group_scales(blocks)
    low = _split(_nibbles(_split(blocks[..., 48:], 4, 32)).flatten(-2), 8, 32)
    fifth = (_bits(blocks[..., 16:48], 8) & 1) << 4  # [..., blocks, 8 groups, 32]
    return (scales * (low | fifth).float() - minimums).flatten(-2)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _split(_nibbles(_split(blocks[..., :128], 2, 64)), 4, 32)
    high = (_bits(_split(blocks[..., 128:192], 2, 32), 4, step=2) & 3) << 4
    values = (low | high).float() - 32  # [..., blocks, 2 halves, 4 quarters, 32]
    scales = _half(blocks[..., 208:]) * _signed(blocks[..., 192:208])
    return (scales.unsqueeze(-1) * _split(values.flatten(-3), 16, 16)).flatten(-2)


def _q8_k(blocks: torch.Tensor) -> torch.Tensor:
    return _view(blocks[..., :4], torch.float32) * _signed(blocks[..., 4:260])


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks[..., :2]) * _look_up(_nibbles(blocks[..., 2:]), _IQ4_NL_VALUES)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponent = blocks[..., :1].int()
    # 2^(exponent - 127) / 2, to match the doubled table; the two smallest are subnormal.
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return bits.view(torch.float32) * _look_up(_nibbles(blocks[..., 1:]), _MXFP4_VALUES)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minimums = (blocks[..., :16] & 15).float(), (blocks[..., :16] >> 4).float()
    quarters = _bits(_split(blocks[..., 16:80], 2, 32), 4, step=2) & 3
    values = _split(quarters.flatten(-3), 16, 16).float()
    scaled = (_half(blocks[..., 80:82]) * scales).unsqueeze(-1)
    lowered = (_half(blocks[..., 82:]) * minimums).unsqueeze(-1)
    return (scaled * values - lowered).flatten(-2)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _split(_bits(_split(blocks[..., 32:96], 2, 32), 4, step=2).flatten(-3) & 3, 16, 16)
    third = _split((_bits(blocks[..., :32], 8) & 1).flatten(-2), 16, 16)
    values = low.float() - 4 * (1 - third.float())  # a missing bit lowers the value
    # Six bits each: nibbles of eight bytes, then pairs of bits of four.
    nibbles = _nibbles(blocks[..., 96:104])
    pairs = (_bits(blocks[..., 104:108], 4, step=2) & 3).flatten(-2)
    scales = (nibbles | pairs << 4).float() - 32
    return ((_half(blocks[..., 108:]) * scales).unsqueeze(-1) * values).flatten(-2)


def _ternary(data: torch.Tensor, digits: int) -> torch.Tensor:
    """Return -1, 0 or 1 from bytes that hold up to five digits of base 3, the first ones first."""
    powers = torch.tensor([3**power for power in range(digits)], device=data.device)
    shifted = (data.unsqueeze(-2).int() * powers[:, None]) & 255
    return (((shifted * 3) >> 8) - 1).flatten(-2)


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    parts = (_ternary(blocks[..., :32], 5), _ternary(blocks[..., 32:48], 5),
             _ternary(blocks[..., 48:52], 4))  # fmt: skip
    return _half(blocks[..., 52:]) * torch.cat(parts, dim=-1).float()


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    values = _bits(_split(blocks[..., :64], 2, 32), 4, step=2) & 3
    return _half(blocks[..., 64:]) * (values.flatten(-3).float() - 1)


def _q1_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, bits = _half(blocks[..., :2]), codebooks.bit_fields(blocks[..., 2:], 8, 1)
    return torch.where(bits.flatten(-2) == 1, scale, -scale)


def _q2_0(blocks: torch.Tensor) -> torch.Tensor:
    values = codebooks.bit_fields(blocks[..., 2:], 4, 2).flatten(-2)
    return (values.float() - 1) * _half(blocks[..., :2])


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = codebooks.bit_fields(blocks[..., 4:8], 2, 4).flatten(-2)
    high = codebooks.bit_fields(blocks[..., 2:4], 4, 2).flatten(-2)
    scales = (low | high << 4).float() - 32  # of 32 values each
    values = _look_up(_nibbles(_split(blocks[..., 8:], 8, 16)), _IQ4_NL_VALUES)
    return ((_half(blocks[..., :2]) * scales).unsqueeze(-1) * values).flatten(-2)


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    byte = blocks[..., :4]
    exponent, mantissa = (byte >> 3 & 15).float(), (byte & 7).float()
    # An unsigned float of 4 and 3 bits, halved to match the doubled table.
    normal = (1 + mantissa / 8) * torch.exp2(exponent - 7)
    scales = torch.where(exponent == 0, mantissa * 2**-9, normal) * 0.5
    scales = torch.where(byte == 0x7F, 0.0, scales).unsqueeze(-1)  # of 16 values each
    values = _look_up(_nibbles(_split(blocks[..., 4:], 4, 8)), _MXFP4_VALUES)
    return (scales * values).flatten(-2)


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "f32": _f32, "f16": _half, "bf16": _bf16,
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "q8_k": _q8_k,
    "iq4_nl": _iq4_nl, "mxfp4": _mxfp4, "iq4_xs": _iq4_xs, "nvfp4": _nvfp4,
    "q2_k": _q2_k, "q3_k": _q3_k, "tq1_0": _tq1_0, "tq2_0": _tq2_0, "q1_0": _q1_0, "q2_0": _q2_0,
    "iq1_s": codebooks.iq1_s, "iq1_m": codebooks.iq1_m, "iq2_xxs": codebooks.iq2_xxs,
    "iq2_xs": codebooks.iq2_xs, "iq2_s": codebooks.iq2_s, "iq3_xxs": codebooks.iq3_xxs,
    "iq3_s": codebooks.iq3_s,
}  # fmt: skip
