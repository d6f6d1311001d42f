"""DraftNetwork: weights beside a model's last layers that guess how its sequences go on.

A draft network belongs to the last stage. It reads the hidden states of the rows of every step, so
that it knows of a sequence what the model knows, and keeps that in the engine's pages and in the
sequence's state slot: prefixes, snapshots and preemption treat it as one more layer. Then it
guesses for all sequences of a step at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headroom.layers.batch import Batch
from headroom.layers.guesses import Accepted


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A sequence whose next tokens are to be guessed."""

    token: int  # its last one, which no step has computed yet
    start: int  # tokens before it, which steps have computed: also the position of `token`
    pages: torch.Tensor  # int64 page numbers in token order, enough for start + 1 tokens
    state_slot: int
    most: int  # tokens to guess, 1 or more


@dataclass(frozen=True, slots=True, eq=False)
class Guessed:
    """The likeliest next tokens of one sequence, by how far ahead they are."""

    tokens: torch.Tensor  # int64 [depths, candidates] in host memory, the likeliest first
    logprobs: torch.Tensor | None  # float32 [depths, candidates]; None: one candidate, a chain


class DraftNetwork(Protocol):
    """Weights of a stage that guess what follows sequences."""

    def learn(self, stream: torch.Tensor, batch: Batch) -> None:
        """Take the rows of a step that has run; `stream` is the residual stream after its layers.

        Afterwards the network knows all tokens of the batch, but for rows of guessed spans, of
        which `commit` says which ones stay. A sequence's first row begins at position 0, or after
        a prefix that was learned before and whose pages and state slot were restored.
        """

    def guess(self, asked: Sequence[Asked]) -> list[Guessed]:
        """Return guesses for each sequence, of at most its `most` depths.

        What the network knows of the sequences stays as it is.
        """

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Keep the accepted rows of the guessed spans of the last step, and forget the others."""


def pages_ahead(asked: Asked, own_page: int) -> torch.Tensor:
    """Return a sequence's pages, and one more for the keys and values of its guesses.

    The engine lends no page for guesses that no step may ever check. So the network's caches have
    one page more for each state slot, and the guesses that the sequence's own pages have no room
    for go there; a page has room for more guesses than a step can check.
    """
    return torch.cat((asked.pages, torch.tensor([own_page])))
