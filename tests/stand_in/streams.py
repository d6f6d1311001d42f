"""Streams and events of the stand-in GPU: work is queued in order and may run late."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

_FIRST_HANDLE = 0x7000_0000_0000
Work = Iterator[None]  # one operation; whatever it does after a `yield` may come much later


class StandInError(RuntimeError):
    """A copy that failed, or the GPU refusing what it is asked to do."""


class Stream:
    """A queue of work that runs in order, a part at a time."""

    def __init__(self, device: object = None, priority: int = 0, gpu: "Queues | None" = None):
        self._gpu = gpu or Queues.current()
        self._waiting: deque[Work | Event] = deque()
        self.submitted = 0  # pieces of work that were ever queued
        self.finished = 0
        self.marks = 0  # events that were recorded
        # The events of the main stream that this stream waited for, by their number from 1.
        self.waited_marks: list[int] = []
        self._unreached: list[Event] = []
        self.cuda_stream = self._gpu.add(self)

    @property
    def busy(self) -> bool:
        """Whether any work is left."""
        self._pass_waits()
        return bool(self._waiting)

    def queue(self, work: Work) -> None:
        """Add work at the end of the queue."""
        self.submitted += 1
        self._waiting.append(work)

    def advance(self) -> bool:
        """Run one part of the first work; return False where there is none that may run."""
        with self._gpu.lock:
            self._pass_waits()
            if not self._waiting or isinstance(self._waiting[0], Event):
                return False
            work = self._waiting[0]
            if next(work, "end") == "end":
                self._waiting.popleft()
                self.finished += 1
                self._gpu.now_ms += 1.0
                self._pass_waits()
            return True

    def note_event(self, event: "Event") -> None:
        """Remember an event, so that it knows when it is reached."""
        self._unreached.append(event)
        self._reach_events()

    def _reach_events(self) -> None:
        for event in self._unreached:
            if event.is_reached():
                event.reached_ms = self._gpu.now_ms
        self._unreached = [event for event in self._unreached if not event.is_reached()]

    def drain(self) -> None:
        """Run everything that is queued here, and what that waits for."""
        self._gpu.check()
        while self.busy:
            if not self.advance():
                self._gpu.advance()

    def synchronize(self) -> None:
        """Let the host wait for everything that is queued here."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Tell whether all work has run."""
        return not self.busy

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event at the end of the queue and return it."""
        recorded = event or Event(gpu=self._gpu)
        recorded.record(self)
        return recorded

    def wait_event(self, event: "Event") -> None:
        """Let later work of this stream run after an event.

        Operations of the main stream run as soon as they are asked for, so that the event must
        happen at once there; from then on that stream reads what other streams copied before it.
        """
        if self is self._gpu.main:
            self.drain()
            event.synchronize()
            self._gpu.note_reader(event)
            return
        if event.stream is self._gpu.main:
            self.waited_marks.append(event.mark)
        self._waiting.append(event.snapshot())

    def wait_stream(self, other: "Stream") -> None:
        """Let later work of this stream run after all work of another."""
        self.wait_event(other.record_event())

    def _pass_waits(self) -> None:
        self._reach_events()
        while self._waiting and isinstance(first := self._waiting[0], Event) and first.is_reached():
            self._waiting.popleft()


class Event:
    """A point in a stream."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, gpu: "Queues | None" = None
    ) -> None:
        self._gpu = gpu or Queues.current()
        self.stream: Stream | None = None
        self.position = 0  # work of the stream that comes before
        self.mark = 0  # how many events had been recorded on the stream
        self.reached_ms: float | None = None  # when all work before it had run
        self._gpu.timed_events += enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Let the event stand for the end of a stream's queue."""
        self.stream = stream or self._gpu.current_stream()
        self.stream.marks += 1
        self.position, self.mark = self.stream.submitted, self.stream.marks
        self.reached_ms = None
        self.stream.note_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for the event."""
        (stream or self._gpu.current_stream()).wait_event(self)

    def is_reached(self) -> bool:
        """Tell whether all work before the event has run, well or not."""
        return self.stream is None or self.stream.finished >= self.position

    def query(self) -> bool:
        """Tell whether all work before the event has run; raise if a copy beside it failed.

        Time passes for the GPU while the host asks, unless a test lets it pass.
        """
        self._gpu.check()
        reached = self.is_reached()
        if not reached and not self._gpu.stepped:
            self._gpu.advance()
        if reached and self._gpu.broken and self.stream not in (None, self._gpu.main):
            raise StandInError("CUDA error: a copy failed")
        return reached

    def synchronize(self) -> None:
        """Let the host wait for the event: nothing else makes late work run."""
        while not self.query():
            if self._gpu.stepped:
                self._gpu.advance()

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds between two events that were reached."""
        assert self.reached_ms is not None
        assert end.reached_ms is not None
        return end.reached_ms - self.reached_ms

    def snapshot(self) -> "Event":
        """Return an event that stays where this one is now, even if this one is recorded again."""
        kept = Event(gpu=self._gpu)
        kept.stream, kept.position, kept.mark = self.stream, self.position, self.mark
        return kept


@dataclass(frozen=True, slots=True)
class KernelRun:
    """A kernel's place on the GPU's timeline, in microseconds."""

    name: str
    start: float
    end: float


