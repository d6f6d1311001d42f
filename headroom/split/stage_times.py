"""StageTimes: what the steps of one stage took; GpuClock: measures the steps of a GPU."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch


@dataclass(slots=True)
class StageTimes:
    """What one stage's steps took, since the stage was started."""

    steps: int = 0
    busy_s: float = 0.0  # computing
    waited_s: float = 0.0  # for the rows of the stage before; a GPU's copy of them is part of it
    handover_bytes: int = 0  # rows for the stage after
    handover_s: float = 0.0  # copying rows on a CPU, and a worker's waiting for room to send them
    # Parts of `busy_s`; 0 on a GPU, whose captured steps are not divided.
    embed_s: float = 0.0  # looking tokens up
    head_s: float = 0.0  # final norm and logits

    def add(
        self,
        *,
        busy_s: float,
        waited_s: float = 0.0,
        handover_bytes: int = 0,
        handover_s: float = 0.0,
        embed_s: float = 0.0,
        head_s: float = 0.0,
    ) -> None:
        """Add what one step took."""
        self.steps += 1
        self.busy_s += busy_s
        self.embed_s += embed_s
        self.head_s += head_s
        self.waited_s += waited_s
        self.handover_bytes += handover_bytes
        self.handover_s += handover_s

    def add_head(self, seconds: float) -> None:
        """Add what the logits of a step took, after its layers."""
        self.busy_s += seconds
        self.head_s += seconds

    def since(self, before: "StageTimes") -> "StageTimes":
        """Return what the steps took that were added after `before` was taken."""
        return StageTimes(
            steps=self.steps - before.steps,
            busy_s=self.busy_s - before.busy_s,
            waited_s=self.waited_s - before.waited_s,
            handover_bytes=self.handover_bytes - before.handover_bytes,
            handover_s=self.handover_s - before.handover_s,
            embed_s=self.embed_s - before.embed_s,
            head_s=self.head_s - before.head_s,
        )

    def add_told(self, told: Mapping[str, Any]) -> None:
        """Add what a worker has told of a step."""
        self.add(
            busy_s=float(told["busy_s"]),
            waited_s=float(told["waited_s"]),
            handover_bytes=int(told["handover_bytes"]),
            handover_s=float(told["handover_s"]),
            embed_s=float(told["embed_s"]),
            head_s=float(told["head_s"]),
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


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of all steps on CPUs, by what they were spent on."""

    embedding_s: float = 0.0
    layers_s: float = 0.0
    logits_s: float = 0.0  # the final norm and the head
    sampling_s: float = 0.0  # drawing tokens from logits

    @classmethod
    def of(cls, stages: NamedTimes, sampling_s: float) -> "StepParts":
        """Return the parts of what all stages took, and of what drawing took."""
        embed_s = sum(times.embed_s for _, times in stages)
        head_s = sum(times.head_s for _, times in stages)
        busy_s = sum(times.busy_s for _, times in stages)
        return cls(embed_s, busy_s - embed_s - head_s, head_s, sampling_s)

    def since(self, before: "StepParts") -> "StepParts":
        """Return the parts of the steps that ran after `before` was taken.

        Workers that were started again in between have counted from 0, so all of theirs is new.
        """
        if self.layers_s < before.layers_s:
            return replace(self, sampling_s=self.sampling_s - before.sampling_s)
        return StepParts(
            self.embedding_s - before.embedding_s,
            self.layers_s - before.layers_s,
            self.logits_s - before.logits_s,
            self.sampling_s - before.sampling_s,
        )

    def summary(self) -> dict[str, float]:
        """Return the seconds of each part, by its name."""
        return {
            "embedding": self.embedding_s,
            "layers": self.layers_s,
            "logits": self.logits_s,
            "sampling": self.sampling_s,
        }


class _TimedStep(NamedTuple):
    begin: "torch.cuda.Event"
    received: "torch.cuda.Event"  # the rows of the stage before were there
    end: "torch.cuda.Event"
    handover_bytes: int


class GpuClock:
    """Measures the steps of a GPU's stage by events, and waits for none of them.

    One thread runs the steps; any thread may ask for their times.
    """

    def __init__(self) -> None:
        self._times = StageTimes()
        self._begin: torch.cuda.Event | None = None  # of the step that is being launched
        self._received: torch.cuda.Event | None = None
        self._under_way: deque[_TimedStep] = deque()
        self._lock = threading.Lock()  # guards `_times` and `_under_way`

    def begin(self) -> None:
        """Note the beginning of a step."""
        self._begin = self._received = _event()

    def receive(self) -> None:
        """Note that the rows of the stage before have been copied, if a step has begun."""
        if self._begin is not None:
            self._received = _event()

    def end(self, handover_bytes: int = 0) -> None:
        """Note the end of a step; take the times of steps that the GPU has ended."""
        assert self._begin is not None
        assert self._received is not None
        step = _TimedStep(self._begin, self._received, _event(), handover_bytes)
        self._begin = None
        with self._lock:
            self._under_way.append(step)
        self.times()

    def times(self) -> StageTimes:
        """Return what all steps took that the GPU has ended."""
        with self._lock:
            while self._under_way and self._under_way[0].end.query():  # type: ignore[no-untyped-call]
                step = self._under_way.popleft()
                self._times.add(
                    busy_s=step.received.elapsed_time(step.end) / 1e3,
                    waited_s=step.begin.elapsed_time(step.received) / 1e3,
                    handover_bytes=step.handover_bytes,
                )
            return replace(self._times)


def _event() -> "torch.cuda.Event":
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
