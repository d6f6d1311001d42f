"""Texts far beyond a context are not encoded as a whole."""

from typing import cast

import pytest

from headroom.errors import ContextLengthError
from headroom.text.long_texts import (
    CHARACTERS,
    CHARACTERS_PER_TOKEN,
    check_not_far_beyond,
    first_tokens,
)
from headroom.text.tokenizer import Tokenizer

CONTEXT = CHARACTERS // CHARACTERS_PER_TOKEN


class PairTokenizer:
    """Two characters are a token, and any number of blanks is one; it counts what it encodes."""

    def __init__(self) -> None:
        self.longest = 0
        self.sizes: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.longest = max(self.longest, len(text))
        self.sizes.append(len(text))
        blanks = 1 if text.startswith(" ") else 0
        return list(range(blanks + (len(text.lstrip(" ")) + 1) // 2))


def test_a_text_far_beyond_the_context_is_refused_by_its_beginning() -> None:
    counter = PairTokenizer()
    with pytest.raises(ContextLengthError, match="at least") as caught:
        check_not_far_beyond(cast(Tokenizer, counter), "a" * 100 * CHARACTERS, CONTEXT)
    assert CONTEXT < caught.value.tokens <= CHARACTERS // 2
    assert (caught.value.context, caught.value.param) == (CONTEXT, "prompt")
    assert counter.longest == CHARACTERS


def test_a_long_text_of_few_tokens_is_not_refused() -> None:
    check_not_far_beyond(cast(Tokenizer, PairTokenizer()), " " * 100 * CHARACTERS, CONTEXT)
    text = " " * 3 * CHARACTERS + "a" * CONTEXT
    assert first_tokens(cast(Tokenizer, PairTokenizer()), text, CONTEXT) is None


def test_a_text_that_may_fit_is_not_encoded() -> None:
    counter = PairTokenizer()
    check_not_far_beyond(cast(Tokenizer, counter), "a" * CHARACTERS, 10)
    check_not_far_beyond(cast(Tokenizer, counter), "a" * 4 * CHARACTERS, 4 * CONTEXT)
    assert counter.longest == 0


def test_the_first_tokens_are_those_of_the_whole_text() -> None:
    counter = cast(Tokenizer, PairTokenizer())
    text = "a" * 10 * CHARACTERS
    tokens = first_tokens(counter, text, CONTEXT)
    assert tokens is not None
    assert len(tokens) > CONTEXT
    assert tokens == counter.encode(text)[: len(tokens)]


def test_twice_as_much_of_a_text_is_tried_each_time() -> None:
    counter = PairTokenizer()
    text = " " * (4 * CHARACTERS) + "a" * (10 * CHARACTERS)
    tokens = first_tokens(cast(Tokenizer, counter), text, CONTEXT)
    assert tokens is not None
    assert counter.sizes == [CHARACTERS, 2 * CHARACTERS, 4 * CHARACTERS, 8 * CHARACTERS]
