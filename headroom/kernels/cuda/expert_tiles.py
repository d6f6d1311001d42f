"""Experts in tiles on a GPU, and what rows get besides those that they chose."""

from dataclasses import dataclass

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda.launch import Argument

PARTS = 3  # matrices of an expert: gate, up, down
Kinds = tuple[QuantType, ...]  # of those


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTiles:
    """One layer's experts in tiles, found by their addresses."""

    addresses: torch.Tensor  # int64 [experts, PARTS], on the GPU
    kinds: Kinds
    width: int  # of an expert
    hidden: int
    nbytes: int
    memory: tuple[torch.Tensor, ...]  # that the addresses point into, kept alive


@dataclass(frozen=True, slots=True, eq=False)
class OwnTiles:
    """The expert that every row visits, in tiles on the GPU."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    kinds: Kinds
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Others:
    """What rows get besides their routed experts, added where those are summed."""

    residual: torch.Tensor | None = None  # [rows, hidden]
    shared: torch.Tensor | None = None  # [rows, hidden]: of the expert that every row visits
    shared_logits: torch.Tensor | None = None  # [rows, n]: of its weight, the first of each row
    own: OwnTiles | None = None  # that expert, where it is still to run: steps of few rows alone

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The last arguments of kernels that sum, but for their output."""
        stride = 0 if self.shared_logits is None else self.shared_logits.stride(0)
        return self.residual, self.shared, self.shared_logits, stride


NO_OTHERS = Others()


def expert_constants(table: ExpertTiles, activation: str, others: Others) -> dict[str, int]:
    """Return the macros of experts.cu that say what experts there are."""
    kinds = [kind.ggml_id for kind in table.kinds]
    own = kinds if others.own is None else [kind.ggml_id for kind in others.own.kinds]
    return {
        **dict(zip(("GATE", "UP", "DOWN"), kinds, strict=True)),
        **dict(zip(("OWN_GATE", "OWN_UP", "OWN_DOWN"), own, strict=True)),
        "GELU": int(activation == "gelu"),
    }
