"""Drafts: which guess follows which, and what each row of a step sees."""

import pytest

from headroom.spec.draft import NO_DRAFT, Draft


def test_a_chain_has_each_guess_follow_the_one_before_it() -> None:
    draft = Draft.chain([5, 5, 7])
    assert (draft.is_chain, len(draft), draft.depths()) == (True, 3, [0, 1, 2, 3])
    assert draft.mask() is None
    assert [draft.child(number, 5) for number in range(4)] == [1, 2, None, None]
    assert draft.child(2, 7) == 3


def test_a_tree_s_rows_see_themselves_and_those_that_they_follow() -> None:
    draft = Draft((5, 6, 7, 5), (0, 0, 1, 2))
    assert draft.depths() == [0, 1, 1, 2, 2]
    mask = draft.mask()
    assert mask is not None
    seen = [set(row.nonzero().flatten().tolist()) for row in mask]
    assert seen == [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}]
    assert (draft.child(0, 6), draft.child(2, 5), draft.child(1, 5)) == (2, 4, None)


def test_no_draft_is_empty_and_false() -> None:
    assert not NO_DRAFT
    assert NO_DRAFT.child(0, 1) is None


@pytest.mark.parametrize(("tokens", "parents"), [((1,), (1,)), ((1, 2), (0,)), ((3, 3), (0, 0))])
def test_a_guess_before_its_parent_and_a_guess_twice_are_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    with pytest.raises(AssertionError):
        Draft(tokens, parents)
