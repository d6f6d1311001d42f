"""Steps that are launched before the last one is read: the same answers, nothing lost."""

import queue
from collections.abc import Callable, Iterator
from unittest.mock import MagicMock

import pytest

from headroom.engine.engine import Engine
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.split.gpu_stage import GpuResult
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.stage import TableModel, device_engine, host_engine, settings

PARAMS = SamplingParams(seed=3, temperature=0.9, max_tokens=60, ignore_eos=True)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """Let this machine have the stand-in GPU."""
    with stand_in_gpu(monkeypatch) as made:
        yield made


def submit(
    engine: Engine,
    name: str,
    params: SamplingParams,
    length: int = 5,
    stop_ids: frozenset[int] = frozenset(),
    also: Callable[[TokenEvent], None] = lambda event: None,
) -> "queue.SimpleQueue[TokenEvent]":
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def put(event: TokenEvent) -> None:
        also(event)
        events.put(event)

    prompt = tuple((7 * number + len(name)) % 290 for number in range(length))
    engine.submit(GenerationRequest(id=name, prompt=prompt, params=params, stop_ids=stop_ids), put)
    return events


def wait(events: "queue.SimpleQueue[TokenEvent]") -> list[TokenEvent]:
    found = [events.get(timeout=30)]
    while found[-1].finish_reason is None:
        found.append(events.get(timeout=30))
    return found


def told(events: list[TokenEvent]) -> list[object]:
    return [(event.token, event.generated_tokens, event.finish_reason) for event in events]


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, stage = device_engine(TableModel(), settings())
    order: list[str] = []
    step, tokens = stage.step, GpuResult.tokens

    def launch(batch, draws, received):  # type: ignore[no-untyped-def]
        order.append("launch")
        return step(batch, draws, received)

    def read(self: GpuResult) -> list[int | None]:
        order.append("read")
        return tokens(self)

    monkeypatch.setattr(stage, "step", launch)
    monkeypatch.setattr(GpuResult, "tokens", read)
    found = wait(submit(engine, "a", SamplingParams(max_tokens=4, ignore_eos=True)))
    engine.close()
    assert len(found) == 4
    assert order == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]


class Often:
    """An upkeep that is due every third token, and notes what is still to be read then."""

    latest = picks = None

    def __init__(self, unread: Callable[[], int]) -> None:
        self._unread, self._last = unread, 0
        self.seen: list[tuple[int, bool]] = []  # unread tokens, and whether nothing ran
        self.beside: set[int] = set()  # unread tokens where steps may run

    def go_on(self, resting: bool) -> None:
        self.beside.add(self._unread())

    def due(self, tokens: int, resting: bool) -> bool:
        return tokens - self._last >= 3

    def run(self, tokens: int, resting: bool) -> None:
        self.seen.append((self._unread(), resting))
        self._last = tokens

    def idle_s(self, tokens: int) -> float | None:
        return None

    def begin_request(self) -> None:
        return None

    def end_request(self, began: object) -> None:
        return None

    def close(self) -> None:
        self.seen.append((self._unread(), True))


def test_no_step_is_unread_while_experts_are_exchanged() -> None:
    plan, answers = settings(), []
    upkeep = Often(lambda: sum(one.unread for one in engine._scheduler.running))
    for looked_after in (False, True):
        engine, _ = device_engine(TableModel(), plan)
        if looked_after:
            engine.upkeep = upkeep  # type: ignore[assignment]
        running = [submit(engine, "x" * n, PARAMS) for n in (1, 2)]
        answers.append([told(wait(events)) for events in running])
        engine.close()
    assert answers[0] == answers[1]
    assert len(upkeep.seen) > 20
    assert {unread for unread, _ in upkeep.seen} == {0}
    assert (0, False) in upkeep.seen
    assert max(upkeep.beside) > 0  # upkeep that may run during steps does not wait for them


