"""Writes a weight as each quantised format has it, and says which values the parts stand for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headroom.formats.quants import F32, MXFP4, Q4_0, Q5_0, Q8_0, QuantType

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight rows lies in each nibble of a word


@dataclass(frozen=True, slots=True)
class Quantised:
    """The parts of a weight by the ends of their names, and what they stand for."""

    parts: dict[str, torch.Tensor]
    values: torch.Tensor  # float32


@dataclass(frozen=True, slots=True)
class Method:
    """One way to quantise a weight."""

    settings: dict[str, Any]  # quantization_config
    quantise: Callable[[torch.Tensor], Quantised]
    held: QuantType  # the type that holds the values


def words(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of unsigned fields as rows of 32-bit words, the lowest bit of the first field first."""
    single = (fields.long().unsqueeze(-1) >> torch.arange(bits)) & 1
    single = single.reshape(len(fields), -1)
    filled = torch.nn.functional.pad(single, (0, -single.shape[1] % 32))
    whole = (filled.view(len(fields), -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def integers(
    weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, columns], and zero points and scales [rows, groups]."""
    split = weight.view(len(weight), -1, group)
    most = (1 << bits) - 1
    if symmetric:
        scales = (split.abs().amax(-1) / (most // 2)).to(dtype)
        zeros = torch.full_like(scales, (most + 1) // 2).float()
    else:
        low, high = split.amin(-1).clamp(max=0), split.amax(-1).clamp(min=0)
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.float()).round().clamp(1, most)
    codes = (split / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return codes.clamp(0, most).view_as(weight).long(), zeros.long(), scales


def values_of(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """Codes times scales; `groups` says which group each column is in."""
    exact = (codes - zeros[:, groups]).double() * scales.double()[:, groups]
    return exact.float()


def in_order(columns: int, group: int) -> torch.Tensor:
    return torch.arange(columns) // group


def packed(
    bits: int, group: int, dtype: torch.dtype, *, symmetric: bool = True, shuffled: bool = False
) -> Callable[[torch.Tensor], Quantised]:
    """compressed-tensors, pack-quantized."""

    def quantise(weight: torch.Tensor) -> Quantised:
        rows, columns = weight.shape
        size = group or columns
        codes, zeros, scales = integers(weight, bits, size, dtype, symmetric)
        groups = in_order(columns, size)
        parts = {
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([rows, columns]),
        }
        if shuffled:
            groups = groups[torch.randperm(columns)]
            parts[".weight_g_idx"] = groups.int()
        if not symmetric:
            parts[".weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        parts[".weight_packed"] = words(codes, bits)
        return Quantised(parts, values_of(codes, zeros, scales, groups))

    return quantise


def gptq(
    bits: int, group: int, *, symmetric: bool, shuffled: bool = False, less: int = 1
) -> Callable[[torch.Tensor], Quantised]:
    """GPTQ; zero points are stored less one in its first format."""

    def quantise(weight: torch.Tensor) -> Quantised:
        columns = weight.shape[1]
        codes, zeros, scales = integers(weight, bits, group, torch.float16, symmetric)
        groups = in_order(columns, group)
        if shuffled:
            groups = groups[torch.randperm(columns)]
        parts = {
            ".qweight": words(codes, bits).T.contiguous(),
            ".qzeros": words((zeros - less).T, bits),
            ".scales": scales.T.contiguous(),
            ".g_idx": groups.int(),
        }
        return Quantised(parts, values_of(codes, zeros, scales, groups))

    return quantise


def awq(weight: torch.Tensor) -> Quantised:
    """AWQ: eight rows of a column in a word."""
    codes, zeros, scales = integers(weight, 4, 32, torch.float16, symmetric=False)
    parts = {".qweight": awq_words(codes.T), ".qzeros": awq_words(zeros.T), ".scales": scales.T}
    parts = {end: part.contiguous() for end, part in parts.items()}
    return Quantised(parts, values_of(codes, zeros, scales, in_order(weight.shape[1], 32)))


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    eights = codes.reshape(len(codes), -1, 8)[..., list(AWQ_NIBBLES)]
    return words(eights.reshape(len(codes), -1), 4)


def signed_bytes(dtype: torch.dtype, *, symmetric: bool = True) -> Callable[..., Quantised]:
    """compressed-tensors, int-quantized: a scale for each row."""

    def quantise(weight: torch.Tensor) -> Quantised:
        columns = weight.shape[1]
        codes, zeros, scales = integers(weight, 8, columns, dtype, symmetric)
        parts = {".weight": (codes - 128).to(torch.int8), ".weight_scale": scales}
        if not symmetric:
            parts[".weight_zero_point"] = (zeros - 128).to(torch.int8)
        return Quantised(parts, values_of(codes, zeros, scales, in_order(columns, columns)))

    return quantise


def fp8(
    rows: int, columns: int, dtype: torch.dtype, end: str = ".weight_scale"
) -> Callable[[torch.Tensor], Quantised]:
    """FP8 with a scale for so many rows and columns; 0 means all."""

    def quantise(weight: torch.Tensor) -> Quantised:
        high, wide = rows or len(weight), columns or weight.shape[1]
        grid = torch.empty(-(-len(weight) // high), -(-weight.shape[1] // wide), dtype=dtype)
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        values = torch.empty_like(weight)
        for i, j in torch.cartesian_prod(*map(torch.arange, grid.shape)).view(-1, 2).tolist():
            at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            grid[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / grid[i, j].float()).to(torch.float8_e4m3fn)
            values[at] = codes[at].float() * grid[i, j].float()
        scale = grid if rows or columns else grid.view(())
        return Quantised({".weight": codes, end: scale, ".input_scale": torch.ones(1)}, values)

    return quantise


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    return (values.unsqueeze(-1) - E2M1).abs().argmin(-1)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Neighbours in one byte, the first in its low half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def nvfp4(*, divided: bool) -> Callable[[torch.Tensor], Quantised]:
    """NVFP4 of compressed-tensors, whose scales are divided, or of modelopt."""

    def quantise(weight: torch.Tensor) -> Quantised:
        split = weight.view(len(weight), -1, 16)
        whole = weight.abs().max() / (6 * 448)
        given = (1 / whole).view(1) if divided else whole
        scales = (split.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        exact = scales.float() / given if divided else scales.float() * given
        codes = nearest_e2m1(split / exact.unsqueeze(-1))
        values = (E2M1[codes] * exact.unsqueeze(-1)).view_as(weight)
        stored = nibbles(codes.view_as(weight))
        if divided:
            parts = {".weight_packed": stored, ".weight_global_scale": given}
        else:
            parts = {".weight": stored, ".weight_scale_2": given, ".input_scale": torch.ones(())}
        return Quantised({**parts, ".weight_scale": scales}, values)

    return quantise


def mxfp4_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes [..., blocks, 16], exponents [..., blocks], and the values that they stand for."""
    split = weight.unflatten(-1, (-1, 32))
    exponent = (split.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    codes = nearest_e2m1(split / exponent.exp2())
    values = (E2M1[codes] * exponent.exp2()).view_as(weight)
    return nibbles(codes), (exponent.squeeze(-1) + 127).to(torch.uint8), values


def mxfp4(weight: torch.Tensor) -> Quantised:
    """MXFP4 of compressed-tensors."""
    stored, exponents, values = mxfp4_codes(weight)
    return Quantised({".weight_packed": stored.flatten(-2), ".weight_scale": exponents}, values)


def compressed(bits: int, strategy: str, kind: str, group: int = 0, **more: Any) -> dict[str, Any]:
    """The settings of compressed-tensors."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group or None}
    group_0 = {"targets": ["Linear"], "weights": weights | more}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group_0}}


def gptq_settings(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False} | more


F16, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
INT4_32 = compressed(4, "group", "int", 32)
METHODS = {
    "fp8-blocks": Method(
        {"quant_method": "fp8", "weight_block_size": [24, 32]},
        fp8(24, 32, FLOAT, ".weight_scale_inv"),
        F32,
    ),
    "fp8-rows": Method(compressed(8, "channel", "float"), fp8(1, 0, BF16), F32),
    "fp8-whole": Method({"quant_method": "modelopt"}, fp8(0, 0, FLOAT), F32),
    "w4a16": Method(INT4_32, packed(4, 32, BF16), Q4_0),
    "w4a16-rows": Method(compressed(4, "channel", "int"), packed(4, 0, BF16), Q4_0),
    "w4a16-zeros": Method(INT4_32, packed(4, 32, F16, symmetric=False), Q5_0),
    "w4a16-ordered": Method(INT4_32, packed(4, 32, F16, shuffled=True), F32),
    "w8a16": Method(compressed(8, "group", "int", 64), packed(8, 64, BF16), Q8_0),
    "w8a8": Method(compressed(8, "channel", "int"), signed_bytes(BF16), Q8_0),
    "w8a8-float-scales": Method(compressed(8, "channel", "int"), signed_bytes(FLOAT), F32),
    "w8a8-zeros": Method(compressed(8, "channel", "int"), signed_bytes(F16, symmetric=False), F32),
    "awq": Method({"quant_method": "awq", "bits": 4, "group_size": 32}, awq, Q5_0),
    "gptq": Method(gptq_settings(4, 32, sym=True), gptq(4, 32, symmetric=True), Q4_0),
    "gptq-zeros": Method(gptq_settings(4, 32, sym=False), gptq(4, 32, symmetric=False), Q5_0),
    "gptq-v2": Method(
        gptq_settings(4, 32, sym=False, checkpoint_format="gptq_v2"),
        gptq(4, 32, symmetric=False, less=0),
        Q5_0,
    ),
    "gptq-ordered": Method(
        gptq_settings(4, 32, sym=True, desc_act=True),
        gptq(4, 32, symmetric=True, shuffled=True),
        F32,
    ),
    "gptq-2": Method(gptq_settings(2, 64, sym=False), gptq(2, 64, symmetric=False), Q4_0),
    "gptq-3": Method(gptq_settings(3, 32, sym=False), gptq(3, 32, symmetric=False), Q4_0),
    "gptq-8": Method(gptq_settings(8, 32, sym=True), gptq(8, 32, symmetric=True), Q8_0),
    "nvfp4": Method(compressed(4, "tensor_group", "float", 16), nvfp4(divided=True), F32),
    "nvfp4-modelopt": Method(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(divided=False), F32
    ),
    "mxfp4": Method(compressed(4, "group", "float", 32), mxfp4, MXFP4),
}
