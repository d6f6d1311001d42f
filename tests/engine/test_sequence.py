"""Sequence: what is pending, generated and ending, and its pages as a tensor."""

import pytest

from headroom.engine.request import GenerationRequest, SamplingParams
from headroom.engine.sequence import Sequence


def running(limit: int = 6) -> Sequence:
    request = GenerationRequest(
        id="", prompt=(5, 6, 7), params=SamplingParams(), stop_ids=frozenset()
    )
    return Sequence(request, lambda event: None, limit)


def test_tokens_are_pending_until_they_are_cached() -> None:
    sequence = running()
    assert (sequence.pending, sequence.generated) == (3, 0)
    sequence.cached = 3
    sequence.learn(3, 9)
    assert (sequence.tokens, sequence.pending, sequence.generated) == ([5, 6, 7, 9], 1, 1)


def test_an_unread_token_counts_for_the_end_and_not_as_generated() -> None:
    sequence = running(limit=5)
    sequence.tokens += [-1, -2]
    sequence.unread = 2
    assert (sequence.generated, sequence.ending) == (0, True)
    sequence.learn(3, 9)
    assert (sequence.tokens, sequence.unread, sequence.generated) == ([5, 6, 7, 9, -2], 1, 1)
    sequence.learn(4, 8)
    assert (sequence.tokens, sequence.unread) == ([5, 6, 7, 9, 8], 0)


@pytest.mark.parametrize(("limit", "ending"), [(4, False), (3, True), (2, True)])
def test_a_sequence_ends_at_exactly_its_limit(limit: int, ending: bool) -> None:
    assert running(limit).ending == ending


def test_the_page_table_is_made_again_only_if_pages_have_changed() -> None:
    sequence = running()
    sequence.pages = [4, 2]
    table = sequence.page_table()
    assert sequence.page_table() is table
    sequence.pages += [9]
    assert sequence.page_table().tolist() == [4, 2, 9]
    sequence.pages = [1, 2, 3]  # preempted and started again: as many pages, but other ones
    assert sequence.page_table().tolist() == [1, 2, 3]


def test_times_before_a_step_or_a_token_are_all_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    sequence = running()
    sequence.submitted_at, clock[0] = 10.0, 14.0
    waited = sequence.timings()
    assert (waited.queue_s, waited.prefill_s, waited.decode_s) == (4, 0, 0)
    sequence.started_at, clock[0] = 14.0, 15.0
    computed = sequence.timings()
    assert (computed.queue_s, computed.prefill_s, computed.decode_s) == (4, 1, 0)
    sequence.first_token_at, clock[0] = 16.0, 19.0
    ended = sequence.timings()
    assert (ended.queue_s, ended.prefill_s, ended.decode_s) == (4, 2, 3)
