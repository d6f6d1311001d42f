"""NgramDrafter: guesses that a text goes on as it did where its last tokens stood before."""

from array import array
from collections.abc import Sequence

from headroom.options import NGRAM
from headroom.spec.draft import NO_DRAFT, Draft

PLACES = 16  # latest places of the last two tokens that are compared; more cost time
LONGEST = 16  # tokens before a place that are compared with those at the end


class NgramDrafter:
    """Looks the last tokens of a sequence up in its prompt and its answer; needs no model."""

    name = NGRAM

    def begin(self) -> "NgramGuesser":
        """Return what guesses for a new sequence."""
        return NgramGuesser()


class NgramGuesser:
    """Finds where the last two tokens of a sequence stood before, with the most equal tokens.

    It keeps the last place of every pair of tokens, and for each place the one before it with the
    same pair, as compressors do: about 100 bytes for each token.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}  # by pair: the place of its second token
        self._before = array("q")  # by place: the place before it of the same pair; -1: none

    def guess(self, tokens: Sequence[int], most: int) -> Draft:
        """Return a chain of at most `most` tokens; none if the last two tokens never came before.

        Where the found text reaches the end of the sequence, it goes on with its own guesses: a
        sequence that repeats a few tokens is guessed to repeat them.
        """
        if len(tokens) < 2 or most < 1:
            return NO_DRAFT
        self._learn(tokens)
        place, equal = self._best_place(tokens)
        if place is None:
            return NO_DRAFT
        guesses: list[int] = []
        for source in range(place + 1, place + 1 + most):
            known = source < len(tokens)
            guesses.append(tokens[source] if known else guesses[source - len(tokens)])
        return Draft.chain(guesses, kind=equal.bit_length(), chance=equal / (equal + 2))

    def _learn(self, tokens: Sequence[int]) -> None:
        """Note the pairs that have come, but for the last one, which is looked up."""
        for place in range(len(self._before), len(tokens) - 1):
            pair = (tokens[place - 1], tokens[place]) if place else (-1, tokens[0])
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = place

    def _best_place(self, tokens: Sequence[int]) -> tuple[int | None, int]:
        """Return the last place with the most equal tokens up to it, and how many these are."""
        end = len(tokens) - 1
        place = self._last.get((tokens[end - 1], tokens[end]), -1)
        best, longest = None, 1
        for _ in range(PLACES):
            if place < 0:
                break
            length = 2
            while length < LONGEST and length <= place:
                if tokens[place - length] != tokens[end - length]:
                    break
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        return best, longest
