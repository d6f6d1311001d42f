"""best_tree(): the guesses that are likeliest together, from the likeliest tokens of each depth."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headroom.spec.draft import Draft


class Candidate(NamedTuple):
    """One of the likeliest tokens of a depth."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True, order=True)
class _Guess:
    """A guess of the tree, or one that may be added next; the smallest is."""

    cost: float  # minus the log probability of its path
    ranks: tuple[int, ...]  # of the tokens of its path, each among those of its depth: breaks ties
    parent: int  # the number of the guess that it follows; 0: the sequence's last token


def best_tree(
    depths: Sequence[Sequence[Candidate]],  # by depth, the likeliest tokens first, each once
    most: int,
    *,
    chain_first: bool = True,
) -> Draft:
    """Return the `most` guesses whose paths are likeliest, where no depth depends on another.

    The likelier guess comes first, and of equally likely ones that whose tokens rank first, so that
    each comes after the one that it follows. With `chain_first` the likeliest tokens of all depths
    come before all others: else early second choices take the place of deep guesses, and a step in
    which all first choices are right gains less.
    """
    tree = [_Guess(0.0, (), 0)]  # the sequence's last token, then the guesses by their numbers
    open_guesses: list[_Guess] = []

    def guess_after(parent: int, rank: int) -> _Guess | None:
        """Return the guess of a rank that may follow another one; None: there is none."""
        before = tree[parent]
        depth = len(before.ranks)
        if depth == len(depths) or rank == len(depths[depth]):
            return None
        return _Guess(before.cost - depths[depth][rank].logprob, (*before.ranks, rank), parent)

    def add(guess: _Guess, *, with_child: bool) -> None:
        tree.append(guess)
        following = [guess_after(guess.parent, guess.ranks[-1] + 1)]
        following += [guess_after(len(tree) - 1, 0)] if with_child else []
        for found in following:
            if found is not None:
                heapq.heappush(open_guesses, found)

    if chain_first:
        while len(tree) <= most and (guess := guess_after(len(tree) - 1, 0)) is not None:
            add(guess, with_child=False)
    elif (guess := guess_after(0, 0)) is not None:
        open_guesses.append(guess)
    while open_guesses and len(tree) <= most:
        add(heapq.heappop(open_guesses), with_child=True)
    guesses = tree[1:]
    return Draft(
        tokens=tuple(depths[len(x.ranks) - 1][x.ranks[-1]].token for x in guesses),
        parents=tuple(guess.parent for guess in guesses),
    )
