"""Tiles for the tensor cores in plain torch operations, as an oracle; see tiles.cuh."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda.sizes import RECORD_COLUMNS, TILE_ROWS
from headroom.kernels.weight import PLAIN_TYPES

BLOCK = 32


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Blocks of a file taken apart: whole numbers and their scales, row by row.

    `quants [rows, columns / 32, 32]` as the tensor cores take them. Scales and mins are the bytes
    of f16 numbers `[rows, blocks, 2]`, groups one byte each.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None = None
    group_scales: torch.Tensor | None = None  # [rows, columns / 32] 6-bit; Q6_K: [.., / 16] signed
    group_mins: torch.Tensor | None = None


def pack_tiles(data: torch.Tensor, quant: QuantType, columns: int) -> torch.Tensor:
    """Return the tiles of some rows `[rows, bytes per row]`, on the device of `data`."""
    rows = data.shape[0]
    tiles, records = _up(rows, TILE_ROWS), _up(columns, RECORD_COLUMNS)
    sides = tiles * TILE_ROWS, records * RECORD_COLUMNS // quant.block
    blocks = torch.zeros(*sides, quant.block_bytes, dtype=torch.uint8, device=data.device)
    blocks[:rows, : columns // quant.block] = data.view(torch.uint8).view(
        rows, -1, quant.block_bytes
    )
    if quant.name in PLAIN_TYPES:  # [tile, record, block, half, g, t, odd, h, later, byte]
        lanes = blocks.view(tiles, 2, 8, records, 8, 2, 4, 2, 2, 2)
        return lanes.permute(0, 3, 4, 5, 2, 6, 8, 1, 7, 9).flatten()
    parts = _READERS[quant.name](blocks)
    planes = [_quant_plane(parts.quants, quant, tiles, records)]
    if (high := _high_plane(parts.quants, quant, tiles, records)) is not None:
        planes.append(high)
    planes += _group_planes(parts, quant, tiles, records)
    planes += [_scale_plane(x, tiles, records) for x in (parts.scales, parts.mins) if x is not None]
    return torch.cat(planes, dim=2).flatten()


def _up(size: int, step: int) -> int:
    return -(-size // step)


def _lanes(quants: torch.Tensor, tiles: int, records: int) -> torch.Tensor:
    """Values as [tile, h, g, record, block, half, t, 4]: row h * 8 + g, column 16 half + 4 t."""
    return quants.view(tiles, 2, 8, records, 8, 2, 4, 4)


def _quant_plane(quants: torch.Tensor, quant: QuantType, tiles: int, records: int) -> torch.Tensor:
    lanes = _lanes(quants, tiles, records)
    if quant.name == "q8_0":  # [tile, record, block, g, t, h, half, 4]
        plane = lanes.permute(0, 3, 4, 2, 6, 1, 5, 7)
    else:
        low = lanes & 15
        both = low[:, :, :, :, :, 0] | low[:, :, :, :, :, 1] << 4
        pairs = both.view(tiles, 2, 8, records, 4, 2, 4, 4)  # blocks two by two
        plane = pairs.permute(0, 3, 4, 2, 6, 5, 1, 7)  # [tile, record, pair, g, t, block, h, 4]
    return plane.reshape(tiles, records, -1)


def _high_plane(
    quants: torch.Tensor, quant: QuantType, tiles: int, records: int
) -> torch.Tensor | None:
    bits = {"q5_0": 1, "q5_1": 1, "q5_k": 1, "q6_k": 2}.get(quant.name)
    if bits is None:
        return None
    high = (_lanes(quants, tiles, records) >> 4) & (2**bits - 1)
    # Slots of a lane: block, h, half; as many as fit into a byte share a word.
    slots = high.permute(0, 3, 2, 6, 4, 1, 5, 7).reshape(tiles, records, 32, 32, 4)
    words = slots.view(tiles, records, 32, -1, 8 // bits, 4)
    shifts = torch.arange(0, 8, bits, device=quants.device, dtype=torch.uint8).view(-1, 1)
    joined: torch.Tensor = (words << shifts).sum(4, dtype=torch.uint8)
    return joined.reshape(tiles, records, -1)


def _group_planes(parts: Parts, quant: QuantType, tiles: int, records: int) -> list[torch.Tensor]:
    if parts.group_scales is None:
        return []
    scales = parts.group_scales.view(tiles, 2, 8, records, -1)  # [tile, h, g, record, groups]
    if quant.name == "q6_k":  # [tile, record, g, block, half, h]
        return [scales.permute(0, 3, 2, 4, 1).reshape(tiles, records, -1)]
    assert parts.group_mins is not None
    mins = parts.group_mins.view(tiles, 2, 8, records, 8)
    first = (scales | (mins & 3) << 6).permute(0, 3, 2, 4, 1)  # [tile, record, g, block, h]
    high = mins >> 2
    pairs = (high[..., ::2] | high[..., 1::2] << 4).permute(0, 3, 2, 4, 1)
    return [first.reshape(tiles, records, -1), pairs.reshape(tiles, records, -1)]


def _scale_plane(scales: torch.Tensor, tiles: int, records: int) -> torch.Tensor:
    """Bytes [rows, blocks, n] as [tile, record, g, block, h, n]."""
    size = scales.shape[-1]
    lanes = scales.view(tiles, 2, 8, records, -1, size)
    return lanes.permute(0, 3, 2, 4, 1, 5).reshape(tiles, records, -1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low halves of a run of bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _with_bits(quants: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Add bit 4 from four bytes for each run of 32."""
    shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
    spread = (bits.unsqueeze(-1) >> shifts & 1).flatten(-2)
    return quants | spread << 4


