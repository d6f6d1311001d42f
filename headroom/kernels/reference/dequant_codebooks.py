"""Dequantisation of types whose blocks hold indices into a codebook: IQ1, IQ2 and IQ3."""

from functools import cache

import torch

from headroom.formats.codebooks import codebook

# The order of operations matters: another order rounds differently.

_IQ1_SHIFT = 0.125  # is added to the values of a group, or taken away


def view_as(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reinterpret bytes as numbers; the copy aligns them as a view needs it."""
    return data.clone(memory_format=torch.contiguous_format).view(dtype)


def halves(data: torch.Tensor) -> torch.Tensor:
    """Return pairs of bytes as float16 values in float32."""
    return view_as(data, torch.float16).float()


def bit_fields(data: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Return [..., count]: the fields of `width` bits of each number, the lowest first."""
    by = torch.arange(0, count * width, width, dtype=data.dtype, device=data.device)
    return (data.unsqueeze(-1) >> by) & ((1 << width) - 1)


def _shorts(data: torch.Tensor) -> torch.Tensor:
    """Return pairs of bytes as unsigned numbers in int32."""
    return view_as(data, torch.int16).int() & 0xFFFF


def _split(data: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Split the last dimension into several."""
    return data.reshape(*data.shape[:-1], *sizes)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return groups of four bytes as unsigned numbers in int64."""
    return view_as(data, torch.int32).long() & 0xFFFFFFFF


@cache
def _table(name: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(codebook(name), dtype=torch.float32, device=device)


def _entries(name: str, indices: torch.Tensor) -> torch.Tensor:
    """Return [..., length]: the values of each entry."""
    return _table(name, indices.device)[indices.long()]


def _signs(bits: torch.Tensor) -> torch.Tensor:
    """Return [..., 8]: -1 where a byte has a bit, 1 elsewhere."""
    return 1.0 - 2.0 * bit_fields(bits, 8, 1).float()


def _seven_signs(bits: torch.Tensor) -> torch.Tensor:
    """Return [..., 8] signs from seven bits; the eighth makes the number of -1 even."""
    seven = bit_fields(bits, 7, 1)
    parity = seven.sum(-1, keepdim=True) & 1
    return 1.0 - 2.0 * torch.cat((seven, parity), dim=-1).float()


def iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks: per 32 values four indices, four times seven signs, a scale."""
    groups = blocks[..., 2:].reshape(*blocks.shape[:-1], 8, 8)
    word = _words(groups[..., 4:])  # [..., blocks, 8, 1]
    scale = halves(blocks[..., :2]).unsqueeze(-1) * (0.5 + (word >> 28).float()) * 0.25
    signs = _seven_signs(bit_fields(word.squeeze(-1), 4, 7))
    entries = _entries("iq2_xxs", groups[..., :4])  # [..., blocks, 8, 4, 8]
    return (scale.unsqueeze(-1) * entries * signs).flatten(-3)


def iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks: per 8 values nine bits of index and seven signs."""
    indices = _shorts(blocks[..., 2:66])  # [..., blocks, 32]
    scale = halves(blocks[..., :2]) * (0.5 + _nibbles(blocks[..., 66:])) * 0.25
    values = _entries("iq2_xs", indices & 511)
    return _scaled_pairs(scale, values, _seven_signs(indices >> 9))


def iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks: per 8 values ten bits of index and eight signs."""
    high = bit_fields(blocks[..., 66:74].int(), 4, 2).flatten(-2)
    values = _entries("iq2_s", blocks[..., 2:34].int() | high << 8)
    scale = halves(blocks[..., :2]) * (0.5 + _nibbles(blocks[..., 74:])) * 0.25
    return _scaled_pairs(scale, values, _signs(blocks[..., 34:66].int()))


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low and the high nibble of each byte, as float32."""
    return bit_fields(data.int(), 2, 4).flatten(-2).float()


def _scaled_pairs(scale: torch.Tensor, values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return scaled values [..., 256]; a scale holds for two entries of eight."""
    pairs, signs = (part.reshape(*part.shape[:-2], 16, 2, 8) for part in (values, signs))
    return (scale[..., None, None] * pairs * signs).flatten(-3)


def iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks: per 4 values an index, per 32 four times seven signs."""
    word = _words(blocks[..., 66:])  # [..., blocks, 8]
    scale = halves(blocks[..., :2]) * (0.5 + (word >> 28).float()) * 0.5
    signs = _seven_signs(bit_fields(word, 4, 7))  # [..., blocks, 8, 4, 8]
    values = _entries("iq3_xxs", blocks[..., 2:66]).reshape(signs.shape)
    return (scale[..., None, None] * values * signs).flatten(-3)


def iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks: per 4 values nine bits of index, per 8 a byte of signs."""
    high = bit_fields(blocks[..., 66:74].int(), 8, 1).flatten(-2)
    signs = _signs(_split(blocks[..., 74:106].int(), 8, 4))
    values = _entries("iq3_s", blocks[..., 2:66].int() | high << 8).reshape(signs.shape)
    scale = halves(blocks[..., :2]) * (1 + 2 * _nibbles(blocks[..., 106:]))
    return (scale[..., None, None] * values * signs).flatten(-3)


def iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks: per 8 values 11 bits of index, per 32 a shift and a scale."""
    word = _shorts(blocks[..., 34:])  # [..., blocks, 8]
    scale = halves(blocks[..., :2]) * (2 * ((word >> 12) & 7) + 1).float()
    shift = torch.where(word & 0x8000 == 0, _IQ1_SHIFT, -_IQ1_SHIFT)
    high = bit_fields(word, 4, 3)  # [..., blocks, 8, 4]
    values = _entries("iq1", _split(blocks[..., 2:34].int(), 8, 4) | high << 8)
    return (scale[..., None, None] * (values + shift[..., None, None])).flatten(-3)


def iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks: as IQ1_S, with a shift per 8 values and a scale per 16."""
    words = _shorts(blocks[..., 48:])  # [..., blocks, 4]; the scale of all is in their high nibbles
    nibbles = words >> 12
    by = torch.arange(0, 16, 4, dtype=torch.int32, device=blocks.device)
    whole = (nibbles << by).sum(-1, keepdim=True)
    whole = torch.where(whole >= 1 << 15, whole - (1 << 16), whole).to(torch.int16)
    scale = whole.view(torch.float16).float()  # [..., blocks, 1]
    scale = scale * (2 * bit_fields(words, 4, 3).flatten(-2) + 1).float()  # [..., blocks, 16]
    high = bit_fields(blocks[..., 32:48].int(), 2, 4).flatten(-2)  # [..., blocks, 32]
    values = _entries("iq1", blocks[..., :32].int() | (high & 7) << 8)  # [..., blocks, 32, 8]
    shift = torch.where(high & 8 == 0, _IQ1_SHIFT, -_IQ1_SHIFT)
    shifted = values + shift.unsqueeze(-1)
    pairs = shifted.reshape(*shifted.shape[:-2], 16, 2, 8)
    return (scale[..., None, None] * pairs).flatten(-3)
