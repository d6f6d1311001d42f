"""WaitClock: how long a GPU's computing waited for something, without anybody waiting for it."""

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

Found = TypeVar("Found")
Pair = tuple[torch.cuda.Event, torch.cuda.Event]  # before and after a wait


class WaitClock:
    """Adds up the times between events of the computing's stream, once they are reached."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: deque[Pair] = deque()  # in the order that they will be reached
        self._free: list[Pair] = []
        self._seconds = 0.0

    def timed(self, wait: Callable[[], Found]) -> Found:
        """Let the computing wait as asked for, and measure it; the host goes on at once."""
        self._add_up()
        before, after = self._free.pop() if self._free else (_event(), _event())
        stream = torch.cuda.current_stream(self._device)
        before.record(stream)
        found = wait()
        after.record(stream)
        self._pairs.append((before, after))
        return found

    def seconds(self) -> float:
        """Return all waits so far that are over."""
        self._add_up()
        return self._seconds

    def _add_up(self) -> None:
        while self._pairs and self._pairs[0][1].query():  # type: ignore[no-untyped-call]
            before, after = pair = self._pairs.popleft()
            self._seconds += float(before.elapsed_time(after)) / 1000
            self._free.append(pair)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