def _plain(start: int, mins: bool = False) -> Callable[[torch.Tensor], Parts]:
    def read(blocks: torch.Tensor) -> Parts:
        quants = _nibbles(blocks[..., start : start + 16])
        return Parts(quants, blocks[..., :2], blocks[..., 2:4] if mins else None)

    return read


def _read_q5(bits_at: int, mins: bool) -> Callable[[torch.Tensor], Parts]:
    def read(blocks: torch.Tensor) -> Parts:
        quants = _nibbles(blocks[..., bits_at + 4 : bits_at + 20])
        quants = _with_bits(quants, blocks[..., bits_at : bits_at + 4])
        return Parts(quants, blocks[..., :2], blocks[..., 2:4] if mins else None)

    return read


def _read_q8_0(blocks: torch.Tensor) -> Parts:
    return Parts(blocks[..., 2:], blocks[..., :2])


def _read_mxfp4(blocks: torch.Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 1:]), blocks[..., :1])


def _read_k(wide: bool) -> Callable[[torch.Tensor], Parts]:
    def read(blocks: torch.Tensor) -> Parts:
        rows = blocks.shape[0]
        start = 48 if wide else 16
        runs = blocks[..., start:].reshape(rows, -1, 4, 32)
        quants = torch.stack((runs & 15, runs >> 4), dim=3)  # [rows, blocks, run, half, 32]
        if wide:
            shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8).view(8, 1)
            bits = blocks[..., None, 16:48] >> shifts & 1  # [rows, blocks, group, 32]
            quants = quants | bits.view_as(quants) << 4
        packed = blocks[..., 4:16]
        first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
        scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=-1)
        mins = torch.cat((second & 63, third >> 4 | (second >> 6) << 4), dim=-1)
        return Parts(
            quants.reshape(rows, -1, BLOCK), blocks[..., :2], blocks[..., 2:4],
            scales.reshape(rows, -1), mins.reshape(rows, -1),
        )  # fmt: skip

    return read


def _read_q6_k(blocks: torch.Tensor) -> Parts:
    rows = blocks.shape[0]
    low = blocks[..., :128].reshape(rows, -1, 2, 1, 2, 32)  # [rows, blocks, half, 1, run, 32]
    low = torch.cat((low & 15, low >> 4), dim=3)  # nibble before run: four runs of 32
    high = blocks[..., 128:192].reshape(rows, -1, 2, 1, 32)
    shifts = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8).view(4, 1)
    high = (high >> shifts & 3).view_as(low)
    quants = (low | high << 4).reshape(rows, -1, BLOCK)
    scales = blocks[..., 192:208].reshape(rows, -1)
    return Parts(quants, blocks[..., 208:], group_scales=scales)


_READERS: dict[str, Callable[[torch.Tensor], Parts]] = {
    "q4_0": _plain(2),
    "q4_1": _plain(4, mins=True),
    "iq4_nl": _plain(2),
    "q5_0": _read_q5(2, mins=False),
    "q5_1": _read_q5(4, mins=True),
    "q8_0": _read_q8_0,
    "mxfp4": _read_mxfp4,
    "q4_k": _read_k(wide=False),
    "q5_k": _read_k(wide=True),
    "q6_k": _read_q6_k,
}
