"""StepResult: what the engine may ask of a step that ran."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

Head = Callable[[torch.Tensor], torch.Tensor]  # rows of the residual stream to their logits


class StepResult(Protocol):
    """A step's output rows, by their places in the batch's `output_rows`; valid until the next."""

    @property
    def places(self) -> Mapping[int, int]:
        """The output rows whose tokens a device draws, and where it keeps each of them.

        Until the step after the next begins, a batch may name such a token as -1 - place.
        """

    @property
    def hidden(self) -> torch.Tensor:
        """The residual stream of all output rows."""

    def tokens(self) -> list[int | None]:
        """Return each output row's token, None where it is not drawn yet: the caller draws it."""

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` of some output rows, float32 in host memory.

        At most as many rows as sequences run together.
        """


class HostResult:
    """A step on a CPU, which leaves all drawing to the engine."""

    def __init__(self, hidden: torch.Tensor, head: Head) -> None:
        self.hidden = hidden
        self.places: Mapping[int, int] = {}
        self._head = head

    def tokens(self) -> list[int | None]:
        """Return that no token is drawn."""
        return [None] * len(self.hidden)

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Return logits of some output rows."""
        return self._head(pick_rows(self.hidden, rows)).float()


def pick_rows(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows: those that lie together as they are, others as a copy."""
    if not rows:
        return x[:0]
    if rows[-1] - rows[0] == len(rows) - 1:
        return x[rows[0] : rows[-1] + 1]
    chosen = torch.tensor(rows, dtype=torch.int64)
    if x.device.type != "cpu":
        chosen = chosen.pin_memory().to(x.device, non_blocking=True)
    return x.index_select(0, chosen)
