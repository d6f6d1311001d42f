"""The counters of an engine, and snapshots of them."""

from collections import Counter

from headroom.engine.pages import PagePool
from headroom.engine.request import GenerationRequest, SamplingParams
from headroom.engine.scheduler import Limits, Scheduler
from headroom.engine.sequence import Sequence
from headroom.engine.stats import Counters, DeviceMemory


def waiting(tokens: int) -> Sequence:
    request = GenerationRequest(
        id="", prompt=(7,) * tokens, params=SamplingParams(), stop_ids=frozenset()
    )
    return Sequence(request, lambda event: None, limit=100)


def test_a_snapshot_tells_running_requests_from_waiting_ones() -> None:
    pool = PagePool(8)
    scheduler = Scheduler(Limits(parallel=2, chunk=64, page_size=4), pool)
    for _ in range(3):
        scheduler.add(waiting(4))
    assert len(scheduler.next_turns()) == 2
    found = Counters().snapshot(scheduler, pool, live=5, memory=())
    # Two run; one waits in the scheduler, and two more in the inbox.
    assert (found.requests_running, found.requests_waiting) == (2, 3)
    assert (found.cache_pages_used, found.cache_pages_total) == (pool.used, 8)
    assert found.cache_pages_used >= 2


def test_requests_that_end_while_they_run_never_count_as_waiting() -> None:
    pool = PagePool(8)
    scheduler = Scheduler(Limits(parallel=2, chunk=64, page_size=4), pool)
    scheduler.add(waiting(4))
    scheduler.next_turns()
    assert Counters().snapshot(scheduler, pool, live=0, memory=()).requests_waiting == 0


def test_a_snapshot_does_not_change_when_the_engine_goes_on() -> None:
    pool, counters = PagePool(4), Counters()
    scheduler = Scheduler(Limits(parallel=1, chunk=4, page_size=4), pool)
    counters.finished["stop"] += 1
    counters.prompt_tokens, counters.generated_tokens = 5, 3
    before = counters.snapshot(scheduler, pool, 0, ())
    counters.finished["stop"] += 1
    counters.steps += 4
    assert (before.requests_finished, before.steps) == ({"stop": 1}, 0)
    assert counters.tokens == 8
    assert before.started_at == counters.started_at > 0


def test_a_snapshot_reports_each_counter_under_its_own_name() -> None:
    pool = PagePool(7)
    pool.take(3)
    scheduler = Scheduler(Limits(parallel=2, chunk=8, page_size=4), pool)
    scheduler.preemptions = 5
    counters = Counters(
        finished=Counter({"stop": 2}),
        prompt_tokens=11,
        generated_tokens=13,
        guessed_tokens=37,
        accepted_tokens=19,
        held_back_tokens=41,
        steps=17,
        step_s=1.9,
        started_at=23.0,
    )
    memory = [DeviceMemory("cpu", 29, 31)]
    stats = counters.snapshot(scheduler, pool, live=4, memory=memory)
    assert counters.tokens == 24
    assert (stats.requests_running, stats.requests_waiting) == (0, 4)
    assert stats.requests_finished == {"stop": 2}
    assert (stats.prompt_tokens, stats.generated_tokens) == (11, 13)
    assert (stats.guessed_tokens, stats.accepted_tokens) == (37, 19)
    assert stats.held_back_tokens == 41
    assert (stats.steps, stats.step_s, stats.preemptions) == (17, 1.9, 5)
    assert (stats.cache_pages_used, stats.cache_pages_total) == (3, 7)
    assert (stats.started_at, stats.memory, stats.experts) == (23.0, memory, None)