class Resting(Often):
    """Notes, between steps, what the engine calls resting and what its scheduler holds."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(lambda: 0)
        self._scheduler = engine._scheduler
        self.notes: set[tuple[bool, int, int]] = set()  # resting, running, waiting

    def go_on(self, resting: bool) -> None:
        scheduler = self._scheduler
        self.notes.add((resting, len(scheduler.running), len(scheduler.waiting)))


def test_the_engine_does_not_rest_while_a_preempted_request_waits_in_its_answer() -> None:
    engine = host_engine(
        TableModel(), settings(cache_tokens=320, context=256, chunk=256, prefix_cache=False)
    )
    engine.upkeep = upkeep = Resting(engine)  # type: ignore[assignment]
    # Five pages of 64: both prompts take two, and only one of the two answers can have a third.
    first, second = (submit(engine, name, PARAMS, length=120) for name in ("a", "b"))
    assert len(wait(first)) == len(wait(second)) == 60
    assert engine.stats().preemptions == 1
    engine.close()
    # When the first answer has ended, the second waits: nothing runs, and the engine does not rest.
    assert (False, 0, 1) in upkeep.notes
    assert {note for note in upkeep.notes if note[0]} == {(True, 0, 0)}


def test_expert_counters_are_read_once_for_requests_that_begin_in_one_step() -> None:
    engine, _ = device_engine(TableModel(), settings())
    engine.upkeep = upkeep = MagicMock(latest=None, picks=None)
    upkeep.idle_s.return_value, upkeep.due.return_value = None, False
    upkeep.end_request.return_value = None
    first: list[queue.SimpleQueue[TokenEvent]] = []

    def join(event: TokenEvent) -> None:  # on the engine's thread: both begin in its next step
        if event.generated_tokens == 3:
            first.extend(submit(engine, name, PARAMS) for name in ("b", "c"))

    wait(submit(engine, "a", PARAMS, also=join))
    for events in first:
        wait(events)
    engine.close()
    assert upkeep.begin_request.call_count == 2  # of the first one, and of the other two
    began = upkeep.begin_request.return_value
    assert [call.args for call in upkeep.end_request.call_args_list] == [(began,)] * 3


def test_preempted_sequences_go_on_with_tokens_that_were_not_read_yet() -> None:
    plan = settings(cache_tokens=320, context=256, chunk=32)
    answers, counts = [], []
    device, _ = device_engine(TableModel(), plan)
    for engine in (device, host_engine(TableModel(), plan)):
        running = [submit(engine, "x" * n, PARAMS, length=30 + 17 * n) for n in range(1, 7)]
        answers.append([told(wait(events)) for events in running])
        stats = engine.stats()
        counts.append((stats.preemptions > 0, stats.cache_pages_used))
        engine.close()
    assert answers[0] == answers[1]
    assert counts == [(True, 0), (True, 0)]


def test_a_step_of_a_new_kind_reads_what_the_last_one_drew() -> None:
    answers = []
    device, stage = device_engine(TableModel(), settings())
    captured = len(stage.kinds)
    for engine in (device, host_engine(TableModel(), settings())):
        late: list[queue.SimpleQueue[TokenEvent]] = []

        def join(event: TokenEvent, engine: Engine = engine, late: list = late) -> None:
            if event.generated_tokens in (5, 9, 14):  # short prompts while another request decodes
                late.append(submit(engine, "b" * event.generated_tokens, PARAMS, length=3))

        first = told(wait(submit(engine, "a", PARAMS, also=join)))
        answers.append([first, *(told(wait(events)) for events in late)])
        engine.close()
    assert len(stage.kinds) > captured
    assert answers[0] == answers[1]


def test_a_stop_token_is_the_last_that_is_emitted() -> None:
    device, _ = device_engine(TableModel(), settings())
    wanted = [event.token for event in wait(submit(device, "a", PARAMS))]
    stop = wanted[7]
    assert stop is not None
    params = SamplingParams(seed=3, temperature=0.9, max_tokens=60)
    events = submit(device, "a", params, stop_ids=frozenset({stop}))
    found = wait(events)
    assert [event.token for event in found] == wanted[: wanted.index(stop) + 1]
    assert found[-1].finish_reason == "stop"
    again = wait(submit(device, "a", PARAMS))
    assert [event.token for event in again] == wanted
    assert events.empty()
    assert device.stats().cache_pages_used == 0
    device.close()


def test_cancelling_drops_tokens_that_are_not_read_yet() -> None:
    device, _ = device_engine(TableModel(), settings())

    def cancel(event: TokenEvent) -> None:
        if event.generated_tokens == 3 and event.finish_reason is None:
            device.cancel("a")

    other = submit(device, "b", PARAMS)
    found = wait(submit(device, "a", PARAMS, also=cancel))
    assert told(found)[-1] == (None, 3, "cancelled")
    assert [event.generated_tokens for event in found] == [1, 2, 3, 3]
    assert len(wait(other)) == 60
    assert device.stats().prompt_tokens == 10
    device.close()


def test_plain_requests_share_steps_with_ones_that_must_be_read_at_once() -> None:
    plan = settings(parallel=4)
    strict = SamplingParams(seed=5, repetition_penalty=1.3, max_tokens=20, ignore_eos=True)
    weighed = SamplingParams(seed=6, logprobs=2, max_tokens=15, ignore_eos=True)
    answers = []
    device, _ = device_engine(TableModel(), plan)
    for engine in (device, host_engine(TableModel(), plan)):
        first = submit(engine, "a", PARAMS)
        running = [submit(engine, name, p) for name, p in (("bb", strict), ("ccc", weighed))]
        answers.append([told(wait(events)) for events in (first, *running)])
        engine.close()
    assert answers[0] == answers[1]
