"""Layers with cold experts in host memory, and copies that tests run when they like."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda.experts import ExpertTiles
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.kernels.ops import ExpertTable
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
    """Every expert as one piece of memory: tiles of gate, up and down."""
    experts = zip(*table.parts, strict=True)
    return torch.stack(
        [torch.cat([pack_tiles(w.data, w.quant, w.columns) for w in expert]) for expert in experts]
    )


@dataclass(slots=True)
class Layer:
    """A layer's store as far as streaming reads it, and its tiles by address."""

    tiles: ExpertTiles
    cold: torch.Tensor
    host_addresses: torch.Tensor
    expert_bytes: int
    spare: torch.Tensor | None = None  # of an expert that is between two places

    def cold_of(self, expert: int) -> torch.Tensor | None:
        """The spare one: others are found by their rows."""
        assert self.spare is not None
        assert self.host_addresses[expert, 0] == self.spare.data_ptr()
        return self.spare


def make_blobs(experts: int, width: int, hidden: int) -> tuple[ExpertTable, torch.Tensor]:
    table = make_table(KINDS, experts, width, hidden)
    return table, blobs_of(table)


def split_layer(
    table: ExpertTable, blobs: torch.Tensor, cold_order: Sequence[int], device: str = "cpu"
) -> Layer:
    """The same experts with some of them cold, which lie in the given order."""
    gate = table.gate[0]
    hot = [expert for expert in range(len(blobs)) if expert not in cold_order]
    slots, cold = blobs[hot].to(device), blobs[list(cold_order)].clone()
    if device != "cpu":
        cold = cold.pin_memory()
    sizes = matrix_bytes(table.kinds, gate.rows, gate.columns)
    parts = torch.tensor([0, sizes[0], sizes[0] + sizes[1]])
    addresses = torch.zeros(len(blobs), 3, dtype=torch.int64)
    host = addresses.clone()
    for slot, expert in enumerate(hot):
        addresses[expert] = slots[slot].data_ptr() + parts
    for row, expert in enumerate(cold_order):
        host[expert] = cold[row].data_ptr() + parts
    tiles = ExpertTiles(
        addresses.to(device), table.kinds, gate.rows, gate.columns, slots.nbytes, (slots,)
    )
    return Layer(tiles, cold, host, sum(sizes))


@dataclass(eq=False)
class FakeMark:
    """A point in the computing, or the end of a copy."""

    number: int  # of the computing's points before it
    copy: tuple[torch.Tensor, list[torch.Tensor]] | None = None
    waited: int = 0

    def synchronize(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Run the copy, if it has not run."""
        if self.copy is not None:
            (out, sources), self.copy = self.copy, None
            at = 0
            for source in sources:
                out[at : at + source.numel()] = source.flatten()
                at += source.numel()


@dataclass(eq=False)
class LateCopies:
    """Copies that run only when the computing waits for them: who reads too early finds rubbish.

    The computing here is done when it is asked for; that of a GPU is not. So a copy must be asked
    to begin after a point that was marked when the buffer had been read.
    """

    sources: list[torch.Tensor] = field(default_factory=list)  # that were copied from
    marks: int = 0
    last: dict[int, FakeMark] = field(default_factory=dict)  # into each buffer
    read_at: dict[int, int] = field(default_factory=dict)  # marks when it was last waited for

    def mark(self) -> FakeMark:
        self.marks += 1
        return FakeMark(self.marks)

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: FakeMark) -> FakeMark:
        where = out.data_ptr()
        assert after.number > self.read_at.get(where, 0), "the buffer may be read still"
        out.fill_(0xFF)
        self.sources += sources
        self.last[where] = FakeMark(0, (out, list(sources)))
        return self.last[where]

    def wait(self, mark: FakeMark) -> None:
        mark.finish()
        for where, last in self.last.items():
            if last is mark:
                self.read_at[where] = self.marks