class Queues:
    """All streams of a GPU, and the copies that they make."""

    _current: ClassVar[list["Queues"]] = []

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.main = Stream(gpu=self)
        self.asked = 0  # copies that did not hold up the host
        self.refused_at = self.failed_at = 0  # the copy, from 1, that is refused, or fails late
        self.broken = False  # a copy failed: those behind it do not run either
        self.lost = ""  # the error of every later call, once a kernel has failed
        # Whether copies beside the main stream begin only when a test lets them.
        self.stepped = False
        self.now_ms = 0.0  # the time: each piece of queued work takes a millisecond
        # Kernels that ran, also those of replayed graphs: each takes a microsecond, and so does the
        # gap before the next one.
        self.timeline: list[KernelRun] = []
        self.timed_events = 0  # events with a time that were ever made
        self.refuses_to_pin = False  # whether host memory cannot be pinned
        # Bytes of tensors that the GPU has room for; None: nobody counts them.
        self.memory_bytes: int | None = None
        self.held_bytes = 0  # by tensors, if they are counted
        self.pinned_by_torch: dict[int, int] = {}  # bytes of host memory by address
        self._chosen = threading.local()
        self._written: dict[Stream, list[tuple[int, int]]] = {}  # position, address of each copy
        self._read_since: dict[int, int] = {}  # marks of the main stream when a buffer was readable

    @classmethod
    def current(cls) -> "Queues":
        """Return the queues of the GPU that this machine is said to have."""
        return cls._current[-1]

    def add(self, stream: Stream) -> int:
        """Add a stream; return its handle: 0 for the main stream, else of more than 32 bits."""
        self.streams.append(stream)
        return 0 if len(self.streams) == 1 else _FIRST_HANDLE + 8 * len(self.streams)

    def by_handle(self, handle: int) -> Stream:
        """Return the stream with a handle."""
        (found,) = (stream for stream in self.streams if stream.cuda_stream == handle)
        return found

    def current_stream(self) -> Stream:
        """Return the stream that this thread's operations go to."""
        return getattr(self._chosen, "stream", self.main)

    @contextmanager
    def chosen_device(self) -> Iterator[None]:
        """Let this thread have chosen the GPU for as long as the block runs."""
        before = self.device_is_chosen
        self._chosen.device = True
        try:
            yield
        finally:
            self._chosen.device = before

    @property
    def device_is_chosen(self) -> bool:
        """Whether this thread has chosen the GPU, so that calls need not name it."""
        return getattr(self._chosen, "device", False)

    def choose(self, stream: Stream) -> None:
        """Let this thread's operations go to a stream."""
        self._chosen.stream = stream

    def advance(self) -> None:
        """Let every stream do a part of its next work, copies first."""
        moved = [stream.advance() for stream in (*self.streams[1:], self.main)]
        if not any(moved):
            raise AssertionError("the host waits for something that never happens")

    def check(self) -> None:
        """Raise the error of a GPU that is lost."""
        if self.lost:
            raise StandInError(self.lost)

    def finish(self) -> None:
        """Run all work."""
        self.check()
        while any(stream.busy for stream in self.streams):
            self.advance()

    def copy(
        self, stream: Stream, to: int, write: Callable[[], None], spoil: Callable[[], None]
    ) -> None:
        """Queue a copy to an address; its target is spoilt from the copy's begin to its end."""
        self.count()
        since = self._read_since.get(to, 0)
        if since and max(stream.waited_marks, default=0) <= since:
            raise AssertionError("the buffer may be read still")
        stream.queue(self._copying(self.asked, write, spoil))
        self._written.setdefault(stream, []).append((stream.submitted, to))
        if not self.stepped:
            stream.advance()

    def count(self) -> None:
        """Count a copy that is asked for; refuse it if a test wants that."""
        self.asked += 1
        if self.asked == self.refused_at:
            raise StandInError("CUDA error: a copy is refused")

    def note_kernel(self, name: str) -> None:
        """Put a kernel that runs now at the end of the timeline."""
        start = 2.0 * len(self.timeline)
        self.timeline.append(KernelRun(name, start, start + 1))

    def take(self, size: int) -> None:
        """Take memory for a tensor; raise if there is not enough of it."""
        if self.memory_bytes is not None and self.held_bytes + size > self.memory_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.held_bytes += size

    def give_back(self, size: int) -> None:
        """Give back the memory of a tensor."""
        self.held_bytes -= size

    def repair(self) -> None:
        """Let no copy fail from here on."""
        self.refused_at, self.failed_at, self.broken = 0, 0, False

    def _copying(self, number: int, write: Callable[[], None], spoil: Callable[[], None]) -> Work:
        spoil()
        yield
        self.broken |= number == self.failed_at
        if not self.broken:
            write()

    def note_reader(self, event: Event) -> None:
        """Remember that the main stream may read what was copied before an event."""
        if event.stream is None or event.stream is self.main:
            return
        copies = self._written.get(event.stream, [])
        for position, to in copies:
            if position <= event.position:
                self._read_since[to] = self.main.marks
        self._written[event.stream] = [one for one in copies if one[0] > event.position]
