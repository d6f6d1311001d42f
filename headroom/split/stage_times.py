"""StageTimes: what the steps of one stage took; GpuClock: measures the steps of a GPU."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch


@dataclass(slots=True)
class StageTimes:
    """What one stage's steps took, since the stage was started."""

    steps: int = 0
    busy_s: float = 0.0  # computing
    waited_s: float = 0.0  # a worker: for the rows of the stage before
    handover_bytes: int = 0  # rows for the stage after
    handover_s: float = 0.0  # copying rows, and a worker's waiting for room to send them

    def add(
        self,
        *,
        busy_s: float,
        waited_s: float = 0.0,
        handover_bytes: int = 0,
        handover_s: float = 0.0,
    ) -> None:
        """Add what one step took."""
        self.steps += 1
        self.busy_s += busy_s
        self.waited_s += waited_s
        self.handover_bytes += handover_bytes
        self.handover_s += handover_s

    def since(self, before: "StageTimes") -> "StageTimes":
        """Return what the steps took that were added after `before` was taken."""
        return StageTimes(
            steps=self.steps - before.steps,
            busy_s=self.busy_s - before.busy_s,
            waited_s=self.waited_s - before.waited_s,
            handover_bytes=self.handover_bytes - before.handover_bytes,
            handover_s=self.handover_s - before.handover_s,
        )

    def add_told(self, told: Mapping[str, Any]) -> None:
        """Add what a worker has told of a step."""
        self.add(
            busy_s=float(told["busy_s"]),
            waited_s=float(told["waited_s"]),
            handover_bytes=int(told["handover_bytes"]),
            handover_s=float(told["handover_s"]),
        )


# What the steps of each stage took, with the name of its device, in the order of the stages.
NamedTimes = list[tuple[str, StageTimes]]


def times_between(before: NamedTimes, after: NamedTimes) -> list[dict[str, Any]]:
    """Return what the steps of each stage took between two readings, as plain data.

    A worker that was started again in between has counted from 0, so all that it counted is new.
    """
    found = []
    for (device, old), (_, new) in zip(before, after, strict=True):
        restarted = new.steps < old.steps
        found.append({"device": device, **asdict(new if restarted else new.since(old))})
    return found


class _TimedStep(NamedTuple):
    begin: "torch.cuda.Event"
    end: "torch.cuda.Event"
    handover_bytes: int


class GpuClock:
    """Measures the steps of a GPU's stage by events, and waits for none of them."""

    def __init__(self) -> None:
        self._times = StageTimes()
        self._under_way: deque[_TimedStep] = deque()

    def begin(self) -> "torch.cuda.Event":
        """Return an event at the beginning of a step."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def end(self, begin: "torch.cuda.Event", handover_bytes: int = 0) -> None:
        """Note the end of a step; take the times of steps that the GPU has ended."""
        self._under_way.append(_TimedStep(begin, self.begin(), handover_bytes))
        self.times()

    def times(self) -> StageTimes:
        """Return what all steps took that the GPU has ended."""
        while self._under_way and self._under_way[0].end.query():  # type: ignore[no-untyped-call]
            step = self._under_way.popleft()
            busy_s = step.begin.elapsed_time(step.end) / 1e3
            self._times.add(busy_s=busy_s, handover_bytes=step.handover_bytes)
        return self._times
