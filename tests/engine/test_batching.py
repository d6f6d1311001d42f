"""Batches: which rows of a step give logits."""

import pytest

from headroom.engine.batching import output_rows, wants_prompt_logprobs
from headroom.engine.request import GenerationRequest, SamplingParams
from headroom.engine.scheduler import Turn
from headroom.engine.sequence import Sequence


def make_turn(cached: int, rows: int, known: int, *, prompt_logprobs: bool = True) -> Turn:
    """Return rows of a sequence with a prompt of 5 tokens, of which `known` have logprobs."""
    request = GenerationRequest(
        id="",
        prompt=(1, 2, 3, 4, 5),
        params=SamplingParams(prompt_logprobs=prompt_logprobs),
        stop_ids=frozenset(),
    )
    sequence = Sequence(request, lambda event: None, limit=100)
    sequence.cached = cached
    request.prompt_logprobs.extend([None] * known)
    return Turn(sequence, rows)


@pytest.mark.parametrize(("known", "wanted"), [(0, True), (4, True), (5, False)])
def test_prompt_logprobs_are_wanted_until_the_last_one_is_known(known: int, wanted: bool) -> None:
    assert wants_prompt_logprobs(make_turn(0, 5, known)) is wanted
    assert not wants_prompt_logprobs(make_turn(0, 5, known, prompt_logprobs=False))


def test_a_preempted_prompt_whose_logprobs_are_known_gives_its_last_row_alone() -> None:
    assert output_rows(make_turn(0, 5, known=5), first_row=7) == range(11, 12)
    assert output_rows(make_turn(0, 3, known=5), first_row=7) == range(10, 10)


def test_a_chunk_gives_all_rows_for_prompt_logprobs_and_else_only_its_last_if_it_draws() -> None:
    assert output_rows(make_turn(0, 3, known=0), first_row=7) == range(7, 10)
    first = make_turn(0, 3, known=0, prompt_logprobs=False)
    last = make_turn(3, 2, known=0, prompt_logprobs=False)
    assert list(output_rows(first, first_row=7)) == []
    assert list(output_rows(last, first_row=7)) == [8]
