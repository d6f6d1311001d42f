"""N-gram guesses: against a search through the whole text."""

from collections.abc import Sequence
from random import Random

import pytest

from headroom.spec.ngram import LONGEST, PLACES, NgramDrafter


def searched(tokens: Sequence[int], most: int) -> list[int]:
    """What followed the longest end of a text where it stood before, the last such place."""
    end = len(tokens) - 1
    places = [
        place
        for place in range(1, end)
        if (tokens[place - 1], tokens[place]) == (tokens[end - 1], tokens[end])
    ][-PLACES:]
    if not places:
        return []

    def length(place: int) -> int:
        equal = 0
        while equal < min(LONGEST, place + 1) and tokens[place - equal] == tokens[end - equal]:
            equal += 1
        return equal

    best = max(reversed(places), key=length)
    text = list(tokens)
    for source in range(best + 1, best + 1 + most):
        text.append(text[source])
    return text[len(tokens) :]


@pytest.mark.parametrize("kinds", [2, 5, 40])
def test_guesses_are_those_of_a_search_through_the_whole_text(kinds: int) -> None:
    chance = Random(kinds)
    guesser, tokens, found = NgramDrafter().begin(), [0], 0
    while len(tokens) < 400:
        tokens += (chance.randrange(kinds) for _ in range(chance.randint(1, 4)))
        draft = guesser.guess(tokens, 6)
        assert draft.is_chain
        assert list(draft.tokens) == searched(tokens, 6)
        found += bool(draft)
    assert found > 10


def test_a_text_that_repeats_a_few_tokens_is_guessed_to_repeat_them() -> None:
    assert NgramDrafter().begin().guess([7, 1, 2, 3, 1, 2, 3], 8).tokens == (1, 2, 3) * 2 + (1, 2)
    assert NgramDrafter().begin().guess([5, 5, 5], 3).tokens == (5, 5, 5)


def test_of_several_places_the_one_with_most_equal_tokens_before_it_counts() -> None:
    text = [9, 8, 1, 2, 3, 4, 1, 2, 5, 6, 8, 1, 2]
    assert NgramDrafter().begin().guess(text, 2).tokens == (3, 4)
    assert NgramDrafter().begin().guess(text[1:], 2).tokens == (3, 4)
    assert NgramDrafter().begin().guess([*text[:-3], 0, 1, 2], 2).tokens == (5, 6)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3], [1, 2, 1], [1, 2, 3, 2]])
def test_a_text_whose_last_two_tokens_never_came_before_has_no_guesses(tokens: list[int]) -> None:
    assert not NgramDrafter().begin().guess(tokens, 4)


def test_no_guesses_are_made_if_none_are_wanted() -> None:
    assert not NgramDrafter().begin().guess([1, 2, 1, 2], 0)
