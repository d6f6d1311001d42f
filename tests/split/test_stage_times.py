"""What the steps of a stage took adds up, as a worker tells it and as it is measured here."""

import pytest
import torch

from headroom.split.stage_times import GpuClock, StageTimes, StepParts, times_between


def test_times_of_steps_add_up() -> None:
    times = StageTimes()
    told = {"busy_s": 0.25, "waited_s": 0.5, "handover_bytes": 100, "handover_s": 0.125}
    times.add_told({**told, "embed_s": 0.0625, "head_s": 0.03125, "type": "result", "step": 3})
    times.add(busy_s=0.5, handover_bytes=7, embed_s=0.25)
    times.add_head(1.0)
    assert times == StageTimes(2, 1.75, 0.5, 107, 0.125, 0.3125, 1.03125)


def test_the_parts_of_steps_are_those_of_all_stages_and_of_drawing() -> None:
    stages = [
        ("cpu#1", StageTimes(3, busy_s=4.0, waited_s=9.0, embed_s=0.5)),
        ("cpu#2", StageTimes(3, busy_s=3.0, head_s=1.0)),
    ]
    before = StepParts(0.25, 1.0, 0.5, 0.125)
    parts = StepParts.of(stages, sampling_s=2.0)
    assert parts == StepParts(embedding_s=0.5, layers_s=5.5, logits_s=1.0, sampling_s=2.0)
    assert parts.since(before) == StepParts(0.25, 4.5, 0.5, 1.875)
    assert sum(parts.summary().values()) == 4.0 + 3.0 + 2.0
    # Workers that were started again have counted from 0, and the engine that draws has not.
    assert parts.since(StepParts(9.0, 9.0, 9.0, 1.5)) == StepParts(0.5, 5.5, 1.0, 0.5)


def test_an_answer_is_told_what_the_stages_took_while_it_ran() -> None:
    before = [("cpu", StageTimes(2, 1.0, 0.5, 100, 0.25)), ("cpu:1", StageTimes())]
    after = [("cpu", StageTimes(5, 1.5, 0.75, 160, 0.5)), ("cpu:1", StageTimes(3, 2.0))]
    parts = {"embed_s": 0.0, "head_s": 0.0}
    zero = {"waited_s": 0.0, "handover_bytes": 0, "handover_s": 0.0, **parts}
    assert times_between(before, after) == [
        {
            "device": "cpu",
            "steps": 3,
            "busy_s": 0.5,
            "waited_s": 0.25,
            "handover_bytes": 60,
            "handover_s": 0.25,
            **parts,
        },
        {"device": "cpu:1", "steps": 3, "busy_s": 2.0, **zero},
    ]


def test_a_worker_that_was_started_again_meanwhile_has_counted_from_nothing() -> None:
    times = times_between([("cpu", StageTimes(9, 4.0))], [("cpu", StageTimes(2, 0.5))])
    assert (times[0]["steps"], times[0]["busy_s"]) == (2, 0.5)


class PlayedEvent:
    """A point in time that a GPU reaches when the test says so."""

    now_ms, reached_ms = 0.0, 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = -1.0

    def record(self) -> None:
        self.at_ms = PlayedEvent.now_ms

    def query(self) -> bool:
        return self.at_ms <= PlayedEvent.reached_ms

    def elapsed_time(self, later: "PlayedEvent") -> float:
        return later.at_ms - self.at_ms


def test_a_gpu_that_waits_for_rows_is_not_counted_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", PlayedEvent)
    PlayedEvent.reached_ms = 0.0
    clock = GpuClock()
    clock.receive()  # before any step, such as rows that only time the copies
    for begin_ms, received_ms, end_ms in ((0.0, 500.0, 750.0), (750.0, None, 1000.0)):
        PlayedEvent.now_ms = begin_ms
        clock.begin()
        if received_ms is not None:
            PlayedEvent.now_ms = received_ms
            clock.receive()
        PlayedEvent.now_ms = end_ms
        clock.end(handover_bytes=3)
    assert clock.times() == StageTimes()  # the GPU has ended no step yet
    PlayedEvent.reached_ms = 800.0
    assert clock.times() == StageTimes(1, busy_s=0.25, waited_s=0.5, handover_bytes=3)
    PlayedEvent.reached_ms = 1000.0
    assert clock.times() == StageTimes(2, busy_s=0.5, waited_s=0.5, handover_bytes=6)
    assert clock.times() == StageTimes(2, busy_s=0.5, waited_s=0.5, handover_bytes=6)
