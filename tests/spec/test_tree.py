"""The best-first tree: against all paths, sorted, and by what holds for every tree."""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.spec.draft import Draft
from headroom.spec.tree import Candidate, best_tree

Depths = list[list[Candidate]]


@st.composite
def depths(draw: st.DrawFn) -> Depths:
    """Up to four depths of up to four tokens; many are equally likely."""
    made = []
    for _ in range(draw(st.integers(0, 4))):
        shares = draw(st.lists(st.sampled_from((1, 1, 2, 3, 8)), min_size=1, max_size=4))
        tokens = draw(st.permutations(range(5)))
        total = sum(shares) + draw(st.integers(0, 3))
        likeliest_first = sorted(shares, reverse=True)
        made.append(
            [
                Candidate(token, math.log(share / total))
                for token, share in zip(tokens, likeliest_first, strict=False)
            ]
        )
    return made


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the sequence's end to each guess."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def all_paths(made: Depths) -> list[tuple[int, ...]]:
    """All paths, likeliest first; of equally likely ones that with the smaller ranks."""
    found = []
    for length in range(1, len(made) + 1):
        for ranks in itertools.product(*(range(len(depth)) for depth in made[:length])):
            cost = 0.0
            for depth, rank in zip(made, ranks, strict=False):
                cost -= depth[rank].logprob
            found.append((cost, ranks))
    return [
        tuple(depth[rank].token for depth, rank in zip(made, ranks, strict=False))
        for _, ranks in sorted(found)
    ]


def first_choices(made: Depths) -> list[tuple[int, ...]]:
    chain = tuple(depth[0].token for depth in made)
    return [chain[:length] for length in range(1, len(chain) + 1)]


@given(depths(), st.integers(0, 40))
def test_a_tree_has_the_likeliest_of_all_paths_in_their_order(made: Depths, most: int) -> None:
    assert paths_of(best_tree(made, most, chain_first=False)) == all_paths(made)[:most]


@given(depths(), st.integers(0, 40))
def test_a_tree_has_the_first_choices_and_then_the_likeliest_of_the_others(
    made: Depths, most: int
) -> None:
    chain = first_choices(made)
    others = [path for path in all_paths(made) if path not in chain]
    assert paths_of(best_tree(made, most)) == [*chain, *others][:most]


@given(depths(), st.integers(0, 40), st.booleans())
def test_every_tree_keeps_its_size_and_has_no_guess_twice_or_before_its_parent(
    made: Depths, most: int, chain_first: bool
) -> None:
    draft = best_tree(made, most, chain_first=chain_first)
    assert len(draft) == min(most, len(all_paths(made)))
    assert len(set(paths_of(draft))) == len(draft)
    assert all(parent < number for number, parent in enumerate(draft.parents, start=1))
    assert draft.tokens == best_tree(made, most, chain_first=chain_first).tokens


def test_without_first_choices_a_flat_second_depth_is_left_for_second_tokens() -> None:
    def depth(*shares: float) -> Sequence[Candidate]:
        return [Candidate(token, math.log(share)) for token, share in enumerate(shares)]

    made = [depth(0.5, 0.4), depth(0.3, 0.3, 0.3), depth(0.9)]
    assert paths_of(best_tree(made, 3)) == [(0,), (0, 0), (0, 0, 0)]
    assert paths_of(best_tree(made, 3, chain_first=False)) == [(0,), (1,), (0, 0)]


@pytest.mark.parametrize("most", [0, 5])
def test_no_depths_make_no_tree(most: int) -> None:
    assert not best_tree([], most)
