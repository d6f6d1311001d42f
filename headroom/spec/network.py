"""NetworkDrafter: guesses of a draft network, as drafts that steps verify."""

from collections.abc import Callable, Sequence

from headroom.layers.draft_network import Asked, Guessed
from headroom.spec.draft import Draft
from headroom.spec.tree import Candidate, best_tree


class NetworkDrafter:
    """Turns what a draft network guesses into chains, or into trees where it gives candidates.

    Guessing takes time, in contrast to a look into the text. So the engine decides how many tokens
    are worth guessing before it asks.
    """

    def __init__(
        self,
        name: str,  # the word of `--draft` and of requests that chooses it
        guess: Callable[[Sequence[Asked]], list[Guessed]],
        chance: float,  # that a guess is right, if those before it are, until some were judged
    ) -> None:
        self.name, self.chance = name, chance
        self._guess = guess

    def guess(self, asked: Sequence[Asked]) -> list[Draft]:
        """Return a draft for each sequence, of at most its `most` guesses."""
        found = self._guess(asked)
        return [
            _draft(guessed, one.most, self.chance)
            for one, guessed in zip(asked, found, strict=True)
        ]


def _draft(guessed: Guessed, most: int, chance: float) -> Draft:
    if guessed.logprobs is None or guessed.tokens.shape[1] == 1:
        return Draft.chain(guessed.tokens[:most, 0].tolist(), chance=chance)
    depths = [
        [Candidate(*pair) for pair in zip(tokens, logprobs, strict=True)]
        for tokens, logprobs in zip(guessed.tokens.tolist(), guessed.logprobs.tolist(), strict=True)
    ]
    return best_tree(depths, most)
