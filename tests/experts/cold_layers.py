"""Layers with cold experts for tests: packed experts, some of them said to be in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.formats.quants import BY_NAME, QuantType
from headroom.kernels.cuda.experts import ExpertTiles
from headroom.kernels.ops import ExpertTable
from tests.gpu.check_experts import make_table
from tests.gpu.torch_tiles import pack_tiles


@dataclass(frozen=True, slots=True, eq=False)
class SplitStore:
    """A layer's experts, all of them in host memory; `is_hot` says which a CPU does not see."""

    table: ExpertTable  # as a file has them
    blobs: torch.Tensor  # uint8 [experts, bytes], in tiles
    tiles: ExpertTiles  # where a GPU finds all
    is_hot: torch.Tensor  # int32 [experts]
    host_addresses: torch.Tensor

    @property
    def kinds(self) -> Sequence[QuantType]:
        return self.tiles.kinds

    @property
    def width(self) -> int:
        return self.tiles.width

    @property
    def hidden(self) -> int:
        return self.tiles.hidden

    @property
    def expert_bytes(self) -> int:
        return self.blobs.shape[1]


def split_store(
    kinds: tuple[str, str, str], sizes: tuple[int, int, int], hot: Sequence[int]
) -> SplitStore:
    """Random experts `(count, width, hidden)`, those of `hot` in GPU memory."""
    count, width, hidden = sizes
    table = make_table(kinds, count, width, hidden)
    rows = [
        [pack_tiles(w.data, w.quant, w.columns) for w in expert]
        for expert in zip(*table.parts, strict=True)
    ]
    blobs = torch.stack([torch.cat(parts) for parts in rows])
    first = torch.arange(count) * blobs.shape[1] + blobs.data_ptr()
    gate, up = len(rows[0][0]), len(rows[0][1])
    addresses = torch.stack([first, first + gate, first + gate + up], dim=1).contiguous()
    is_hot = torch.zeros(count, dtype=torch.int32)
    is_hot[list(hot)] = 1
    quants = tuple(BY_NAME[kind] for kind in kinds)
    tiles = ExpertTiles(addresses, quants, width, hidden, blobs.nbytes, (blobs,))
    here = addresses * (1 - is_hot.long())[:, None]
    return SplitStore(table, blobs, tiles, is_hot, here.contiguous())


def random_picks(rows: int, count: int, used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights as a router gives them; some rows are padding."""
    ids = torch.stack([torch.randperm(count)[:used] for _ in range(rows)]).int()
    weights = torch.rand(rows, used)
    if rows > 2:
        ids[rows // 2], weights[rows // 2] = -1, 0
    return ids, weights / weights.sum(1, keepdim=True).clamp(min=1e-9)
