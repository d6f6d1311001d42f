"""What a draft network guesses becomes chains, or trees of the likeliest paths."""

import torch

from headroom.layers.draft_network import Asked, Guessed, pages_ahead
from headroom.spec.network import NetworkDrafter


def asked(most: int) -> Asked:
    return Asked(token=5, start=70, pages=torch.tensor([3, 8]), state_slot=1, most=most)


def guessed(*depths: dict[int, float]) -> Guessed:
    return Guessed(
        torch.tensor([list(depth) for depth in depths]),
        torch.tensor([list(depth.values()) for depth in depths]).log(),
    )


def test_guesses_without_chances_are_a_chain_of_at_most_as_many_as_asked_for() -> None:
    chain = Guessed(torch.tensor([[4], [7], [4]]), None)
    drafter = NetworkDrafter("mtp", lambda each: [chain for _ in each], chance=0.6)
    short, long = drafter.guess([asked(2), asked(3)])
    assert (short.tokens, short.parents, short.chance) == ((4, 7), (0, 1), 0.6)
    assert long.tokens == (4, 7, 4)


def test_several_candidates_become_a_tree_of_the_likeliest_paths() -> None:
    found = guessed({4: 0.6, 5: 0.4}, {7: 0.9, 8: 0.1})
    (draft,) = NetworkDrafter("draft", lambda each: [found], chance=0.6).guess([asked(4)])
    # The likeliest chain, then 5 (0.4), then 7 after 5 (0.36).
    assert (draft.tokens, draft.parents) == ((4, 7, 5, 7), (0, 1, 0, 3))


def test_guesses_beyond_a_sequence_s_pages_go_to_the_page_of_its_slot() -> None:
    assert pages_ahead(asked(4), own_page=21).tolist() == [3, 8, 21]
