"""Draft: the tokens that may follow a sequence, as a drafter guesses them: a chain or a tree."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Guessed tokens, numbered from 1; token 0 is the sequence's own last token.

    Each guess follows token 0 or an earlier guess. In a step that verifies the draft, the row of a
    guess has its number, and row 0 computes the sequence's last token.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # of each guess: the number of the token that it follows
    kind: int = 0  # drafts of one kind are about equally often right
    chance: float = 0.5  # the drafter's own estimate that a guess is right, if those before it are
    # By the number of a token and the token that follows it: the number of the guess.
    _children: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents)
        for number, (token, parent) in enumerate(
            zip(self.tokens, self.parents, strict=True), start=1
        ):
            assert 0 <= parent < number, "a guess comes after the token that it follows"
            assert (parent, token) not in self._children, "two guesses are the same"
            self._children[parent, token] = number

    @classmethod
    def chain(cls, tokens: Sequence[int], kind: int = 0, chance: float = 0.5) -> "Draft":
        """Return a draft in which each guess follows the one before it."""
        return cls(tuple(tokens), tuple(range(len(tokens))), kind, chance)

    def first(self, count: int) -> "Draft":
        """Return the draft's first guesses."""
        if count >= len(self):
            return self
        return Draft(self.tokens[:count], self.parents[:count], self.kind, self.chance)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether no two guesses follow the same token."""
        return self.parents == tuple(range(len(self.tokens)))

    def child(self, number: int, token: int) -> int | None:
        """Return the number of the guess that `token` follows token `number`; None: no guess."""
        return self._children.get((number, token))

    def depths(self) -> list[int]:
        """Return how many tokens after token 0 each token comes, token 0 included."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def mask(self) -> torch.Tensor | None:
        """Return which rows each row sees, as `Span.tree`; None for a chain."""
        if self.is_chain:
            return None
        seen = torch.eye(1 + len(self), dtype=torch.bool)
        for number, parent in enumerate(self.parents, start=1):
            seen[number] |= seen[parent]
        return seen


NO_DRAFT = Draft((), ())
