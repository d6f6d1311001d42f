"""Coders from GGUF vocabularies: merges, special tokens, and files that make no coder."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import ModelError
from headroom.formats.vocabulary import Vocabulary
from headroom.text.spelling import Spelling
from headroom.text.vocabulary_coder import (
    CONTROL,
    MAX_TOKEN_CHARACTERS,
    NORMAL,
    USER_DEFINED,
    build_coder,
    ids_of_types,
    merges_from_scores,
    possible_cuts,
    spelling_of,
)
from tests.text.small_vocabularies import gemma_vocabulary, sentencepiece_vocabulary


def test_merges_come_by_score_then_by_the_longer_left_part() -> None:
    tokens, scores = ["a", "aa", "aaa", "b", "ab"], [0.0, -2.0, -1.0, 0.0, -1.0]
    assert merges_from_scores(tokens, [], scores) == [
        ("aa", "a"),
        ("a", "aa"),
        ("a", "b"),
        ("a", "a"),
    ]
    # Control tokens are neither made nor parts of others.
    assert merges_from_scores(tokens, [1, 3, 1, 1, 1], scores) == [("a", "b")]


@given(
    st.dictionaries(
        st.text("ab", min_size=1, max_size=5), st.integers(-9, 0).map(float), min_size=1
    )
)
def test_every_way_to_cut_a_token_in_two_is_a_merge_once(scores: dict[str, float]) -> None:
    found = merges_from_scores(list(scores), [], list(scores.values()))
    wanted = {
        (left, whole.removeprefix(left))
        for whole in scores
        for left in scores
        if whole.startswith(left) and whole.removeprefix(left) in scores
    }
    assert set(found) == wanted
    assert len(found) == len(wanted)
    worth = [scores[left + right] for left, right in found]
    assert worth == sorted(worth, reverse=True)


def test_scores_that_are_not_one_for_each_token_are_refused() -> None:
    with pytest.raises(ModelError, match="3 tokens and 2 scores"):
        merges_from_scores(["a", "b", "ab"], [], [0.0, 0.0])


def test_ids_are_listed_by_type_in_order() -> None:
    types = [CONTROL, NORMAL, USER_DEFINED, CONTROL]
    assert ids_of_types(types, CONTROL) == [0, 3]
    assert ids_of_types(types, USER_DEFINED, NORMAL) == [1, 2]


def test_a_vocabulary_spells_bytes_by_its_model() -> None:
    gemma = gemma_vocabulary()
    assert spelling_of(gemma) is Spelling.BLANK_MARKS
    assert spelling_of(replace(gemma, model="gpt2")) is Spelling.BYTE_LEVEL
    with pytest.raises(ModelError, match="'t5' is not known"):
        spelling_of(replace(gemma, model="t5"))


def pieces(vocabulary: Vocabulary, text: str, *, blank_prefix: bool = False) -> list[str]:
    coder = build_coder(vocabulary, vocabulary.tokens, blank_prefix)
    return [vocabulary.tokens[token] for token in coder.encode(text).ids]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hello", ["hello"]),
        (" hello", ["▁hello"]),
        ("hello<eos>", ["hello", "<eos>"]),
        ("  hello", ["  ", "hello"]),  # the run of blanks is a token of its own
        ("ü", ["<0xC3>", "<0xBC>"]),
    ],
)
def test_gemmas_texts_have_the_expected_pieces(text: str, found: list[str]) -> None:
    assert pieces(gemma_vocabulary(), text, blank_prefix=True) == found  # it never has a prefix


@pytest.mark.parametrize(("prefix", "found"), [(True, ["▁hello"]), (False, ["hello"])])
def test_a_blank_before_a_text_is_a_choice_of_the_file(prefix: bool, found: list[str]) -> None:
    assert pieces(sentencepiece_vocabulary(), "hello", blank_prefix=prefix) == found


def test_of_two_tokens_with_one_text_the_first_is_used() -> None:
    vocabulary = sentencepiece_vocabulary()
    tokens, last = list(vocabulary.tokens), len(vocabulary.tokens)
    first = tokens.index("hello")
    doubled = replace(
        vocabulary,
        tokens=[*tokens, "hello"],
        types=[*vocabulary.types, NORMAL],
        scores=[*vocabulary.scores, 5.0],
    )
    ids = build_coder(doubled, doubled.tokens, False).encode("hello").ids
    assert ids == [first]
    assert last not in ids


@pytest.mark.parametrize(
    ("merges", "told"),
    [(["hello"], "'hello' does not name two tokens"), (["x y"], "do not fit its vocabulary")],
)
def test_merges_that_fit_no_vocabulary_are_refused(merges: list[str], told: str) -> None:
    broken = replace(gemma_vocabulary(), merges=merges)
    with pytest.raises(ModelError, match=told):
        build_coder(broken, broken.tokens, False)


@given(st.lists(st.text(st.sampled_from("ab▁"), min_size=1, max_size=9), unique=True, max_size=40))
def test_merges_are_those_of_trying_every_cut(tokens: list[str]) -> None:
    scores = [float(len(token)) for token in tokens]
    expected = sorted(
        (-len(whole), -cut, whole[:cut], whole[cut:])
        for whole in tokens
        for cut in range(1, len(whole))
        if whole[:cut] in tokens and whole[cut:] in tokens
    )
    found = merges_from_scores(tokens, [], scores)
    assert found == [(left, right) for _, _, left, right in expected]


def test_the_cuts_of_a_long_token_do_not_grow_with_its_length() -> None:
    for length in (10, 100, 1000):
        assert possible_cuts(length, [1, 2, length]) == []  # nothing has the rest's length
        assert possible_cuts(length, [1, 2, length - 2, length]) == [2, length - 2]
    assert possible_cuts(5, range(1, 6)) == [1, 2, 3, 4]


def test_a_token_beyond_any_real_length_is_refused() -> None:
    tokens = ["a", "a" * (MAX_TOKEN_CHARACTERS + 1)]
    with pytest.raises(ModelError, match="a token of 1025 characters; at most 1024 are taken"):
        merges_from_scores(tokens, [], [0.0, 0.0])
    assert merges_from_scores(["a", "aa", "a" * MAX_TOKEN_CHARACTERS], [], [0.0] * 3) == [
        ("a", "a")
    ]
