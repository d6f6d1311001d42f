"""Residence: where each expert of a layer is, and the table that tells a GPU's kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.kernels.cuda.expert_tiles import PARTS

NOWHERE, SPARE = -1, -2  # instead of a row: not on this side; in this side's spare buffer


@dataclass(frozen=True, slots=True, eq=False)
class Residence:
    """Which row of either side each expert is in; hot ones may have one of both.

    Cold ones that are left out may have none.
    """

    slot: torch.Tensor  # int64 [experts]
    row: torch.Tensor  # int64 [experts]

    @property
    def is_hot(self) -> torch.Tensor:
        """Which experts are hot."""
        return self.slot != NOWHERE

    def with_moved(self, slots: dict[int, int], rows: dict[int, int]) -> "Residence":
        """Return where all are when these experts have other slots and rows."""
        slot, row = self.slot.clone(), self.row.clone()
        for expert, place in slots.items():
            slot[expert] = place
        for expert, place in rows.items():
            row[expert] = place
        return Residence(slot, row)


def first_residence(experts: int, hot: Sequence[int], rows: int) -> Residence:
    """Return where experts are loaded to: with a row for each, hot ones have one as well.

    Without rows, cold experts are nowhere.
    """
    slot = torch.full((experts,), NOWHERE)
    slot[list(hot)] = torch.arange(len(hot))
    if rows == experts:
        return Residence(slot, torch.arange(experts))
    if not rows:
        return Residence(slot, torch.full((experts,), NOWHERE))
    is_cold = slot == NOWHERE
    return Residence(slot, torch.where(is_cold, is_cold.cumsum(0) - 1, NOWHERE))


def addresses_of(rows: torch.Tensor, side: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Return the addresses of rows of a side, or of its spare buffer."""
    apart = side.shape[1]
    return torch.where(rows == SPARE, spare.data_ptr(), side.data_ptr() + rows * apart)


def table_bytes(experts: int) -> int:
    """Return the bytes of a layer's table: addresses, and flags of hot experts."""
    return experts * (8 * PARTS + 4)


def table_views(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses int64 [experts, PARTS] and flags int32 [experts] in one piece of memory."""
    experts = len(table) // table_bytes(1)
    end = 8 * PARTS * experts
    addresses = table[:end].view(torch.int64).view(experts, PARTS)
    return addresses, table[end:].view(torch.int32)
