"""Waits of a GPU are added up when they are over, and nobody waits for that."""

from dataclasses import dataclass, field

import pytest
import torch

from headroom.experts import copies
from headroom.experts.copies import WaitClock


@dataclass(eq=False)
class Gpu:
    """Events are reached in their order, when a test says so."""

    recorded: list["Event"] = field(default_factory=list)
    made: int = 0

    def event(self, enable_timing: bool = False) -> "Event":
        assert enable_timing
        self.made += 1
        return Event(self)

    def reach(self, at_ms: float, count: int) -> None:
        for event in self.recorded[:count]:
            event.at_ms = at_ms
        del self.recorded[:count]


@dataclass(eq=False)
class Event:
    gpu: Gpu
    at_ms: float | None = None

    def record(self, stream: object) -> None:
        self.at_ms = None
        self.gpu.recorded.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, later: "Event") -> float:
        assert self.at_ms is not None
        assert later.at_ms is not None
        return later.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(copies.torch.cuda, "Event", made.event)
    monkeypatch.setattr(copies.torch.cuda, "current_stream", lambda device: None)
    return made


def test_waits_are_added_up_once_they_are_over(gpu: Gpu) -> None:
    clock = WaitClock(torch.device("cuda"))
    assert [clock.timed(lambda: "found") for _ in range(2)] == ["found"] * 2
    assert clock.seconds() == 0.0
    gpu.reach(10.0, 1)
    assert clock.seconds() == 0.0  # it still waits
    gpu.reach(14.0, 1)
    assert clock.seconds() == pytest.approx(0.004)
    assert clock.seconds() == pytest.approx(0.004)
    gpu.reach(20.0, 1)
    gpu.reach(21.5, 1)
    assert clock.seconds() == pytest.approx(0.0055)


def test_events_are_used_again(gpu: Gpu) -> None:
    clock = WaitClock(torch.device("cuda"))
    for step in range(10):
        clock.timed(lambda: None)
        gpu.reach(step, 1)
        gpu.reach(step + 1, 1)
    assert gpu.made == 2
    assert clock.seconds() == pytest.approx(0.010)


def test_what_is_waited_for_is_asked_for_between_the_two_events(gpu: Gpu) -> None:
    clock = WaitClock(torch.device("cuda"))
    assert clock.timed(lambda: len(gpu.recorded)) == 1
    assert len(gpu.recorded) == 2
