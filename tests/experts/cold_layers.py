"""Layers of random experts of which some are cold, as the prefill and the decode path read them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.experts.layer_store import NOWHERE, SPARE, Residency
from headroom.formats.quants import BY_NAME, QuantType
from headroom.kernels.cuda import expert_cache
from headroom.kernels.cuda.expert_cache import LayerTable
from headroom.kernels.cuda.experts import ExpertTiles
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.kernels.ops import ExpertTable, Picks
from tests.gpu.check_experts import make_table
from tests.gpu.torch_tiles import pack_tiles

KINDS = ("q8_0", "q4_0", "q5_1")


def matrix_bytes(kinds: Sequence[QuantType], width: int, hidden: int) -> tuple[int, int, int]:
    """Return the bytes of an expert's gate, up and down in tiles."""
    gate, up, down = kinds
    return (
        tile_bytes(gate, width, hidden),
        tile_bytes(up, width, hidden),
        tile_bytes(down, hidden, width),
    )


def blobs_of(table: ExpertTable) -> torch.Tensor:
    """Return each expert as a row of bytes: the tiles of its gate, up and down."""
    experts = zip(*table.parts, strict=True)
    return torch.stack(
        [torch.cat([pack_tiles(w.data, w.quant, w.columns) for w in expert]) for expert in experts]
    )


def make_blobs(experts: int, width: int, hidden: int) -> tuple[ExpertTable, torch.Tensor]:
    """Return random experts as a file has them, and as rows of tiles."""
    table = make_table(KINDS, experts, width, hidden)
    return table, blobs_of(table)


@dataclass(slots=True)
class PrefillStore:
    """A layer's store as far as the prefill path reads it, and its tiles by address."""

    tiles: ExpertTiles
    cold: torch.Tensor
    host_addresses: torch.Tensor
    expert_bytes: int
    spare: torch.Tensor | None = None  # holds an expert whose exchange failed
    _found: tuple[torch.Tensor, Residency] | None = None

    @property
    def residency(self) -> Residency:
        """Where experts are, by the addresses; the same object until these change."""
        now = self.host_addresses[:, 0]
        if self._found is None or not torch.equal(now, self._found[0]):
            row = (now - self.cold.data_ptr()) // self.expert_bytes
            row[(row < 0) | (row >= len(self.cold))] = SPARE
            row[now == 0] = NOWHERE
            slot = torch.where(now == 0, 0, NOWHERE)
            self._found = now.clone(), Residency(slot, row)
        return self._found[1]

    def cold_of(self, expert: int) -> torch.Tensor | None:
        """Return an expert that lies in the spare buffer; others are found by their rows."""
        assert self.spare is not None
        assert self.host_addresses[expert, 0] == self.spare.data_ptr()
        return self.spare


def prefill_store(
    table: ExpertTable, blobs: torch.Tensor, cold_order: Sequence[int]
) -> PrefillStore:
    """Return experts on a GPU but for the cold ones, which lie in host memory in a given order."""
    gate = table.gate[0]
    hot = [expert for expert in range(len(blobs)) if expert not in cold_order]
    slots, cold = blobs[hot].to("cuda"), blobs[list(cold_order)].pin_memory()
    sizes = matrix_bytes(table.kinds, gate.rows, gate.columns)
    parts = torch.tensor([0, sizes[0], sizes[0] + sizes[1]])
    addresses = torch.zeros(len(blobs), 3, dtype=torch.int64)
    host = addresses.clone()
    for slot, expert in enumerate(hot):
        addresses[expert] = slots[slot].data_ptr() + parts
    for row, expert in enumerate(cold_order):
        host[expert] = cold[row].data_ptr() + parts
    tiles = ExpertTiles(
        addresses.to("cuda"), table.kinds, gate.rows, gate.columns, slots.nbytes, (slots,)
    )
    return PrefillStore(tiles, cold, host, sum(sizes))


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStore:
    """A layer's store as far as the decode path reads it; all experts are in host memory."""

    table: ExpertTable  # as a file has them
    blobs: torch.Tensor  # uint8 [experts, bytes], in tiles
    tiles: ExpertTiles  # where a GPU finds all
    is_hot: torch.Tensor  # int32 [experts]: which ones the CPU is not told of
    host_addresses: torch.Tensor

    @property
    def lookup(self) -> LayerTable:
        """What a step resolves its picks by."""
        return expert_cache.static_table(self.is_hot, None)

    @property
    def experts(self) -> int:
        return len(self.blobs)

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


def decode_store(
    kinds: tuple[str, str, str], sizes: tuple[int, int, int], hot: Sequence[int]
) -> DecodeStore:
    """Return random experts `(count, width, hidden)`; those of `hot` count as in GPU memory."""
    count, width, hidden = sizes
    table = make_table(kinds, count, width, hidden)
    blobs, quants = blobs_of(table), tuple(BY_NAME[kind] for kind in kinds)
    gate, up, _ = matrix_bytes(quants, width, hidden)
    first = torch.arange(count) * blobs.shape[1] + blobs.data_ptr()
    addresses = torch.stack([first, first + gate, first + gate + up], dim=1).contiguous()
    is_hot = torch.zeros(count, dtype=torch.int32)
    is_hot[list(hot)] = 1
    tiles = ExpertTiles(addresses, quants, width, hidden, blobs.nbytes, (blobs,))
    here = addresses * (1 - is_hot.long())[:, None]
    return DecodeStore(table, blobs, tiles, is_hot, here.contiguous())


def random_picks(rows: int, count: int, used: int) -> Picks:
    """Return ids and weights as a router gives them; one row is padding if there are three."""
    ids = torch.stack([torch.randperm(count)[:used] for _ in range(rows)]).int()
    weights = torch.rand(rows, used)
    if rows > 2:
        ids[rows // 2], weights[rows // 2] = -1, 0
    return Picks(ids, weights / weights.sum(1, keepdim=True).clamp(min=1e-9))
