"""The scheduler: order, chunks, pages and who gives way."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.engine.pages import PagePool
from headroom.engine.request import GenerationRequest, SamplingParams
from headroom.engine.scheduler import Limits, Scheduler
from headroom.engine.sequence import Sequence


def make_sequence(order: int, prompt: int, limit: int = 10**6) -> Sequence:
    request = GenerationRequest(
        id=str(order), prompt=tuple(range(prompt)), params=SamplingParams(), stop_ids=frozenset()
    )
    return Sequence(request, lambda event: None, limit)


def run_step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Take the next turns and pretend that they were computed."""
    turns = scheduler.next_turns()
    for turn in turns:
        done = turn.rows == turn.sequence.pending
        turn.sequence.cached += turn.rows
        if done:
            turn.sequence.tokens.append(7)
    return [(turn.sequence.request.id, turn.rows) for turn in turns]


def test_prompts_are_read_in_chunks_beside_sequences_that_decode() -> None:
    scheduler = Scheduler(Limits(parallel=3, chunk=10, page_size=4), PagePool(100))
    for order, prompt in enumerate((4, 25)):
        scheduler.add(make_sequence(order, prompt))
    assert run_step(scheduler) == [("0", 4), ("1", 6)]
    assert run_step(scheduler) == [("0", 1), ("1", 10)]
    assert run_step(scheduler) == [("0", 1), ("1", 9)]
    assert run_step(scheduler) == [("0", 1), ("1", 1)]


def test_no_more_than_the_limit_run_and_the_others_follow_in_order() -> None:
    scheduler = Scheduler(Limits(parallel=2, chunk=100, page_size=4), PagePool(100))
    sequences = [make_sequence(order, 3) for order in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert [name for name, _ in run_step(scheduler)] == ["0", "1"]
    scheduler.remove(sequences[0])
    assert [name for name, _ in run_step(scheduler)] == ["1", "2"]


def test_the_newest_is_preempted_when_pages_run_out_and_starts_again() -> None:
    scheduler = Scheduler(Limits(parallel=4, chunk=100, page_size=4), pool := PagePool(4))
    old, new = make_sequence(0, 7), make_sequence(1, 6)
    scheduler.add(old)
    scheduler.add(new)
    assert run_step(scheduler) == [("0", 7), ("1", 6)]  # two pages each
    assert run_step(scheduler) == [("0", 1), ("1", 1)]
    assert run_step(scheduler) == [("0", 1)]  # the ninth token needs a third page
    assert scheduler.preemptions == 1
    assert (new.cached, new.pages) == (0, [])
    assert list(scheduler.waiting) == [new]
    scheduler.remove(old)
    assert run_step(scheduler) == [("1", 8)]  # its prompt and what it had generated
    scheduler.remove(new)
    assert pool.free == pool.total


def test_a_preempted_sequence_starts_again_before_newer_ones() -> None:
    scheduler = Scheduler(Limits(parallel=2, chunk=100, page_size=4), PagePool(4))
    old, new, newest = make_sequence(0, 7), make_sequence(1, 6), make_sequence(2, 1)
    for sequence in (old, new, newest):
        scheduler.add(sequence)
    assert run_step(scheduler) == [("0", 7), ("1", 6)]  # the third waits for a place
    assert run_step(scheduler) == [("0", 1), ("1", 1)]
    assert run_step(scheduler) == [("0", 1)]  # the second gives way, and the third does not pass it
    assert list(scheduler.waiting) == [new, newest]
    scheduler.remove(old)
    assert run_step(scheduler) == [("1", 8), ("2", 1)]
    assert scheduler.running == [new, newest]


def test_several_preempted_sequences_start_again_in_their_order() -> None:
    scheduler = Scheduler(Limits(parallel=3, chunk=100, page_size=4), PagePool(6))
    sequences = [make_sequence(order, 7) for order in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert run_step(scheduler) == [("0", 7), ("1", 7), ("2", 7)]
    assert run_step(scheduler) == [("0", 1), ("1", 1), ("2", 1)]
    assert run_step(scheduler) == [("0", 1), ("1", 1)]  # both need a third page: the last has two
    for _ in range(3):
        run_step(scheduler)
    assert run_step(scheduler) == [("0", 1)]  # a fourth page each: the second gives way, too
    assert list(scheduler.waiting) == sequences[1:]
    assert scheduler.preemptions == 2
    scheduler.remove(sequences[0])
    assert [name for name, _ in run_step(scheduler)] == ["1"]  # 13 tokens and 9: 4 and 3 pages
    assert scheduler.running == [sequences[1]]


def test_a_sequence_starts_only_with_room_for_one_token_more_than_its_prompt() -> None:
    for prompt, starts in ((7, True), (8, False)):  # in pages of 4, of which 2 are left
        scheduler = Scheduler(Limits(parallel=2, chunk=100, page_size=4), PagePool(4))
        scheduler.add(make_sequence(0, 7))
        scheduler.add(make_sequence(1, prompt))
        assert (("1", prompt) in run_step(scheduler)) == starts


def test_a_sequence_that_cannot_start_does_not_let_a_smaller_one_pass() -> None:
    scheduler = Scheduler(Limits(parallel=4, chunk=100, page_size=4), PagePool(4))
    for order, prompt in enumerate((8, 12, 1)):
        scheduler.add(make_sequence(order, prompt))
    assert [name for name, _ in run_step(scheduler)] == ["0"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 30),
    st.integers(16, 40),
)
def test_every_sequence_ends_and_every_page_comes_back(wanted, parallel, chunk, pages) -> None:
    pool = PagePool(pages)
    scheduler = Scheduler(Limits(parallel, chunk, page_size=4), pool)
    sequences = [make_sequence(i, prompt, prompt + new) for i, (prompt, new) in enumerate(wanted)]
    for sequence in sequences:
        scheduler.add(sequence)
    alive = list(sequences)
    for _ in range(20_000):
        if not alive:
            break
        turns = run_step(scheduler)
        assert turns, "nobody can run"
        assert sum(rows for _, rows in turns) <= chunk + parallel
        assert len(turns) <= parallel
        held = [page for sequence in sequences for page in sequence.pages]
        assert len(held) == len(set(held)) == pool.used
        for sequence in [s for s in alive if len(s.tokens) >= s.limit]:
            scheduler.remove(sequence)
            alive.remove(sequence)
    assert not alive
    assert pool.free == pool.total
