"""Guesses: what layers do with the rows of a step once it is known which of them stay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from headroom.errors import CapacityError
from headroom.kernels.ops import DeltaNetOp, DeltaNetWeights, RecurrentState, Span


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    """The rows of a guessed span that stay: the tokens that the sequence has now."""

    span: Span
    rows: tuple[int, ...]  # numbers within the span, the first row included, in their order


class Keeper(Protocol):
    """A part of a layer that has to know which rows of a step stay."""

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Make the layer's memory of sequences what the accepted rows alone would have made it."""


class Guesses:
    """All parts of a stage that have to know which rows of its last step stay."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = tuple(keepers)

    @torch.inference_mode()
    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Keep the accepted rows of the guessed spans of the last step."""
        for keeper in self._keepers:
            keeper.commit(accepted)


class KeptRows:
    """The inputs of a recurrent layer's rows in a step with guesses; of the last such step.

    A state cannot forget a row. So a step leaves the states of guessed spans as they were, and the
    accepted rows run once more through the layer's recurrence, which costs next to nothing beside
    its matrices. The bits are therefore those of a step that had the accepted rows alone, and no
    row needs a state of its own.
    """

    def __init__(self, rows: int, channels: int, heads: int, device: str) -> None:
        self._qkv = torch.empty(rows, channels, device=device)
        self._gates = torch.empty(2, rows, heads, device=device)  # beta, alpha

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return self._qkv.nbytes + self._gates.nbytes

    def keep(self, qkv: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor) -> None:
        """Keep the rows of a step."""
        rows = len(qkv)
        if rows > len(self._qkv):
            raise CapacityError(
                f"A step with guesses has {rows} rows, and memory was planned for "
                f"{len(self._qkv)}.",
                hint="Guess fewer tokens at a time.",
            )
        self._qkv[:rows].copy_(qkv)
        self._gates[0, :rows].copy_(beta)
        self._gates[1, :rows].copy_(alpha)

    def run(
        self,
        delta_net: DeltaNetOp,
        weights: DeltaNetWeights,
        state: RecurrentState,
        accepted: Sequence[Accepted],
    ) -> None:
        """Advance the states of sequences by their accepted rows."""
        places: list[int] = []
        spans = []
        for one in accepted:
            span, rows = one.span, one.rows
            first = len(places)
            places += (span.first_row + row for row in rows)
            spans.append(replace(span, first_row=first, rows=len(rows), tree=None, guessed=False))
        index = torch.tensor(places, device=self._qkv.device)
        beta, alpha = self._gates[:, index]
        delta_net(self._qkv[index], beta, alpha, weights, state, tuple(spans))
